"""The YAML of verl's integration with Atropos: ``atropos_grpo_trainer.yaml``, whose sections begin with ``atropos``.

``SETTINGS`` says what becomes of each setting: a key of a recipe, nothing where it asks for what happens anyway, or a
refusal at its own line with what to write instead. A setting that is not in the table is refused as unknown.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.dialects import meaning_of, short
from grpo_recipes.recipe.document import Value, as_bool
from grpo_recipes.recipe.keys import catalogue, nearest_of

SECTION, TRAINER, DATA = "atropos", "trainer", "data"
ESTIMATORS = ("grpo_atropos", "grpo")
_MODEL, _ACTOR, _ROLLOUT, _REF = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout", "ref"))
_N, _LORA, _KL = f"{_ROLLOUT}.n", f"{_MODEL}.lora_rank", f"{_ACTOR}.use_kl_loss"
_BATCH, _MINI = f"{DATA}.train_batch_size", f"{_ACTOR}.ppo_mini_batch_size"
_TENSORS = f"{_ROLLOUT}.tensor_model_parallel_size"
_GPUS = f"{TRAINER}.n_gpus_per_node"
# What such a file says by being one, where it does not say it itself.
IMPLIED: Mapping[str, Any] = {"use_vllm": True, "vllm_mode": "server", "reward_funcs": ["environment"]}
_ANY = "*"  # in ``Setting.when``: whatever the value is


@dataclass(frozen=True)
class Setting:
    """What becomes of one setting of theirs."""

    to: str = ""  # the key of a recipe that takes its value as it is
    when: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # pattern of a value -> the keys it gives
    why: str = ""  # why a value that gives no key changes nothing
    instead: str = ""  # what to write in the place of any other value
    unless: tuple[str, str] = ("", "")  # another setting and the pattern of its value with which this one is not read

    def meaning(self) -> str:
        """Return for a table what it becomes, in Markdown."""
        if _ANY in self.when:
            return f"changes nothing: {self.why}"
        parts = [f"`{self.to}`"] if self.to else []
        for pattern, keys in self.when.items():
            given = " and ".join(f"`{key}{short(value)}`" for key, value in keys.items()) or "changes nothing"
            parts.append(f"`{pattern.replace('[[]', '[')}`: {given}")
        told = [", ".join(parts), self.why]
        if self.unless[0]:
            told.append(f"not read where `{self.unless[0]}` is `{self.unless[1]}`")
        if not self.to:
            told.append(f"{'others are ' if self.when else ''}refused: {self.instead}")
        return "; ".join(filter(None, told))


def _nothing(patterns: str, why: str, instead: str = "", to: str = "") -> Setting:
    """Return a setting that changes nothing for values of these patterns; others are ``to``, or refused."""
    return Setting(to, {pattern: {} for pattern in patterns.split()}, why, instead)


def _not_read(why: str) -> Setting:
    """Return a setting whose value decides nothing but memory, speed or output, which other keys decide here."""
    return _nothing(_ANY, why)


def _refused(instead: str) -> Setting:
    return Setting(instead=instead)


_SHARED = Setting(
    when={"fsdp*": {"accelerator": "fsdp2"}},
    instead="write fsdp, or accelerator: zero2 or zero3 in the place of the strategy",
)
_MEMORY = "it decides over memory and time alone"
_OFFLOAD = _nothing("false", "nothing is moved to the CPU", "write false: no parameter is moved to the CPU")
_VLLM = "vLLM's default is used"
_ENVIRONMENTS = "remove it; groups come from environments: write atropos_environment and its atropos_environment_args"
_EVALUATES = "remove it; an environment evaluates by itself (steps_per_eval), and benchmarks run on the final model"
_AWAITED = "remove it; atropos.batch_max_wait_time bounds the wait for what environments send"

# fmt: off
SETTINGS: Mapping[str, Setting] = {
    "defaults": _not_read("what the file does not say has this package's defaults, not verl's"),
    # Of run-api.
    f"{SECTION}.api_url": Setting("atropos_api_url"),
    f"{SECTION}.timeout": Setting("atropos_timeout"),
    f"{SECTION}.batch_retry_attempts": Setting("atropos_batch_retry_attempts"),
    f"{SECTION}.batch_retry_delay": Setting("atropos_batch_retry_delay"),
    f"{SECTION}.batch_max_wait_time": Setting("atropos_batch_max_wait_time"),
    f"{SECTION}.environment_sync_timeout": _refused(_AWAITED),
    f"{SECTION}.max_environments": _refused("remove it; every environment that registers at run-api takes part"),
    f"{SECTION}.inference_endpoints": _nothing("[[]]", "the launch tells its environments where the server is",
        "remove them; the launch starts the server and tells its environments where it is"),
    # The algorithm.
    "algorithm.adv_estimator": _nothing(" ".join(ESTIMATORS),
        "advantages that a group brings are used for each token, and scores are compared within each other group",
        f"write {' or '.join(ESTIMATORS)}"),
    "algorithm.use_kl_in_reward": _nothing("false", "the KL term is part of the loss",
        f"write false, and {_ACTOR}.kl_loss_coef: the KL term is part of the loss"),
    "algorithm.norm_adv_by_std_in_grpo": Setting(
        when={"true": {"scale_rewards": "group"}, "false": {"scale_rewards": "none"}}, instead="write true or false"),
    # The model.
    f"{_MODEL}.path": Setting("model_name_or_path"),
    f"{_MODEL}.use_shm": _not_read("the model is read from its folder"),
    _LORA: Setting("lora_r", {"0": {}}, "all weights are trained"),
    f"{_MODEL}.lora_alpha": Setting("lora_alpha", unless=(_LORA, "0")),
    f"{_MODEL}.target_modules": Setting("lora_target_modules", unless=(_LORA, "0")),
    f"{_MODEL}.use_remove_padding": _not_read(_MEMORY),
    f"{_MODEL}.enable_gradient_checkpointing": Setting("gradient_checkpointing"),
    f"{_MODEL}.trust_remote_code": Setting("trust_remote_code"),
    f"{_MODEL}.override_config.attn_implementation": Setting("attn_implementation"),
    # The update.
    f"{_ACTOR}.strategy": _SHARED,
    f"{_ACTOR}.optim.lr": Setting("learning_rate"),
    f"{_ACTOR}.optim.lr_warmup_steps": Setting("warmup_steps"),
    f"{_ACTOR}.optim.weight_decay": Setting("weight_decay"),
    f"{_ACTOR}.grad_clip": Setting("max_grad_norm"),
    _MINI: _refused(f"remove it, or write the same number as {_BATCH}"),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": Setting("per_device_train_batch_size"),
    f"{_ACTOR}.ppo_epochs": Setting("num_iterations"),
    _KL: Setting(when={"true": {}, "false": {"beta": 0.0}}, instead="write true or false",
        why=f"true: {_ACTOR}.kl_loss_coef is the coefficient"),
    f"{_ACTOR}.kl_loss_coef": Setting("beta", unless=(_KL, "false")),
    f"{_ACTOR}.kl_loss_type": _nothing("low_var_kl k3",
        "it is TRL's estimator, which use_bias_correction_kl: true, the default, multiplies by the policy's ratio",
        "write low_var_kl: TRL has this estimator alone"),
    f"{_ACTOR}.entropy_coeff": Setting("entropy_coef"),
    f"{_ACTOR}.clip_ratio": Setting("epsilon"),
    f"{_ACTOR}.clip_ratio_low": Setting("epsilon"),
    f"{_ACTOR}.clip_ratio_high": Setting("epsilon_high"),
    f"{_ACTOR}.loss_agg_mode": Setting(
        when={"token-mean": {"loss_type": "dapo"}, "seq-mean-token-mean": {"loss_type": "grpo"},
            "seq-mean-token-sum-norm": {"loss_type": "dr_grpo"}},
        instead="write token-mean, seq-mean-token-mean or seq-mean-token-sum-norm"),
    f"{_ACTOR}.fsdp_config.param_offload": _OFFLOAD,
    f"{_ACTOR}.fsdp_config.optimizer_offload": _OFFLOAD,
    # The server, and what is sampled.
    f"{_ROLLOUT}.name": _nothing("atropos vllm", "environments sample from a vLLM server",
        "write atropos or vllm: environments sample from a vLLM server"),
    _N: Setting("num_generations"),
    f"{_ROLLOUT}.temperature": Setting("temperature"),
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": _not_read(f"{_MEMORY}; it is per_device_train_batch_size"),
    _TENSORS: Setting("vllm_tensor_parallel_size"),
    f"{_ROLLOUT}.gpu_memory_utilization": Setting("vllm_gpu_memory_utilization"),
    f"{_ROLLOUT}.max_model_len": Setting("vllm_max_model_length"),
    f"{_ROLLOUT}.enforce_eager": Setting("vllm_enforce_eager"),
    f"{_ROLLOUT}.disable_log_stats": _not_read("the server logs its statistics"),
    f"{_ROLLOUT}.enable_prefix_caching": _nothing("true", "vLLM caches prefixes", "write true: vLLM caches prefixes"),
    f"{_ROLLOUT}.enable_chunked_prefill": _not_read(f"{_MEMORY}, and {_VLLM}"),
    f"{_ROLLOUT}.max_num_batched_tokens": _not_read(f"{_MEMORY}, and {_VLLM}"),
    f"{_ROLLOUT}.free_cache_engine": _not_read(f"{_MEMORY}, and {_VLLM}"),
    f"{_ROLLOUT}.kv_cache_dtype": _nothing("auto", _VLLM, f"write auto: {_VLLM}"),
    f"{_ROLLOUT}.load_format": _not_read("weight_sync says how weights reach the server"),
    f"{_ROLLOUT}.layered_summon": _not_read("weight_sync says how weights reach the server"),
    f"{_ROLLOUT}.mode": _not_read("environments send groups all the time, and a step waits for those that it takes"),
    f"{_REF}.log_prob_micro_batch_size_per_gpu": _not_read(f"{_MEMORY}; it is per_device_train_batch_size"),
    f"{_REF}.fsdp_config.param_offload": _not_read(_MEMORY),
    # Data.
    f"{DATA}.train_files": _nothing("none", "groups come from environments", _ENVIRONMENTS),
    f"{DATA}.val_files": _nothing("none", "an environment evaluates by itself", _EVALUATES),
    _BATCH: Setting(instead="write whole groups"),  # read by ``_batch``
    f"{DATA}.max_prompt_length": Setting("max_prompt_length"),
    f"{DATA}.max_response_length": Setting("max_completion_length"),
    f"{DATA}.filter_overlong_prompts": _not_read("groups that are too long are left out and counted"),
    f"{DATA}.truncation": _nothing("error", "groups that are too long are left out and counted",
        "write error: no sequence is cut"),
    f"{DATA}.shuffle": _not_read("environments choose the order of their prompts"),
    f"{DATA}.trust_remote_code": Setting("trust_remote_code"),
    # The run.
    f"{TRAINER}.strategy": _SHARED,
    f"{TRAINER}.critic_warmup": _nothing("0", "no value function is trained", "write 0: no value function is trained"),
    f"{TRAINER}.logger": Setting(instead="write console, wandb or tensorboard"),  # read by ``_reporters``
    f"{TRAINER}.project_name": Setting("wandb_project"),
    f"{TRAINER}.experiment_name": Setting("run_name"),
    f"{TRAINER}.wandb_group": Setting("wandb_run_group"),
    _GPUS: Setting(instead="write a whole number"),  # read by ``_processes``
    f"{TRAINER}.nnodes": _nothing("1", "a run has the nodes of its job",
        "remove it; the nodes are those of the job (sbatch --nodes)"),
    f"{TRAINER}.save_freq": Setting("save_steps", {"-1": {"save_strategy": "no"}}),
    f"{TRAINER}.test_freq": _nothing("-1", "an environment evaluates by itself", _EVALUATES),
    f"{TRAINER}.val_before_train": _nothing("false", "an environment evaluates by itself", _EVALUATES),
    f"{TRAINER}.total_epochs": Setting("max_steps"),
    f"{TRAINER}.total_training_steps": Setting("max_steps"),
    f"{TRAINER}.output_dir": Setting("run_root"),
    f"{TRAINER}.default_local_dir": Setting("run_root"),
    # Parts of verl that nothing here has.
    "critic": _not_read("no value function is trained"),
    "reward_model.enable": _nothing("false", "environments score", "write false: environments score"),
    "ray_init": _not_read("the launch starts its processes without Ray"),
}  # fmt: skip
# fmt: on
_WHOLE = frozenset({"defaults", "critic", "ray_init", f"{SECTION}.inference_endpoints"})  # read as one, parts and all
SECTIONS = tuple(dict.fromkeys(name.partition(".")[0] for name in SETTINGS))


@dataclass
class Reading:
    """What one setting of a file came to."""

    name: str  # with the sections before it, and dots between
    raw: Value
    writes: dict[str, Any] = field(default_factory=dict)  # keys of a recipe
    why: str = ""  # one that gives no key changes nothing
    problem: Problem | None = None

    @property
    def note(self) -> str:
        """Return what is said of it where it is not refused."""
        if self.writes:
            return f"{self.raw.source}: '{self.name}' is read as {_words(self.writes)}"
        return f"{self.raw.source}: {self.name}{short(self.raw.value)} changes nothing: {self.why}"


def is_atropos(file: Mapping[str, Value]) -> bool:
    """Return whether a file is the YAML of verl's integration with Atropos."""
    algorithm = file["algorithm"].value if "algorithm" in file else None
    estimator = algorithm.get("adv_estimator") if isinstance(algorithm, dict) else None
    return SECTION in file or estimator == ESTIMATORS[0]


def as_keys(
    file: Mapping[str, Value], problems: list[Problem], notes: list[str], device: str | None = None
) -> dict[str, Value]:
    """Return such a file with recipe keys in place of its settings; keys of a recipe in it stay as they are.

    On the ``device`` "cpu" its GPUs count nothing.
    """
    found = {name: raw for name, raw in file.items() if name not in SECTIONS}
    first = next(raw for name, raw in file.items() if name in SECTIONS)
    implied = {key: value for key, value in IMPLIED.items() if key not in found}
    if implied:
        notes.append(f"{first.source}: a file of verl's integration with Atropos is read as {_words(implied)}")
    given: dict[str, str] = {}
    for one in readings(file, device):
        if one.problem is not None:
            problems.append(one.problem)
        else:
            notes.append(one.note)
        for key, value in one.writes.items():
            if key in found and found[key].value != value:
                what = f"'{one.name}' and '{given.get(key, key)}' give {key} two values"
                problems.append(Problem(one.raw.source, what, "keep one of the two"))
            elif key not in found:
                found[key], given[key] = replace(one.raw, value=value), one.name
    return {key: Value(value, first.source) for key, value in implied.items()} | found


def readings(file: Mapping[str, Value], device: str | None = None) -> list[Reading]:
    """Return what each setting of a file comes to on a device (None: GPUs), in its order."""
    found = [one for name, raw in file.items() if name in SECTIONS for one in _flat(name, raw, (name,))]
    values = {name: raw.value for name, raw in found if not isinstance(raw, Problem)}
    readings = [_reading(name, raw, values) for name, raw in found]
    return [_without_gpus(reading) for reading in readings] if device == "cpu" else readings


def _words(keys: Mapping[str, Any]) -> str:
    return " and ".join(f"{key}{short(value)}" for key, value in keys.items())


def _flat(name: str, raw: Value, place: Sequence[str]) -> Iterator[tuple[str, Value]]:
    """Yield the settings below a name with the names that lead there, each with its own line."""
    if isinstance(raw.value, dict) and raw.value and name not in _WHOLE:
        for part, value in raw.value.items():
            inside = (*place, str(part))
            source = raw.lines.get(inside, raw.source)
            yield from _flat(f"{name}.{part}", replace(raw, value=value, source=source), inside)
    else:
        yield name, raw


def _reading(name: str, raw: Value, values: Mapping[str, Any]) -> Reading:
    """Return what one setting comes to, beside the ``values`` of all."""
    made, value = Reading(name, raw), as_bool(raw.value)
    if name not in SETTINGS:
        return _unknown(made)
    setting = SETTINGS[name]
    special = _SPECIAL.get(name)
    if special is not None:
        return special(made, values)
    other, pattern = setting.unless
    if other and fnmatchcase(_text(values.get(other, 0 if other == _LORA else None)), pattern):
        made.why = f"{other} is {pattern}"
        return made
    keys = next((keys for one, keys in setting.when.items() if fnmatchcase(_text(value), one)), None)
    if keys is None and value is None:
        made.problem = Problem(raw.source, f"'{name}' is empty", "give it a value, or remove it")
    elif keys is None and setting.to:
        made.writes = {setting.to: raw.value, **({"use_peft": True} if name == _LORA else {})}
    elif keys is None:
        made.problem = Problem(raw.source, f"'{name}{short(raw.value)}' has no equal here", setting.instead)
    elif keys:
        made.writes = dict(keys)
    else:
        made.why = setting.why
    return made


def _text(value: Any) -> str:
    return str(as_bool(value)).lower()


def _unknown(made: Reading) -> Reading:
    """Refuse a setting that the table does not have, with the one of its section that was meant, or our key."""
    section, _, last = made.name.rpartition(".")
    close = nearest_of(last, [name.rpartition(".")[2] for name in SETTINGS if name.rpartition(".")[0] == section])
    known = meaning_of(made.name)
    fix = f"write '{close}'" if close else known.fix(made.raw.value) if known else "remove it"
    what = f"unknown key '{last}'{f' in {section}' if section else ''}"
    made.problem = Problem(made.raw.source, what, fix)
    return made


def _whole(value: Any) -> int | None:
    """Return a whole number above 0, None where it is no such number."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _batch(made: Reading, values: Mapping[str, Any]) -> Reading:
    """Read the sequences that a step takes, and that are registered at run-api, as whole groups of ``n``."""
    size, group = _whole(made.raw.value), _whole(values.get(_N, catalogue()["num_generations"]["default"]))
    if size is None:
        what = f"'{made.name}' is {made.raw.value!r:.100} where a whole number of sequences belongs"
        made.problem = Problem(made.raw.source, what, "write e.g. 1024")
    elif group is not None and (rest := size % group):
        what = f"{size} sequences are no whole groups of {_N} {group}: run-api would never hand out a batch"
        made.problem = Problem(made.raw.source, what, f"write {size - rest + group}, or another {_N}")
    elif group is not None:
        made.writes = {"prompts_per_step": size // group}
    return made


def _mini_batch(made: Reading, values: Mapping[str, Any]) -> Reading:
    """Accept an optimizer step of the whole batch, which is the only one here."""
    if made.raw.value == values.get(_BATCH):
        made.why = "a step takes the whole batch"
        return made
    what = f"'{made.name}{short(made.raw.value)}' is another number than {_BATCH}, all of which a step takes"
    made.problem = Problem(made.raw.source, what, SETTINGS[_MINI].instead)
    return made


def _reporters(made: Reading, _: Mapping[str, Any]) -> Reading:
    """Read the trackers of a run; the console is always written to."""
    given = made.raw.value if isinstance(made.raw.value, list) else [made.raw.value]
    if strange := [name for name in given if name not in ("console", "wandb", "tensorboard")]:
        what = f"'{made.name}' names '{strange[0]}', which is not supported"
        made.problem = Problem(made.raw.source, what, SETTINGS[made.name].instead)
    else:
        made.writes = {"report_to": [name for name in given if name != "console"] or ["none"]}
    return made


def _processes(made: Reading, values: Mapping[str, Any]) -> Reading:
    """Read the GPUs of a node as training processes: the server has some of them for itself."""
    gpus, parallel = _whole(made.raw.value), _whole(values.get(_TENSORS, 1)) or 1
    if gpus is None:
        what = f"'{made.name}' is {made.raw.value!r:.100} where a whole number of GPUs belongs"
        made.problem = Problem(made.raw.source, what, "write e.g. 8")
    elif (trainers := trainers_of(gpus, parallel)) is None:
        what = f"'{made.name}' {gpus} leaves no GPU to train on: the server has {parallel}"
        made.problem = Problem(made.raw.source, what, f"write {parallel + 1} or more, or a smaller {_TENSORS}")
    else:
        made.writes = {"num_processes": trainers}
    return made


def _without_gpus(reading: Reading) -> Reading:
    """Return what a setting comes to in a run on CPU, whose training processes follow from no number of GPUs."""
    if reading.name != _GPUS or _whole(reading.raw.value) is None:
        return reading
    return replace(reading, writes={}, problem=None, why="the run is on CPU")


def trainers_of(gpus: int, parallel: int = 1, shared: bool = False) -> int | None:
    """Return the training processes of so many GPUs, ``parallel`` of which the server has, or shares; None for none."""
    return max(0, gpus if shared else gpus - parallel) or None


_SPECIAL = {
    _BATCH: _batch,
    _MINI: _mini_batch,
    f"{TRAINER}.logger": _reporters,
    _GPUS: _processes,
}


def rows() -> list[tuple[str, str]]:
    """Return each setting with what becomes of it, in Markdown, for a page."""
    told = {
        _BATCH: f"`prompts_per_step`: the sequences of a step, which are registered, divided by `{_N}`; refused where "
        "they are no whole groups",
        _MINI: f"changes nothing where it is `{_BATCH}`; others are refused: a step takes the whole batch",
        f"{TRAINER}.logger": "`report_to`; `console` is always written to",
        _GPUS: f"`num_processes`: the GPUs without those of the server (`{_TENSORS}`); not read in a run on CPU",
    }
    return [(name, told.get(name) or setting.meaning()) for name, setting in SETTINGS.items()]
