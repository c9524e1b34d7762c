"""The catalog of recipe keys, the keys that a recipe cannot set, and the environment variables. No torch.

``make keys`` writes the core's keys from ``configs.py`` into ``keys.json``. Extensions declare theirs as dataclasses.

    catalogue()["seed"]  # {"type": "int", "default": 42, "help": ..., "min": 0, ...}
"""

import difflib
import functools
import json
import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import config_error
from grpo_recipes.paths import CODE_VARIABLE, display_path, find_code_root
from grpo_recipes.recipe.extensions import extensions, load, merged
from grpo_recipes.recipe.fields import entries_of

CATALOGUE_FILE = Path(__file__).with_name("keys.json")
TOPICS_FILE = Path(__file__).with_name("topics.yaml")
_SCHEMA_LINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)", re.MULTILINE)


def expand_names(*rows: tuple[str, str]) -> dict[str, str]:
    """Return name -> text for all rows. A row has names, separated by spaces, and the text that they share."""
    return {name: text for names, text in rows for name in names.split()}


# TRL's keys that the launcher sets, or that have no meaning here -> the fix. They are not in the catalog.
OWNED_KEYS = expand_names(
    ("output_dir", "remove it; the run directory is <run_root>/<run_name>-<timestamp>, set run_root and run_name"),
    ("deepspeed", "use accelerator: zero2 or zero3"),
    ("fsdp fsdp_config", "use accelerator: fsdp2"),
    ("parallelism_config", "use accelerator"),
    ("local_rank", "remove it; accelerate sets it"),
    ("do_train do_predict", "remove it; the run always trains, and there is nothing to predict"),
    ("do_eval", "remove it; eval_strategy decides whether the run evaluates"),
    ("use_cpu", "remove it; the environment's device decides (DEVICE=cpu)"),
    ("resume_from_checkpoint", "use grpo launch --resume last or --resume RUN_DIR"),
    ("logging_strategy logging_first_step", "remove it; every optimizer step is logged"),
    ("enable_jit_checkpoint", "remove it; SIGTERM saves here already, and all ranks save the same step"),
    ("auto_find_batch_size", "remove it; it changes the batch, lower per_device_train_batch_size instead"),
    ("hub_token", "remove it and export HF_TOKEN"),
    ("hub_always_push", "remove it; push_to_hub pushes once, at the end of the run"),
    ("use_transformers_paged", "use use_transformers_continuous_batching"),
    ("vllm_importance_sampling_cap", "use vllm_importance_sampling_clip_max"),
    ("log_completions_hub_repo", "remove it; sampled completions are in report.html"),
    ("data_seed", "use seed"),
    ("remove_unused_columns", "remove it; rewards read the other columns"),
    ("include_num_input_tokens_seen", "remove it; the trainer counts tokens itself"),
    ("metric_for_best_model greater_is_better", "remove it; the best evaluation has the largest eval_reward"),
    ("trackio_space_id trackio_static_space_id trackio_bucket_id", "remove it; report_to: trackio writes local files"),
    # TRL's GRPO trainer has its own sampler, loss and evaluation, and reads none of these keys.
    (
        "label_smoothing_factor label_names train_sampling_strategy length_column_name prediction_loss_only "
        "include_for_metrics batch_eval_metrics eval_do_concat_batches eval_accumulation_steps eval_use_gather_object "
        "log_multimodal max_tool_calling_iterations ignore_bias_buffers",
        "remove it; GRPO does not read it",
    ),
)

# Values that TRL accepts, but this package does not: key -> value -> the fix.
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "hub_strategy": expand_names(
        (
            "every_save checkpoint all_checkpoints",
            "set hub_strategy: end; push_to_hub pushes once, at the end of the run",
        )
    ),
}

# Key -> more search words of `grpo keys WORD`.
_SEARCH_WORDS = {
    "accelerator": "deepspeed fsdp zero parallel sharding",
    "chat_template_kwargs": "think thinking reasoning enable_thinking",
    "max_completion_length": "tokens length think thinking",
    "model_init_kwargs": "kernels liger",
    "overlap_generation": "async staleness",
    "prompts_per_step": "batch batch_size",
    "report_to": "wandb tensorboard mlflow trackio swanlab comet comet_ml tracker logger logging",
    "reward_funcs": "think format judge",
    "shuffle_dataset": "curriculum",
    "use_peft": "lora adapter qlora",
    "use_vllm": "vllm server",
    "wandb_entity": "wandb",
    "wandb_project": "wandb",
    "wandb_run_group": "wandb",
    "weight_sync": "nccl bridge",
}

# Environment variable -> the key that it sets. A flag overrides the variable, and the variable overrides the recipe.
_ENVIRONMENT_KEYS: dict[str, str] = {
    "RUN_NAME": "run_name",
    "RUN_ROOT": "run_root",
    "VLLM_MODE": "vllm_mode",
    "VLLM_PORT": "vllm_server_port",
    "VLLM_GROUP_PORT": "vllm_group_port",
    "VLLM_TP_SIZE": "vllm_tensor_parallel_size",
    "VLLM_MAX_LEN": "vllm_max_model_length",
    "VLLM_MEM_UTIL": "vllm_gpu_memory_utilization",
    "MASTER_PORT": "main_process_port",
    "ACCELERATOR": "accelerator",
    "TRAIN_SEED": "seed",
    "MAXENT_OBJECTIVE": "maxent_objective",
    "MAXENT_TAU": "maxent_tau",
    "MAXENT_BETA": "maxent_beta",
    "MAXENT_Q_TEMPERATURE": "maxent_q_temperature",
    "MAXENT_Q_EPS": "maxent_q_epsilon",
    "MAXENT_LENGTH_NORM_REF": "maxent_length_normalize_ref",
    "WANDB_PROJECT": "wandb_project",
    "WANDB_ENTITY": "wandb_entity",
    "WANDB_RUN_GROUP": "wandb_run_group",
}


def environment_keys() -> dict[str, str]:
    """Return the key that each environment variable sets, including the variables of extensions."""
    return {**_ENVIRONMENT_KEYS, **merged("variables")}


def search_words() -> dict[str, str]:
    """Return additional search words of `grpo keys WORD`, by key."""
    return {**_SEARCH_WORDS, **merged("search_words")}


@functools.cache
def _read_generated() -> dict[str, Any]:
    """Return the content of ``keys.json``; cached."""
    content: dict[str, Any] = json.loads(CATALOGUE_FILE.read_text(encoding="utf-8"))
    return content


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Return every recipe key, including the keys of extensions: name -> type, default, help and limits."""
    return dict(sorted({**_read_generated()["keys"], **extension_entries()}.items()))


def keys_by_topic() -> dict[str, list[str]]:
    """Return the keys of each topic in the order of ``topics.yaml``; the last topic contains all other keys."""
    topics: dict[str, str] = yaml.safe_load(TOPICS_FILE.read_text(encoding="utf-8"))
    keys: dict[str, list[str]] = {title: [] for title in topics}
    remaining = list(catalogue())
    for title, patterns in topics.items():
        for pattern in patterns.split():
            matches = [name for name in remaining if fnmatch(name, pattern)]
            keys[title] += matches
            remaining = [name for name in remaining if name not in matches]
    return keys


@functools.cache
def extension_entries() -> dict[str, dict[str, Any]]:
    """Return the keys of extensions in the format of ``catalogue``; raise ConfigError if a key is declared twice."""
    entries: dict[str, dict[str, Any]] = {}
    for extension in extensions():
        keys = entries_of(extension.load("keys")) if extension.keys else {}
        for name in keys:
            if name in entries or name in _read_generated()["keys"]:
                message = f"the extension {extension.name} declares '{name}', but the key exists already"
                raise config_error("extensions", message, f"rename the key in {extension.keys}")
        entries |= keys
    return entries


@functools.cache
def nested_catalogue() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the keys of mappings inside a key, e.g. ``dataset_mixture.datasets`` -> name -> type, default, help."""
    return {
        **_read_generated()["nested"],
        **{path: entries_of(load(config)) for path, config in merged("nested").items()},
    }


def passed_catalogue() -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """Return the names in dictionaries that other libraries receive: key -> variant -> name -> type and limits.

    A variant is the value of another key that decides which names the library reads, or an empty string.
    """
    passed: dict[str, dict[str, dict[str, dict[str, Any]]]] = _read_generated()["passed"]
    return passed


def catalogue_trl() -> str:
    """Return the version of TRL that the catalog was made from."""
    return str(_read_generated()["trl"])


def run_root(environment: Mapping[str, str]) -> Path:
    """Return the folder of run directories if no recipe is named: RUN_ROOT, or the default of the key."""
    return Path(os.path.expanduser(environment.get("RUN_ROOT") or catalogue()["run_root"]["default"]))


def nearest_of(name: str, names: Iterable[str]) -> str | None:
    """Return the name in ``names`` that ``name`` misspells; None if they are all different words."""

    def similar(text: str, other: str, least_ratio: float) -> bool:
        """Return whether two texts have at least this ratio of equal characters."""
        return difflib.SequenceMatcher(None, text, other).ratio() >= least_ratio

    words = name.lower().split("_")
    for candidate in difflib.get_close_matches(name, list(names), n=3, cutoff=0.6):
        parts = candidate.lower().split("_")
        by_word = len(words) == len(parts) and all(similar(*pair, 0.81) for pair in zip(words, parts, strict=True))
        swapped = sorted(name.lower()) == sorted(candidate.lower())  # letters or words in another order
        if by_word or swapped or similar("".join(words), "".join(parts), 0.92):
            return candidate
    return None


def schema_file() -> Path:
    """Return the path of the JSON schema of recipes in this installation."""
    return find_code_root() / "recipes" / "schema.json"


def schema_line(recipe: Path) -> str:
    """Return the comment for a recipe that gives editors the path of the schema, relative if possible."""
    folder, schema = recipe.resolve().parent, schema_file().resolve()
    nothing_shared = os.path.commonpath([folder, schema]) == "/"
    return f"# yaml-language-server: $schema={schema if nothing_shared else os.path.relpath(schema, folder)}"


def schema_note(recipe: Path) -> str | None:
    """Return a note if the recipe names a schema file that does not exist, e.g. after it was copied; else None."""
    match = _SCHEMA_LINE.search(recipe.read_text(encoding="utf-8"))
    if match is None or match[1].startswith(("http:", "https:")) or (recipe.parent / match[1]).is_file():
        return None
    fix = f"for completion in editors begin the file with: {schema_line(recipe)}"
    return f"{display_path(recipe)} names a schema that does not exist; {fix}"


SIGNAL_LEAD, SRUN_OPTIONS, DEFAULT_RECIPE = "GRPO_SIGNAL_LEAD", "GRPO_SRUN_OPTIONS", "GRPO_DEFAULT_RECIPE"
# Variables that the launcher reads, in addition to environment_keys(), with their help.
READ_VARIABLES: dict[str, str] = {
    "CONFIG": "the recipe, if the command line names none",
    "CONFIG_FILE": "an accelerate file instead of TRL's packaged file",
    "TRAIN_ENTRYPOINT": "entry script of the trainers; by default src/grpo.py, or src/maxent-grpo.py for MaxEnt runs",
    "MAXENT": "1 selects src/maxent-grpo.py and a MaxEnt recipe, 0 rejects MaxEnt recipes",
    "LOGDIR": "folder for the logs of a launch; logs by default. The next two variables name files",
    "SERVER_LOG": "file of the server's log; a number is added if the file exists",
    "TRAINING_LOG": "file of the trainers' log; a number is added if the file exists",
    "ACC_TEE": "1, 2 or 3: each line of the trainers' output, errors or both begins with its rank (accelerate --tee)",
    "VLLM_MODEL": "must equal the recipe's model_name_or_path",
    "CACHE_ROOT": "folder for downloads if HF_HOME is not set; .cache in the repository by default",
    "HF_HOME": "folder in which the clients of the hub keep downloads and the login",
    "HF_ENDPOINT": "address of the hub, e.g. a mirror",
    "HF_HUB_OFFLINE": "1: never connect to the hub; 0: a run's processes may connect although everything is local",
    "HF_TOKEN": "the login at the hub; never written or printed",
    "OPENAI_API_KEY": "the key of an external server for grpo generate, chat and eval; never written or printed",
    "GRPO_HOME": "the repository, if training.sh is submitted from another folder",
    CODE_VARIABLE: "the frozen code of a submitted run; its batch script sets this variable",
    "CUDA_VISIBLE_DEVICES": "the GPUs to use",
    "SLURM_GPU_FLAG_STYLE": "none, gpus or gres: how grpo submit requests GPUs; overrides the profile",
    "NO_COLOR": "any text: no colors on a terminal",
    "SLURM_TMPDIR": "node-local folder for temporary files",
    "NETWORK_INTERFACE": "the network interface by which the nodes of a job reach each other, e.g. ib0",
    "NCCL_SOCKET_IFNAME": "NCCL's variable: the nodes' interface if NETWORK_INTERFACE is unset",
    "GLOO_SOCKET_IFNAME": "gloo's variable: the nodes' interface if the two above are unset",
    SIGNAL_LEAD: "seconds before the time limit at which Slurm sends USR1; the profile's signal_lead, or 300",
    DEFAULT_RECIPE: "1, set by training.sh: use the default recipe of the device if no recipe is named",
    SRUN_OPTIONS: "further options of the srun that reaches the nodes of a job; the profile's srun_options",
}
# Variables that training.sh, scripts/setup.sh and slurm/train.slurm read before Python starts.
SHELL_VARIABLES: dict[str, str] = {
    "DEVICE": "cuda, cpu or auto: the packages to install",
    "ENV_MODE": "venv or conda: the kind of environment to create",
    "ENV_DIR": "folder of the environment; .venv in the repository by default",
    "PYTHON": "the Python that creates the environment",
    "EXTRAS": "optional packages to install: environments, search, both (the default), or none",
    "MODULES": "modules to load first, separated by spaces",
    "ENV_ACTIVATE": "a file to source: use the environment that it activates, unchanged",
    "CONDA_ENV": "an existing conda environment to use, unchanged",
    "CONDA_SH": "path of conda's etc/profile.d/conda.sh",
    "MODEL": "for slurm/train.slurm: --model, the folder under recipes/",
    "TASK": "for slurm/train.slurm: --task, grpo or maxent",
    "CONFIG_SUFFIX": "for slurm/train.slurm: --config, the recipe config_SUFFIX.yaml",
    "TP": "for slurm/train.slurm: --tp, GPUs of the vLLM server",
    "DP": "for slurm/train.slurm: --dp, replicas of the vLLM server",
    "OPTIONAL_ARGS": "for slurm/train.slurm: --args, further options of grpo launch",
}


def variables() -> dict[str, str]:
    """Return every environment variable with its help, for `grpo keys --env`."""
    key_variables = {name: f"sets the key {key}" for name, key in environment_keys().items()}
    return {**key_variables, **READ_VARIABLES, **SHELL_VARIABLES}
