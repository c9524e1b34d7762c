"""Flags and variables of the trainers for Atropos, as ``atropos_flags`` has them, become flags of recipe keys.

Pure: what was given comes in, recipe flags, notes and problems come out. ``translate`` reads what stands for itself,
``count`` what needs values of the recipe that it builds on.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import yaml

from grpo_recipes.errors import Problem, config_error
from grpo_recipes.errors import translate as translate_error
from grpo_recipes.extensions.atropos.flags import (
    ADAPTERS,
    AUTO,
    BACKENDS,
    ENVIRONMENT_FIELDS,
    FIELD_KEYS,
    FLAG,
    FLAGS,
    SHARED,
    Flag,
)
from grpo_recipes.extensions.atropos.verl import trainers_of
from grpo_recipes.recipe.converters import BRIDGE_MODES
from grpo_recipes.recipe.document import as_bool
from grpo_recipes.recipe.keys import environment_keys

MODE, BATCH, ACCUMULATION = "--weight-bridge-mode", "--batch-size", "--gradient-accumulation-steps"
INTERVAL, MODEL, PORT = "--vllm-restart-interval", "--model-name", "--vllm-port"
_ENV = "--env."
_LOCAL = ("localhost", "127.0.0.1", "0.0.0.0")


@dataclass
class Translation:
    """What was given, and what it comes to."""

    given: dict[str, tuple[Any, str]]  # flag, or variable without one -> text or texts, and what gave it
    own: frozenset[str]  # recipe keys that are given by flags of their own
    environment: Mapping[str, str]
    bare: bool  # whether no recipe is named: each flag has its default then
    script: bool  # whether the defaults are those of run_atropos_grpo.sh
    device: str  # of the environment: cpu or cuda
    in_job: bool  # whether this is a Slurm job, whose ports are its own
    keys: dict[str, Any] = field(default_factory=dict)  # key -> text, or texts of a list
    sources: dict[str, str] = field(default_factory=dict)  # key -> the flag or variable that it comes from
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def words(self) -> list[str]:
        """Return the flags of recipe keys."""
        lists = {key: value if isinstance(value, list) else [str(value)] for key, value in self.keys.items()}
        return [word for key, value in lists.items() for word in (f"--{key}", *value)]

    def names(self) -> dict[str, str]:
        """Return what messages call each of these flags: the flag or variable that it comes from."""
        return {f"--{key}": source for key, source in self.sources.items()}

    def text(self, name: str) -> Any:
        """Return what was given for a flag or variable, or None."""
        return self.given[name][0] if name in self.given else None

    def refuse(self, name: str, what: str, fix: str) -> None:
        """Note a problem with a flag at what gave it."""
        self.problems.append(Problem(self.given[name][1] if name in self.given else name, what, fix))

    def put(self, name: str, **keys: Any) -> None:
        """Give keys values for a flag or variable; a default gives way to the user's own flags and variables."""
        variables = {key for variable, key in environment_keys().items() if self.environment.get(variable)}
        for key, value in keys.items():
            if name in self.given and key in self.own:
                self.refuse(name, f"is given beside --{key}, which is the same", "keep one of the two")
            elif name in self.given or key not in self.own | variables:
                self.keys[key] = value
                self.sources[key] = self.given[name][1] if name in self.given else name

    def whole(self, name: str, least: int = 1) -> int | None:
        """Return the whole number that was given for a flag or variable, or its default; None where there is none."""
        default = FLAG[name].default if name in FLAG and self.bare else None
        text = self.text(name) if name in self.given else default
        if text is None:
            return None
        number = int(text) if str(text).isdecimal() else -1
        if number >= least:
            return number
        what, example = f"is '{text}' where a whole number of {least} or more belongs", least + 1
        self.refuse(name, what, f"write e.g. {name} {example}" if name in FLAG else f"export e.g. {name}={example}")
        return None


def translate(it: Translation, dotted: list[tuple[str, str]]) -> str | None:
    """Translate what needs no recipe; ``dotted`` are the flags of an environment. Return the weight bridge mode."""
    mode = _mode(it)
    if it.bare and MODEL not in it.given and "model_name_or_path" not in it.own:
        it.refuse(MODEL, "is missing", f"write {MODEL} with a hub id or a folder, or export MODEL")
    for flag in FLAGS:
        _by_table(it, flag, mode)
    if (length := it.whole("--seq-len", 4)) is not None:
        prompt = length // 4
        it.put("--seq-len", max_prompt_length=prompt, max_completion_length=length - prompt)
    if (saves := it.whole("--checkpoint-interval", 0)) is not None:
        it.put("--checkpoint-interval", **({"save_steps": saves} if saves else {"save_strategy": "no"}))
    if it.text("--use-wandb"):
        it.put("--use-wandb", report_to="wandb")
    _places(it, mode)
    _fields(it, dotted)
    return mode


def _mode(it: Translation) -> str | None:
    """Return the weight bridge mode, None where the recipe or its own keys say it; put its keys."""
    given, single, rank = it.text(MODE), it.text("--single-copy"), it.whole("LORA_RANK", 0)
    if single and given not in (None, SHARED):
        it.refuse("--single-copy", f"is {SHARED}, and {MODE} is {given}", "keep one of the two")
    if rank and given not in (None, *ADAPTERS):
        it.refuse("LORA_RANK", f"is {rank}, and {MODE} {given} trains all weights", f"write {' or '.join(ADAPTERS)}")
    if single:
        it.notes.append(f"--single-copy is {MODE} {SHARED}")
    mode, source = given or (SHARED if single else None), MODE if given else "--single-copy"
    if mode is None and rank:
        mode, source = ADAPTERS[0], "LORA_RANK"
    if mode is None and it.bare and not it.own & {"weight_sync", "weight_bridge_mode", "use_peft", "vllm_mode"}:
        mode, source = (AUTO if it.script else FLAG[MODE].default), MODE
    if mode is not None:
        it.put(source, weight_sync=BRIDGE_MODES.get(mode, mode), **({"use_peft": "true"} if mode in ADAPTERS else {}))
    if rank:
        it.put("LORA_RANK", lora_r=rank)
    return mode


def _by_table(it: Translation, flag: Flag, mode: str | None) -> None:
    """Put the key of a flag that the table translates, with the flag's value or its default."""
    if not flag.key or flag.refused:
        return
    text = it.text(flag.name)
    if text is not None and flag.modes and mode is not None and mode not in flag.modes:
        it.refuse(flag.name, f"does nothing with {MODE} {mode}", f"write {MODE} {flag.modes[0]}, or leave it out")
        return
    if text is None and it.bare and (not flag.modes or mode in flag.modes) and flag.key not in it.keys:
        text = _default(it, flag, mode)
    if text is not None:
        it.put(flag.name, **{flag.key: text if flag.words else flag.values.get(text, text)})


def _default(it: Translation, flag: Flag, mode: str | None) -> Any:
    """Return the default of a flag, which depends on little."""
    if (flag.name == PORT and it.in_job) or (flag.name == ACCUMULATION and "prompts_per_step" in it.own):
        return None
    if flag.name == "--dtype" and it.device == "cpu":
        it.put("--dtype", bf16="false")
    if flag.name == "--dtype" and (it.device == "cpu" or mode == SHARED):
        return "float32"
    return flag.default.split() if flag.words and flag.default else flag.default


def _places(it: Translation, mode: str | None) -> None:
    """Read what names a device, a file or a switch of theirs, all of which is decided elsewhere here."""
    device = it.text("--device")
    if device is not None and device != it.device:
        fix = f"write {it.device}, which the environment is made for (make setup DEVICE=cpu or cuda)"
        fix = f"export CUDA_VISIBLE_DEVICES={device[5:]}" if device.startswith("cuda:") and it.device == "cuda" else fix
        it.refuse("--device", f"is '{device}', the environment's is {it.device}", fix)
    path = it.text("--vllm-config-path")
    if path is not None and not os.path.isfile(os.path.expanduser(path)):
        it.refuse("--vllm-config-path", f"there is no file '{path}'", "name an existing file, or leave it out")
    elif path is not None:
        it.notes.append("--vllm-config-path is not read: the trainer asks the server itself where the one copy is")
    gate, shares = "VLLM_ENABLE_SHARED_WEIGHTS", it.text("VLLM_ENABLE_SHARED_WEIGHTS")
    if shares is not None and mode == SHARED and as_bool(shares) is not True:
        it.refuse(gate, f"is {shares}, and {SHARED} shares weights", f"export {gate}=1, or unset it")
    elif shares is not None and mode != SHARED and as_bool(shares) is True:
        it.notes.append(f"{gate}={shares} changes nothing without {MODE} {SHARED}")
    if it.text("--enforce-eager"):
        it.put("--enforce-eager", vllm_enforce_eager="true")
    if it.text("--enable-lora") and mode != ADAPTERS[0]:
        it.refuse("--enable-lora", f"does nothing with {MODE} {mode}", f"write {MODE} {ADAPTERS[0]}, or leave it out")
    backend = it.text("INFERENCE_BACKEND")
    if backend is not None and backend not in BACKENDS:
        fix = f"export INFERENCE_BACKEND={BACKENDS[0]}, or unset it: environments ask a vLLM server"
        it.refuse("INFERENCE_BACKEND", f"is '{backend}'", fix)


def _fields(it: Translation, dotted: list[tuple[str, str]]) -> None:
    """Read the flags of an environment: fields of its configuration, or what the launch says to it."""
    fields: dict[str, Any] = {}
    model, port = it.text(MODEL), it.text(PORT) or it.keys.get("vllm_server_port")
    anyway = {
        "--env.tokenizer_name": lambda text: text == model,
        "--openai.model_name": lambda text: text == model,
        "--env.use_wandb": lambda text: as_bool(text) is False,
        "--openai.server_type": lambda text: text == BACKENDS[0],
        "--openai.base_url": lambda text: _is_local(text, port),
    }
    for name, text in dotted:
        it.given[name] = text, name
        if not text:
            it.refuse(name, "is given without a value", f"write {name} VALUE")
        elif name in FIELD_KEYS:
            it.put(name, **{FIELD_KEYS[name]: text})
        elif name in anyway and anyway[name](text):
            it.notes.append(f"{name} {text} changes nothing: the launch tells its environments the same")
        elif name in ENVIRONMENT_FIELDS or not name.startswith(_ENV):
            fix = "remove it; the launch starts the server and tells its environments where it is"
            it.refuse(name, f"'{text:.100}' is not taken here", ENVIRONMENT_FIELDS.get(name, fix))
        else:
            fields[name.removeprefix(_ENV)] = _plain(name, text)
    if fields and "--environment" not in it.given and "atropos_environment" not in it.own:
        name = f"{_ENV}{next(iter(fields))}"
        it.refuse(name, "is a field of an environment, and none is named", "write --environment too")
    elif fields:
        text = yaml.safe_dump(fields, default_flow_style=True, width=10**6, sort_keys=False).strip()
        it.put(f"{_ENV}{next(iter(fields))}", atropos_environment_args=text)


def _plain(name: str, text: str) -> Any:
    """Return the value that a text is in YAML."""
    wrong = config_error(name, f"'{text:.100}' is no value in YAML", "quote it as YAML asks for")
    with translate_error(yaml.YAMLError, lambda _: wrong):
        return yaml.safe_load(text)


def _is_local(url: str, port: Any) -> bool:
    """Return whether a URL is that of the server which the launch starts."""
    parts = urlsplit(url)
    return parts.hostname in _LOCAL and str(parts.netloc.rpartition(":")[2]) == str(port)


def count(it: Translation, value: Callable[[str], Any], mode: str | None) -> None:
    """Translate what counts sequences, steps and GPUs; ``value`` looks up a key of the recipe as it is so far."""
    _sequences(it, value)
    _room_for_adapters(it, value("lora_r"), mode)
    interval = it.whole(INTERVAL)
    if interval is not None and interval > 1:
        steps = value("gradient_accumulation_steps")
        if mode == SHARED:
            it.refuse(INTERVAL, f"{mode} transfers nothing: the server has every step's weights", "leave it out")
        elif value("prompts_per_step") is not None:
            fix = f"write {BATCH} and {ACCUMULATION} in its place"
            it.refuse(INTERVAL, "several steps of one transfer contradict prompts_per_step", fix)
        elif isinstance(steps, int):
            it.put(INTERVAL, steps_per_generation=steps * interval)
    gpus = it.whole("NUM_GPUS")
    if gpus is not None and it.device == "cpu":
        it.notes.append(f"NUM_GPUS={gpus} is not read: this is a CPU environment")
    elif gpus is not None:
        parallel = value("vllm_tensor_parallel_size")
        trainers = trainers_of(gpus, parallel if isinstance(parallel, int) else 1, value("weight_sync") == "shared")
        if trainers is None:
            it.refuse("NUM_GPUS", f"{gpus} leaves no GPU to train on: the server has {parallel}", "export more")
        else:
            it.put("NUM_GPUS", num_processes=trainers)


def _room_for_adapters(it: Translation, rank: Any, mode: str | None) -> None:
    """Read --max-lora-rank: their server's room for adapters, which must be enough for --lora-r."""
    name = "--max-lora-rank"
    room = it.whole(name)
    if room is None:
        return
    if mode is not None and mode not in ADAPTERS:
        it.refuse(name, f"does nothing with {MODE} {mode}", f"write {MODE} {ADAPTERS[0]}, or leave it out")
    elif isinstance(rank, int) and room < rank:
        it.refuse(name, f"is {room}, below --lora-r {rank}", f"write {name} {rank}, or leave it out")
    else:
        it.notes.append(f"{name} {room} changes nothing: the server has room for --lora-r {rank}")


def _sequences(it: Translation, value: Callable[[str], Any]) -> None:
    """Read BATCH_SIZE, the sequences of a step, unless flags say how many there are."""
    size, group = it.whole("BATCH_SIZE"), value("num_generations")
    flags = [name for name in (BATCH, ACCUMULATION) if name in it.given]
    flags += [f"--{key}" for key in ("prompts_per_step", "per_device_train_batch_size") if key in it.own]
    if size is None or not isinstance(group, int):
        return
    if flags:
        if it.environment.get("BATCH_SIZE"):
            it.notes.append(f"BATCH_SIZE={size} is not read beside {flags[0]}")
    elif rest := size % group:
        what = f"{size} sequences are no whole groups of {group} (num_generations): run-api would hand out no batch"
        it.refuse("BATCH_SIZE", what, f"export BATCH_SIZE={size - rest + group}, or write another --num_generations")
    else:
        it.keys.pop("gradient_accumulation_steps", None)
        it.put("BATCH_SIZE", prompts_per_step=size // group)
