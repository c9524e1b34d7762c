"""The flags and variables of the two trainers for Atropos, each with what becomes of it: tables of the Atropos door.

``FLAGS`` are those of Atropos' example trainer, of its server and of its environments, ``VARIABLES`` those of both
trainers. ``cli.atropos`` makes its parser and its help of them, ``atropos_keys`` translates, and a page has tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_recipes.recipe.converters import BRIDGE_MODES

AUTO = "auto"
MODES = (*BRIDGE_MODES, AUTO)
ADAPTERS = ("lora_only", "lora_restart")
SHARED = "shared_vllm"
DOOR = "python src/atropos_grpo.py"
OF_THE_SCRIPT = "run_atropos_grpo.sh"


@dataclass(frozen=True)
class Flag:
    """What becomes of one flag."""

    names: tuple[str, ...]  # the first is what messages call it
    about: str  # what it does here; of a refused one, what to write instead
    key: str = ""  # the key of a recipe that takes its value; none where the door reads it
    default: str | None = None  # what it is where neither it nor a recipe is given
    theirs: str = ""  # their default and why it is another, where it is
    values: Mapping[str, str] = field(default_factory=dict)  # its choices -> what the key gets for each
    switch: bool = False  # takes no value
    words: bool = False  # takes several
    modes: tuple[str, ...] = ()  # weight bridge modes in which it means something; all where empty
    refused: bool = False

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.names[0]

    def help(self) -> str:
        """Return its line of the help, with its default."""
        default = "" if self.default is None else f" (default {self.default})"
        return f"{self.about}{default}{f'; {self.theirs}' if self.theirs else ''}"


def _flag(names: str, about: str, key: str = "", default: str | None = None, **more: object) -> Flag:
    return Flag(tuple(names.split()), about, key, default, **more)  # type: ignore[arg-type]


def _refused(names: str, instead: str, switch: bool = False) -> Flag:
    return Flag(tuple(names.split()), instead, refused=True, switch=switch)


_STEPS = "a step registers batch size x accumulation x training processes sequences at run-api"
_PROCESSES = "remove it; nothing read it there either. num_processes says how many train, on the nodes of the job"
_ADAFACTOR = "remove it; transformers' Trainer runs Adafactor without it, at the rate of --lr"
_LAYERS = "remove it; all layers are trained, or with --weight-bridge-mode lora_only those of --lora-target-modules"

# fmt: off
FLAGS: tuple[Flag, ...] = (
    # Model and training.
    _flag("--model-name --model", "the model: a hub id or a folder; required where no recipe is named",
        "model_name_or_path"),
    _flag("--training-steps", "optimizer steps", "max_steps", "10"),
    _flag("--batch-size", f"sequences of one forward pass on one device; {_STEPS}", "per_device_train_batch_size", "2"),
    _flag("--gradient-accumulation-steps", "forward passes of an optimizer step", "gradient_accumulation_steps", "32"),
    _flag("--lr", "learning rate", "learning_rate", "1e-5"),
    _flag("--warmup-steps", "steps in which the learning rate rises to --lr, where it stays", "warmup_steps", "0"),
    _flag("--optimizer", "the optimizer", "optim", "adamw",
        values={"adamw": "adamw_torch", "adamw_8bit": "adamw_8bit", "adafactor": "adafactor"},
        theirs="theirs is adamw_8bit, which needs the package bitsandbytes"),
    _flag("--seq-len", "most tokens of a sequence: a quarter is max_prompt_length, the rest max_completion_length; "
        "longer ones are left out and counted", default="2048"),
    _flag("--clip-eps", "the ratio to the policy that sampled is clipped to 1 - EPS and 1 + EPS", "epsilon", "0.2"),
    _flag("--dtype", "dtype of weights and server", "dtype", "bfloat16",
        values={"bfloat16": "bfloat16", "float16": "float16", "auto": "auto", "float32": "float32"},
        theirs="float32 with shared_vllm, whose only copy is the one that is updated, and on CPU"),
    _flag("--device", "cuda or cpu: the device of the environment, which make setup chose", default="that one"),
    _flag("--save-path", "folder of run directories, in which everything of a run is", "run_root",
        "trained_model_checkpoints"),
    _flag("--checkpoint-interval", "steps between checkpoints; 0 keeps the final model alone", default="3"),
    _flag("--log-dir", "folder of the logs of all processes", default="logs"),
    # Server and weights.
    _flag("--weight-bridge-mode", "how new weights reach the server. none: a new server with a checkpoint. "
        "shared_vllm: one copy for trainer and server. lora_only: the adapter alone. lora_restart: a new server with "
        "the merged model. auto: as grpo launch does by itself", default="none", values={mode: mode for mode in MODES}),
    _flag("--vllm-restart-interval", "optimizer steps between two transfers of weights; their groups are registered as "
        "one batch", default="1", theirs="theirs is 3, with which groups are of older weights"),
    _flag("--single-copy", "the same as --weight-bridge-mode shared_vllm", switch=True),
    _flag("--vllm-config-path", "not read, but it must exist: the trainer asks the server itself where the copy is"),
    _flag("--vllm-port", "port of the vLLM server", "vllm_server_port", "9001",
        theirs="in a Slurm job one of the job's"),
    _flag("--gpu-memory-utilization --vllm-gpu-memory-utilization", "share of a GPU's memory that vLLM takes",
        "vllm_gpu_memory_utilization", "0.45"),
    _flag("--max-model-len", "most tokens of a sequence that the server takes", "vllm_max_model_length", "4096"),
    # Adapters.
    _flag("--lora-r", "rank of the adapter", "lora_r", "16", modes=ADAPTERS),
    _flag("--lora-alpha", "scaling of the adapter", "lora_alpha", "32", modes=ADAPTERS),
    _flag("--lora-dropout", "share of the adapter's inputs that training drops", "lora_dropout", "0.0", modes=ADAPTERS,
        theirs="theirs is 0.05, with which log-probs differ from those of the policy that sampled"),
    _flag("--lora-target-modules", "layers that get an adapter, by the ends of their names", "lora_target_modules",
        "q_proj v_proj", words=True, modes=ADAPTERS),
    # Groups.
    _flag("--environment", "the environment that the launch starts: arithmetic, dataset, or a BaseEnv of yours as "
        "file.py:Class; theirs runs in another terminal", "atropos_environment"),
    _flag("--atropos-url", "a run-api that runs already, e.g. http://localhost:8000; without it the launch starts one",
        "atropos_api_url", theirs="theirs is http://localhost:8000"),
    # Reports.
    _flag("--use-wandb", "report to W&B", switch=True),
    _flag("--wandb-project", "W&B project", "wandb_project"),
    _flag("--wandb-group", "W&B group", "wandb_run_group"),
    _flag("--debug-loading", "log how the model is loaded, as TRANSFORMERS_VERBOSITY=debug does", switch=True),
    # Flags of the example trainer that have no equal.
    _refused("--vllm-gpu", "remove it; the server has the first GPU of CUDA_VISIBLE_DEVICES, and with shared_vllm the "
        "first trainer has it too"),
    _refused("--adafactor-scale-parameter", _ADAFACTOR, switch=True),
    _refused("--adafactor-relative-step", _ADAFACTOR, switch=True),
    _refused("--train-layer-indices", _LAYERS),
    _refused("--lora-layer-indices", "write the layers' names, e.g. --lora-target-modules layers.20.self_attn.q_proj"),
    _refused("--trainer-rank", _PROCESSES),
    _refused("--world-size", _PROCESSES),
    _refused("--init-method", _PROCESSES),
    _refused("--num-inference-nodes", _PROCESSES),
    # Flags of its server.
    _refused("--port", "write --vllm-port for the server, or --atropos_port for run-api"),
    _flag("--enable-lora", "of their server: what --weight-bridge-mode lora_only does anyway, refused without that",
        switch=True),
    _flag("--enforce-eager", "of their server: vllm_enforce_eager, vLLM without CUDA graphs",
        switch=True),
    _flag("--max-lora-rank", "of their server: at least --lora-r; changes nothing, the server has room for --lora-r",
        modes=ADAPTERS),
)

# Flags of an Atropos environment, which is a process of its own there. Those that are keys of a recipe here, as the
# trainer needs them too, and those that the launch decides -> what to write. All others of --env. are fields of the
# environment's configuration, and part of atropos_environment_args.
FIELD_KEYS: Mapping[str, str] = {
    "--env.group_size": "num_generations",
    "--env.temperature": "temperature",
    "--env.chat_template": "chat_template",
}
ENVIRONMENT_FIELDS: Mapping[str, str] = {
    "--env.tokenizer_name": "remove it; the tokenizer is that of --model-name",
    "--env.use_wandb": "write --use-wandb: the trainer reports, its environments do not",
    "--env.max_token_length": "write --seq-len",
    "--env.rollout_server_url": "write --atropos-url",
    "--env.total_steps": "write --training-steps",
    "--env.batch_size": "write --batch-size and --gradient-accumulation-steps",
    "--env.chat_template_kwargs": "write --chat_template_kwargs",
    "--env.inference_weight": "write atropos_mixture in a recipe, with the weight of each environment",
    "--env.min_batch_allocation": "write atropos_mixture in a recipe, with the min_allocation of each environment",
    "--env.wandb_name": "remove it; an environment has the name of its class",
    "--openai.model_name": "remove it; the server serves --model-name",
    "--openai.base_url": "write --vllm-port: the launch starts the server and tells its environments where it is",
    "--openai.server_type": "write vllm, or remove it: environments ask a vLLM server",
    "--openai.api_key": "remove it; the launch gives its environments the token. An environment that you start "
    "yourself reads atropos_serve.yaml",
    "--server.port": "remove it; an environment does not take it either. The launch tells its environments where "
    "run-api is, and one that you start yourself takes --env.rollout_server_url URL",
}


@dataclass(frozen=True)
class Variable:
    """What becomes of one variable of the environment."""

    name: str
    about: str
    flag: str = ""  # that it stands for; the flag wins
    default: str | None = None  # of run_atropos_grpo.sh
    script: bool = False  # read only there


VARIABLES: tuple[Variable, ...] = (
    Variable("MODEL", "the model", "--model-name"),
    Variable("LOGDIR", "folder of the logs of all processes", "--log-dir"),
    Variable("ATROPOS_API_URL", f"a run-api that runs already; {OF_THE_SCRIPT} asks it for its status first",
        "--atropos-url"),
    Variable("VLLM_ENABLE_SHARED_WEIGHTS", "1 is what shared_vllm does anyway; anything else contradicts it"),
    Variable("MODEL_PATH", "the model", "--model-name", "Qwen/Qwen2.5-3B-Instruct", script=True),
    Variable("OUTPUT_DIR", "folder of run directories", "--save-path", "trained_model_checkpoints", script=True),
    Variable("NUM_GPUS", "GPUs of server and trainers; not read in a CPU environment", script=True),
    Variable("BATCH_SIZE", "sequences of a step, which are registered at run-api: whole groups", default="1024",
        script=True),
    Variable("MAX_EPOCHS", "optimizer steps: what environments send has no epochs", "--training-steps", "100",
        script=True),
    Variable("LORA_RANK", "0 trains all weights, more an adapter of that rank (--weight-bridge-mode lora_only)",
        default="0", script=True),
    Variable("INFERENCE_BACKEND", "vllm", default="vllm", script=True),
)
# fmt: on
BACKENDS = ("vllm",)
FLAG = {one.name: one for one in FLAGS}


def flag_rows() -> list[tuple[str, str, str]]:
    """Return each flag with its default and what it does here, in Markdown, for a page."""
    told = [
        (
            ", ".join(f"`{name}`" for name in one.names),
            "" if one.default is None else f"`{one.default}`",
            f"refused: {one.about}" if one.refused else "; ".join(filter(None, (one.about, one.theirs))),
        )
        for one in FLAGS
    ]
    fields = [(f"`{name}`", "", f"the key `{key}`") for name, key in FIELD_KEYS.items()]
    fields += [(f"`{name}`", "", f"refused: {instead}") for name, instead in ENVIRONMENT_FIELDS.items()]
    fields.append(("`--env.FIELD`", "", "any other field of the environment's configuration"))
    return [*told, ("`--benchmark`", "", "ends with the benchmark summary"), *fields]


def variable_rows() -> list[tuple[str, str, str]]:
    """Return each variable with its default and what it does, in Markdown, for a page."""

    def about(one: Variable) -> str:
        read_by = f", read by {OF_THE_SCRIPT}" if one.script else ""
        return f"{one.about}{f' (`{one.flag}`)' if one.flag else ''}{read_by}"

    return [(f"`{one.name}`", f"`{one.default}`" if one.default else "", about(one)) for one in VARIABLES]
