"""The YAML of co-located trainers: sections ``vllm_config`` and ``fsdp_config``, and four names beside them.

What a name means is in ``names.yaml``, as for all others. In a file of this kind it is read as its key, with a note,
instead of being refused; what has no equal here is refused at its own line, or accepted with a note that says why.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.dialects import by_value, harmless, names, short
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import nearest_of

SECTIONS = {
    "vllm_config": (
        "tensor_parallel_size", "max_num_seqs", "max_model_len", "gpu_memory_utilization", "enforce_eager",
        "disable_log_stats",
    ),
    "fsdp_config": ("sharding_strategy", "cpu_offload", "mixed_precision"),
}  # fmt: skip
NAMES = ("model_name", "batch_size", "max_iterations", "sync_frequency")
# What a section says by being there, where the file does not say it itself.
IMPLIED: dict[str, dict[str, Any]] = {"vllm_config": {"use_vllm": True, "vllm_mode": "colocate"}}
# Their trainer has its own task, and its file names none: then these are read, with a note.
TASK = {
    "dataset_name": "openai/gsm8k", "dataset_config": "main", "dataset_prompt_column": "question",
    "dataset_solution_column": "answer", "dataset_solution_marker": "####", "reward_funcs": ["pure_accuracy_math"],
}  # fmt: skip
_TASK_KEYS = ("dataset_*", "environment*", "atropos_*", "reward_funcs")


def is_colocated(file: Mapping[str, Value]) -> bool:
    """Return whether a file is the YAML of a co-located trainer; TRL has an ``fsdp_config`` of other parts."""
    sharding = file["fsdp_config"].value if "fsdp_config" in file else None
    sharded = isinstance(sharding, dict) and not set(SECTIONS["fsdp_config"]).isdisjoint(sharding)
    return sharded or "vllm_config" in file or "sync_frequency" in file


def as_keys(
    file: Mapping[str, Value], group: Any, elsewhere: Collection[str], problems: list[Problem], notes: list[str]
) -> dict[str, Value]:
    """Return such a file with recipe keys instead of its names.

    ``group`` is num_generations, and ``elsewhere`` has the names that flags and other files give.
    """
    found = {name: raw for name, raw in file.items() if name not in (*SECTIONS, *NAMES)}
    if not any(fnmatchcase(name, pattern) for name in (*file, *elsewhere) for pattern in _TASK_KEYS):
        source = next(iter(file.values())).source
        notes.append(f"{source}: the file names no dataset and no rewards: {_words(TASK)}")
        found |= {key: Value(value, source) for key, value in TASK.items()}
    for section, implied in IMPLIED.items():
        added = {key: value for key, value in implied.items() if section in file and key not in found}
        if added:
            notes.append(f"{file[section].source}: '{section}' is read as {_words(added)}")
        found |= {key: Value(value, file[section].source) for key, value in added.items()}
    for name, raw in _settings(file, problems):
        writes = _meaning(name, raw, group, problems, notes)
        for key in writes:
            if key in found:
                problems.append(Problem(raw.source, f"'{name}' and '{key}' are two names of one key", f"keep {key}"))
        if writes:
            notes.append(f"{raw.source}: '{name}' is read as {_words(writes)}")
        found = {key: replace(raw, value=value) for key, value in writes.items()} | found
    return found


def _words(keys: Mapping[str, Any]) -> str:
    return " and ".join(f"{key}{short(value)}" for key, value in keys.items())


def _settings(file: Mapping[str, Value], problems: list[Problem]) -> Iterator[tuple[str, Value]]:
    """Yield the settings that are to be read, those of a section with its name and a dot before theirs."""
    for name, raw in file.items():
        if name in NAMES:
            yield name, raw
        elif name in SECTIONS and isinstance(raw.value, dict):
            for part, value in raw.value.items():
                yield f"{name}.{part}", replace(raw, value=value, source=raw.lines.get((name, str(part)), raw.source))
        elif name in SECTIONS and raw.value is not None:
            what = f"'{name}' is {raw.value!r:.100} where a mapping belongs"
            problems.append(Problem(raw.source, what, "write one setting a line below it, or remove it"))


def _meaning(name: str, raw: Value, group: Any, problems: list[Problem], notes: list[str]) -> dict[str, Any]:
    """Return what a setting gives for each recipe key, nothing where it is refused or changes nothing."""
    section, _, last = name.rpartition(".")
    known = names().get(last)
    if section and last not in SECTIONS[section]:
        close = nearest_of(last, SECTIONS[section])
        fix = f"write '{close}'" if close else f"write one of {', '.join(SECTIONS[section])}"
        fix = known.fix(raw.value) if known else fix
        problems.append(Problem(raw.source, f"unknown key '{last}' in {section}", fix))
    elif raw.value is None:
        problems.append(Problem(raw.source, f"'{name}' is empty", "give it a value, or remove it"))
    elif last == "batch_size":
        return _batch(raw, group, problems)
    elif last == "sync_frequency" and type(raw.value) is int and raw.value > 1:
        why = "vLLM gets the weights before every generation, which is more often"
        notes.append(f"{raw.source}: sync_frequency{short(raw.value)} is not read: {why}")
    elif why := harmless(last, raw.value):
        notes.append(f"{raw.source}: {name}{short(raw.value)} changes nothing: {why}")
    elif writes := by_value(last, raw.value) or (known.values(raw.value) if known else {}):
        return writes
    elif known:
        problems.append(Problem(raw.source, f"'{name}{short(raw.value)}' has no equal here", known.fix(raw.value)))
    return {}


def _batch(raw: Value, group: Any, problems: list[Problem]) -> dict[str, Any]:
    """Return the prompts of a batch of completions, which is whole groups of ``num_generations``."""
    size = raw.value
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        what = f"'batch_size' is {size!r:.100} where a whole number of completions belongs"
        problems.append(Problem(raw.source, what, "write e.g. batch_size: 64"))
        return {}
    if not str(group).isdecimal() or not int(group):
        return {}  # num_generations is wrong, which is said at its own place
    if rest := size % int(group):
        fix = f"write batch_size: {size - rest + int(group)}, or another num_generations"
        problems.append(Problem(raw.source, f"batch_size {size} is not whole groups of num_generations {group}", fix))
        return {}
    return {"prompts_per_step": size // int(group)}
