"""Translate flags and variables of Atropos trainers to recipe keys, as ``flags.yaml`` describes them.

Pure functions of flags to recipe keys, notes and problems. ``translate`` needs no recipe. ``translate_counts`` reads
the flags that depend on values of the recipe. Rows of the table name the other public functions.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import yaml

from grpo_recipes.errors import Problem, config_error
from grpo_recipes.extensions.atropos.flags import ADAPTERS, AUTO, FIELDS, FLAGS, MODE, SHARED, VARIABLES
from grpo_recipes.extensions.atropos.verl import count_trainers
from grpo_recipes.recipe.converters.table import Row, Setting, Settings, whole_number
from grpo_recipes.recipe.document import Value, as_bool
from grpo_recipes.recipe.keys import environment_keys

BATCH, ACCUMULATION = "--batch-size", "--gradient-accumulation-steps"
INTERVAL, MODEL, PORT = "--vllm-restart-interval", "--model-name", "--vllm-port"
_ENV = "--env."
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0")


@dataclass
class Translation:
    """The flags and variables of a command line, and the recipe keys, notes and problems that they become."""

    flags: dict[str, Value]  # flag, or variable without a flag -> its text or texts
    explicit: frozenset[str]  # recipe keys that the command line sets by their own names
    environment: Mapping[str, str]
    uses_base: bool  # whether no recipe is named; then each flag has a default
    script: bool  # whether the defaults of run_atropos_grpo.sh apply
    device: str  # device of the Python environment: cpu or cuda
    in_job: bool  # whether this is a Slurm job, which has its own ports
    keys: dict[str, Value] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def read_text(self, name: str) -> Any:
        """Return the value of a flag or variable: a text, a list of texts for some flags, or None if it is not set."""
        return self.flags[name].value if name in self.flags else None

    def reject(self, name: str, problem: str, fix: str) -> None:
        """Add a problem with a fix to the list; its place is the flag ``name``, or the variable that set this flag."""
        self.problems.append(Problem(self.flags[name].source if name in self.flags else name, problem, fix))

    def has_default(self, row: Row) -> bool:
        """Return whether an unset flag gets its default: no recipe is named, and no set key replaces it."""
        return self.uses_base and row.default is not None and self.explicit.isdisjoint(row.replaced_by.split())

    def set_keys(self, name: str, keys: Mapping[str, Any]) -> None:
        """Set recipe keys for the flag or variable ``name``. ``keys`` maps recipe keys to their new values.

        If the user set both the flag and one of its keys on the command line, add a problem. If the user did not set
        the flag, keys that the user set on the command line or by variables are not changed.
        """
        exported = {key for variable, key in environment_keys().items() if self.environment.get(variable)}
        for key, value in keys.items():
            if name in self.flags and key in self.explicit:
                self.reject(name, f"sets the same key as --{key}", "remove one of them")
            elif name in self.flags or key not in self.explicit | exported:
                source = self.flags[name].source if name in self.flags else name
                self.keys[key] = Value(value, source, from_text=True)

    def add_setting(self, setting: Setting) -> None:
        """Add the problem of a translated setting to ``problems``, else set its recipe keys, else add its note."""
        if setting.problem:
            self.problems.append(setting.problem)
        elif setting.keys:
            self.set_keys(setting.name, setting.keys)
        elif setting.why:
            self.notes.append(setting.note())

    def read_number(self, name: str) -> int | None:
        """Return the value of a flag or variable as an integer, or None if it is not set or not an integer."""
        return whole_number(self.read_text(name))

    def build_settings(self, mode: str | None) -> Settings:
        """Return the values of all flags, with ``mode`` as --weight-bridge-mode, for table rows that depend on them.

        If a recipe key sets the server's port, it also counts as --vllm-port.
        """
        values = {name: raw.value for name, raw in self.flags.items()} | {MODE: mode}
        if "vllm_server_port" in self.keys:
            values.setdefault(PORT, self.keys["vllm_server_port"].value)
        return Settings(values, self.device)


def translate(translation: Translation, environment_flags: list[tuple[str, str]]) -> str | None:
    """Translate the flags that need no recipe, and the flags of an environment, to recipe keys.

    Keys, notes and problems are added to ``translation``. ``environment_flags`` has pairs of flag and text. Return
    the value of --weight-bridge-mode, or None if the recipe decides. Raise ConfigError if the value of an
    ``--env.FIELD`` is not valid YAML.
    """
    mode = _choose_weight_bridge_mode(translation)
    if translation.uses_base and MODEL not in translation.flags and "model_name_or_path" not in translation.explicit:
        translation.reject(MODEL, "is missing", f"set {MODEL} to a hub id or a folder, or export MODEL")
    settings = translation.build_settings(mode)
    for row in FLAGS.rows:
        raw = translation.flags.get(row.name) or _choose_default(translation, row, mode)
        if raw is not None and row.name != MODE:
            translation.add_setting(FLAGS.translate(row.name, raw, settings))
    for row in VARIABLES.rows:
        if row.name in translation.flags:
            translation.add_setting(VARIABLES.translate(row.name, translation.flags[row.name], settings))
    _translate_environment_flags(translation, environment_flags, translation.build_settings(mode))
    return mode


def _choose_weight_bridge_mode(translation: Translation) -> str | None:
    """Decide --weight-bridge-mode, which selects how trainer weights reach vLLM; set its recipe keys and return it.

    --single-copy and LORA_RANK imply a mode. A contradiction is added as a problem. Return None if neither a flag nor a
    default sets the mode: then the recipe decides.
    """
    flag, single, rank = (
        translation.read_text(MODE),
        translation.read_text("--single-copy"),
        translation.read_number("LORA_RANK"),
    )
    if single and flag not in (None, SHARED):
        translation.reject("--single-copy", f"means {MODE} {SHARED}, but {MODE} is {flag}", "remove one of them")
    if rank and flag not in (None, *ADAPTERS):
        fix = f"set {MODE} {' or '.join(ADAPTERS)}"
        translation.reject("LORA_RANK", f"is {rank}, but {MODE} {flag} trains all weights", fix)
    if single:
        translation.notes.append(f"--single-copy means {MODE} {SHARED}")
    mode, source = flag or (SHARED if single else None), MODE if flag else "--single-copy"
    if mode is None and rank:
        mode, source = ADAPTERS[0], "LORA_RANK"
    row = FLAGS.by_name[MODE]
    if mode is None and translation.has_default(row):
        mode, source = (AUTO if translation.script else row.default), MODE
    if mode is not None:
        translation.set_keys(source, row.values[mode])
    if rank:
        translation.set_keys("LORA_RANK", {"lora_r": rank})
    return mode


def _choose_default(translation: Translation, row: Row, mode: str | None) -> Value | None:
    """Return the default value of an unset flag, or None if no default applies.

    Defaults apply only if no recipe is named. A default does not apply if the user set a key that replaces the flag, if
    the flag has no effect with this --weight-bridge-mode, if another flag has set its key, or if a Slurm job chooses
    the port. On CPU and with shared weights, the default of ``--dtype`` is float32. On CPU, ``bf16: false`` is also
    added to ``translation``.
    """
    text: Any = row.default
    has_no_effect = any(mode not in modes.split() for modes in row.needs.values())
    is_set = any(key in translation.keys for key in row.sets)
    if not translation.has_default(row) or has_no_effect or is_set or (row.name == PORT and translation.in_job):
        return None
    if row.name == "--dtype" and translation.device == "cpu":
        translation.set_keys("--dtype", {"bf16": False})
    if row.name == "--dtype" and (translation.device == "cpu" or mode == SHARED):
        text = "float32"
    return Value(text.split() if row.type == "words" else text, row.name)


def split_length(setting: Setting, _: Settings) -> None:
    """Convert the length of a sequence: a quarter to max_prompt_length, three quarters to max_completion_length."""
    prompt = int(setting.value) // 4
    setting.write({"max_prompt_length": prompt, "max_completion_length": int(setting.value) - prompt})


def device(setting: Setting, settings: Settings) -> None:
    """Reject ``--device`` if it differs from the device that the Python environment was installed for; set no key."""
    requested, installed = setting.value, settings.device
    if requested != installed:
        fix = f"set {installed}, or create another environment: make setup DEVICE={requested.partition(':')[0]}"
        is_index = requested.startswith("cuda:") and installed == "cuda"
        fix = f"export CUDA_VISIBLE_DEVICES={requested[5:]}" if is_index else fix
        setting.reject(f"is '{requested}', but the environment was installed for {installed}", fix)


def existing_file(setting: Setting, _: Settings) -> None:
    """Accept the path of an existing file without setting a key, because the launch does not need it; reject others."""
    setting.accept("the trainer gets the location of the shared copy from the server")
    if not os.path.isfile(os.path.expanduser(setting.value)):
        setting.reject(f"file '{setting.value}' not found", "set an existing file, or remove it")


def same_model(setting: Setting, settings: Settings) -> None:
    """Accept a model without setting a key if it equals ``--model-name``; reject any other model."""
    _accept_same(setting, setting.value == settings.values.get(MODEL))


def same_server(setting: Setting, settings: Settings) -> None:
    """Accept only an address on this machine with the port of the vLLM server that the launch starts.

    An accepted address sets no recipe key. Any other address becomes the problem of ``setting``. Nothing is raised.
    """
    parts = urlsplit(setting.value)
    port = str(parts.netloc.rpartition(":")[2])
    _accept_same(setting, parts.hostname in _LOCAL and port == str(settings.values.get(PORT)))


def _accept_same(setting: Setting, is_same: bool) -> None:
    """Accept a setting without setting a key if ``is_same``; otherwise reject it as a value without equivalent."""
    setting.accept("the launch passes the same value to its environments")
    if not is_same:
        setting.reject(f"'{setting.value:.100}' has no equivalent here")


def shared_weights(setting: Setting, settings: Settings) -> None:
    """Reject a setting that is not true if --weight-bridge-mode is shared_vllm.

    ``setting`` stores the problem, and nothing is raised. In other modes, accept a true value with the reason why it
    changes nothing, and leave the setting unchanged for other values.
    """
    shared, shares = settings.values[MODE] == SHARED, as_bool(setting.value) is True
    if shared and not shares:
        fix = f"export {setting.name}=1, or unset it"
        setting.reject(f"is {setting.value}, but {MODE} {SHARED} shares weights", fix)
    elif shares and not shared:
        setting.accept(f"{MODE} {SHARED} is not set")


def _translate_environment_flags(
    translation: Translation, environment_flags: list[tuple[str, str]], settings: Settings
) -> None:
    """Translate the flags of an environment: known flags to recipe keys, other ``--env.FIELD`` to its arguments.

    The arguments become the key atropos_environment_args. Flags without a value, with another prefix, or without
    --environment are added as problems. Raise ConfigError if a value of ``--env.FIELD`` is not valid YAML.
    """
    fields: dict[str, Any] = {}
    for name, text in environment_flags:
        translation.flags[name] = Value(text, name, from_text=True)
        if not text:
            translation.reject(name, "has no value", f"set {name} VALUE")
        elif name in FIELDS.by_name:
            translation.add_setting(FIELDS.translate(name, translation.flags[name], settings))
        elif not name.startswith(_ENV):
            fix = "remove it: the launch starts the server and passes its address to the environments"
            translation.reject(name, "has no equivalent here", fix)
        else:
            try:
                fields[name.removeprefix(_ENV)] = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise config_error(name, f"'{text:.100}' is not valid YAML", "quote it as YAML requires") from error
    first = f"{_ENV}{next(iter(fields), '')}"
    if fields and "--environment" not in translation.flags and "atropos_environment" not in translation.explicit:
        translation.reject(first, "is a field of an environment, but --environment is missing", "add --environment")
    elif fields:
        translation.set_keys(first, {"atropos_environment_args": fields})


def translate_counts(translation: Translation, value: Callable[[str], Any], mode: str | None) -> None:
    """Translate BATCH_SIZE, --max-lora-rank, --vllm-restart-interval and NUM_GPUS, which depend on the recipe.

    BATCH_SIZE becomes prompts_per_step, an interval above 1 becomes steps_per_generation, and NUM_GPUS becomes
    num_processes, without the server's GPUs; on CPU it is only noted. ``value`` looks up a recipe key, and ``mode`` is
    --weight-bridge-mode. Keys, notes and problems are added to ``translation``.
    """
    _translate_batch_size(translation, value)
    # A mode of None may have an adapter.
    room = translation.read_number("--max-lora-rank") if mode in (None, *ADAPTERS) else None
    rank = value("lora_r")
    if room is not None and isinstance(rank, int) and room < rank:
        fix = f"set --max-lora-rank {rank}, or remove it"
        translation.reject("--max-lora-rank", f"is {room}, below --lora-r {rank}", fix)
    elif room is not None:
        translation.notes.append(f"--max-lora-rank {room} has no effect: the server has room for --lora-r {rank}")
    interval = translation.read_number(INTERVAL)
    if interval is not None and interval > 1:
        steps = value("gradient_accumulation_steps")
        if mode == SHARED:
            translation.reject(INTERVAL, f"has no effect with {mode}: the server has every step's weights", "remove it")
        elif value("prompts_per_step") is not None:
            fix = f"use {BATCH} and {ACCUMULATION} instead of prompts_per_step"
            translation.reject(INTERVAL, "can't be combined with prompts_per_step", fix)
        elif isinstance(steps, int):
            translation.set_keys(INTERVAL, {"steps_per_generation": steps * interval})
    gpus = translation.read_number("NUM_GPUS")
    if gpus is not None and translation.device == "cpu":
        translation.notes.append(f"NUM_GPUS={gpus} is ignored in a CPU environment")
    elif gpus is not None:
        parallel = value("vllm_tensor_parallel_size")
        trainers = count_trainers(gpus, parallel if isinstance(parallel, int) else 1, value("weight_sync") == "shared")
        if trainers is None:
            problem = f"{gpus} leaves no GPU for training: the server uses {parallel}"
            translation.reject("NUM_GPUS", problem, f"export NUM_GPUS={parallel + 1}, or more")
        else:
            translation.set_keys("NUM_GPUS", {"num_processes": trainers})


def _translate_batch_size(translation: Translation, value: Callable[[str], Any]) -> None:
    """Translate BATCH_SIZE, the sequences of a step, to the recipe key prompts_per_step.

    gradient_accumulation_steps is then removed from the keys of ``translation``. If a flag sets the batch, e.g.
    --batch-size, BATCH_SIZE is ignored, with a note if the user exported it. Reject a size that is not a multiple of
    num_generations.
    """
    size, group = translation.read_number("BATCH_SIZE"), value("num_generations")
    flags = [name for name in (BATCH, ACCUMULATION) if name in translation.flags]
    flags += [f"--{key}" for key in ("prompts_per_step", "per_device_train_batch_size") if key in translation.explicit]
    if size is None or not isinstance(group, int):
        return
    if flags:
        if translation.environment.get("BATCH_SIZE"):
            translation.notes.append(f"BATCH_SIZE={size} is ignored because {flags[0]} is set")
    elif remainder := size % group:
        problem = f"must be a multiple of num_generations {group}, got {size}: run-api would hand out no batch"
        fix = f"export BATCH_SIZE={size - remainder + group}, or set another --num_generations"
        translation.reject("BATCH_SIZE", problem, fix)
    else:
        translation.keys.pop("gradient_accumulation_steps", None)
        translation.set_keys("BATCH_SIZE", {"prompts_per_step": size // group})
