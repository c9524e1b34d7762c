"""Config converters: settings of other tools become recipe keys, or are rejected by name with the replacement.

This module handles single foreign names in a recipe. ``recipe_keys`` reads one layer (a file, the variables, the flags)
and returns only keys of the catalogue. ``names.yaml`` lists the names of other projects and of older versions.
``table`` has the table format and its translator. ``files`` reads whole YAML files of another tool.
"""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from grpo_recipes.errors import Problem
from grpo_recipes.paths import display_path, shell_path, shell_quote
from grpo_recipes.recipe.converters.table import VALUE, Row, read_file, read_table, short
from grpo_recipes.recipe.document import Value, as_bool
from grpo_recipes.recipe.extensions import extensions
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, environment_keys, expand_names, nearest_of
from grpo_recipes.recipe.registry import rewards

NAMES_FILE = Path(__file__).with_name("names.yaml")
# Other names that a recipe may use for a key, from the Slurm training guide. A file can't set a key under both names.
ALIASES = {"gen_temperature": "temperature", "gen_top_p": "top_p", "init_kl_coeff": "beta",
           "weight_bridge_mode": "weight_sync"}  # fmt: skip
# Name of a weight sync method in the example trainer -> our name.
SYNC_METHOD_ALIASES = {"none": "restart", "shared_vllm": "shared", "lora_only": "lora", "lora_restart": "restart"}
ADAPTER_MODES = ("lora_only", "lora_restart")  # names that imply use_peft
# Key -> values of other tools -> our value with the same meaning.
SAME_VALUES: dict[str, Mapping[Any, str]] = {
    "scale_rewards": {True: "group", False: "none"}, "weight_sync": SYNC_METHOD_ALIASES,
    "advantage_estimator": {
        "grpo": "group", "group_norm": "group", "reinforce": "reinforce_plus_plus",
        "reinforce_baseline": "reinforce_plus_plus_baseline",
    },
}  # fmt: skip
# Rejected name -> patterns of values that change nothing. They are accepted with a note.
HARMLESS = expand_names(
    ("output_dir logging_first_step overwrite_output_dir", "*"),
    ("logging_steps", "[0-9]*"),
    ("logging_strategy", "steps"),
    (
        "do_eval do_predict no_cuda use_cpu use_mps_device auto_find_batch_size remove_unused_columns packing "
        "eval_packing prediction_loss_only group_by_length use_transformers_paged batch_eval_metrics",
        "false",
    ),
    ("do_train save_safetensors", "true"),
    ("include_num_input_tokens_seen", "false no"),
    ("atropos_record", "false"),
    ("label_smoothing_factor", "0 0.0"),
    ("local_rank", "-1"),
    ("vllm_device", "auto"),
    ("disable_log_stats", "true"),
    ("sync_frequency", "1"),
)
# Variables of the guide and of older versions of TRL and transformers -> the fix.
UNREAD_VARIABLES = expand_names(
    ("TRANSFORMERS_CACHE", "set CACHE_ROOT or HF_HOME"),
    ("HF_HUB_ENABLE_HF_TRANSFER", "set HF_XET_HIGH_PERFORMANCE=1"),
    ("HF_HUB_REQUEST_TIMEOUT", "set HF_HUB_DOWNLOAD_TIMEOUT"),
    ("TORCH_LOAD_WEIGHTS_ONLY TORCH_FORCE_FULL_STATE_DICT", "unset it"),
    ("GPUS_PER_NODE", "unset it; the launcher counts the GPUs"),
    ("MAX_PROMPT_CHARS", "write max_prompt_length: tokens, above which a prompt is dropped"),
    ("FLASH_ATTENTION_FORCE_DISABLED TRANSFORMERS_NO_FLASH_ATTN", "write attn_implementation: sdpa"),
)
# Sections of nested settings in which a name has a different meaning.
_OTHER_PARTS = frozenset(
    ("critic", "reward_model", "ref", "reference", "val_kwargs", "eval", "evaluation", "validation", "test",
     "tokenizer", "teacher", "judge")
)  # fmt: skip
_MOST_SUGGESTIONS = 20  # per file; a file with more unknown names is not a recipe
_FEWEST_FOREIGN = 3  # a file with this many foreign names is a recipe of another project


@functools.cache
def names() -> dict[str, Row]:
    """Return the row of each name of another project: its meaning here."""
    return dict(read_table(NAMES_FILE, "names").by_name)


def by_value(name: str, value: Any) -> dict[str, Any]:
    """Return the recipe keys that replace a foreign setting with this value.

    The result is empty if the table lists no values for the setting, or no keys for this value.
    """
    row = names().get(name) or read_table(NAMES_FILE, "values_of_owned_keys").by_name.get(name)
    return dict(row.keys_for(value) or {}) if row and row.values else {}


@functools.cache
def reward_names() -> dict[str, str]:
    """Return the rewards of other projects that ``names.yaml`` lists: their name -> our reward."""
    rows = read_file(NAMES_FILE)["rewards"]
    known = rewards()
    return {name: reward for reward, others in rows.items() if reward in known for name in others.split()}


@functools.cache
def other_rewards(judging: bool) -> dict[str, str]:
    """Return reward names of other projects without an equivalent -> the reason.

    With ``judging``, they are rewards that judge answers, otherwise rewards that judge only the form.
    """
    rows = read_file(NAMES_FILE)["judging_rewards" if judging else "other_rewards"]
    return {name: reason for reason, other_names in rows.items() for name in other_names.split()}


def reward_fix(name: str) -> str:
    """Return the fix of the error about an unknown reward ``name`` in ``reward_funcs``, for example "write accuracy".

    The fix is our reward with the same meaning or a similar name. Without one, it is to remove a reward of another
    project that has no equivalent, or to write a function as ``file.py:function``.
    """
    if close := reward_names().get(name) or nearest_of(name, rewards()):
        return f"write {close}"
    if reason := {**other_rewards(True), **other_rewards(False)}.get(name):
        return f"remove it ({reason}), or write your own as file.py:function"
    if name.endswith(".py"):
        return f"write {name}:function"
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return f"write {':'.join(name.rsplit('.', 1))}"
    return f"write one of {', '.join(sorted(rewards()))}, or your own as module:function or file.py:function"


def meaning_of(name: str) -> Row | None:
    """Return the meaning of a foreign name or of a recipe key as a row; None if it is unknown.

    For a nested name such as ``actor.optim.lr``, the longest known end decides. Names in sections such as ``critic``
    are unknown, since they mean something else there.
    """
    parts = name.split(".")
    if _OTHER_PARTS & set(parts[:-1]):
        return None
    for end in (".".join(parts[start:]) for start in range(len(parts))):
        key = ALIASES.get(end, end)
        if key in catalogue():
            return Row((end,), sets={key: VALUE})
        if key in names() or key in OWNED_KEYS:
            return names().get(key) or Row((end,), fix=OWNED_KEYS[key])
    return None


def harmless(name: str, value: Any) -> str:
    """Return why a foreign setting with this value changes nothing; an empty string if it would change something."""
    if name == "logging_steps" and str(value) in ("1", "1.0"):  # a frozen recipe has the number as a float
        return ""
    patterns = HARMLESS.get(name, "").split()
    patterns += ["none"] if name in OWNED_KEYS or name in names() else []
    known = meaning_of("logging_strategy" if name == "logging_steps" else name)
    if known is None or not any(fnmatchcase(str(as_bool(value)).lower(), pattern) for pattern in patterns):
        return ""
    return known.fix_for(None).removeprefix("remove it; ")


def recipe_keys(layer: Iterable[tuple[str, Value]], problems: list[Problem], notes: list[str]) -> dict[str, Value]:
    """Return the recipe keys of one layer: a file, the variables, or the flags.

    Aliases become the names of their keys, and values of other tools become ours. Append a problem for each other name,
    or a note if the setting changes nothing. The values ``lora_only`` and ``lora_restart`` of ``weight_sync`` also set
    ``use_peft``, if the layer has not set it before.
    """
    values: dict[str, Value] = {}
    spellings: dict[str, str] = {}  # key -> the name that the layer uses for it
    unknown = 0
    for name, raw in layer:
        key = ALIASES.get(name, name)
        known = key in catalogue() and key != "logging_steps"
        if not known and (reason := harmless(name, raw.value)):
            setting = f"{raw.source}: {name}" if raw.source.lstrip("-") != name else raw.source
            notes.append(f"{setting}{short(raw.value)} changes nothing: {reason}")
        elif problem := key_problem(key, raw.source, raw.value, suggest=unknown < _MOST_SUGGESTIONS):
            problems.append(problem)
            unknown += problem.what.startswith("unknown")
        else:
            if spellings.get(key, name) != name:
                message = f"'{name}' and '{spellings[key]}' are two names of one key"
                problems.append(Problem(raw.source, message, f"remove {name if name != key else spellings[key]}"))
            elif key != name:
                notes.append(f"{raw.source}: '{name}' is read as {key}")
            if key == "weight_sync" and raw.value in ADAPTER_MODES:
                values.setdefault("use_peft", replace(raw, value=True))
            value = as_bool(raw.value)
            if isinstance(value, bool | str):
                raw = replace(raw, value=SAME_VALUES.get(key, {}).get(value, raw.value))
            values[key], spellings[key] = raw, name
    return values


def key_problem(key: str, source: str, value: Any = None, suggest: bool = True) -> Problem | None:
    """Return the problem of a name that is not a recipe key, with the fix; None if it is a recipe key.

    ``source`` is the line or flag that sets it, and ``value`` its value, for the fix. ``suggest=False`` skips the
    search for the nearest key, which takes milliseconds.
    """
    if key in catalogue():
        return None
    if key in OWNED_KEYS:
        return Problem(source, f"'{key}' cannot be set in a recipe", OWNED_KEYS[key])
    flag = source.startswith("--")
    if known := names().get(key):
        return Problem(source, f"'{key}' is not a key here", known.fix_for(value, flag))
    close = nearest(key) if suggest else None
    if close is None:
        return Problem(source, f"unknown key '{key}'", "remove it")
    meant = names().get(close) or Row((close,), sets={close: VALUE})
    fix = meant.fix_for(value, flag) if flag or close in names() else f"write '{close}'"
    hint = " (flags are not abbreviated)" if flag and close.startswith(key) else ""
    return Problem(source, f"unknown key '{key}'{hint}", fix)


def nearest(name: str) -> str | None:
    """Return the key that ``name`` misspells or abbreviates, or that the variable ``name`` sets; None without a match.

    The result may also be a foreign name that the table contains.
    """
    if name.upper() in environment_keys():
        return environment_keys()[name.upper()]
    longer = [key for key in catalogue() if key.startswith(name)] if len(name) > 3 else []
    shortest = min(longer, key=len, default="")  # num_gen: num_generations, the beginning of all others
    unambiguous = longer and all(key.startswith(shortest) for key in longer)
    return shortest if unambiguous else nearest_of(name, [*catalogue(), *names()])


class TranslatedRecipe(Protocol):
    """A recipe of another project after its translation, for `grpo new --from`."""

    def files(self) -> dict[Path, str]:
        """Return the text of each file to write."""

    def report(self) -> list[str]:
        """Return the lines to print: every change, and the remaining work."""


def is_foreign(layer: Mapping[str, Value]) -> bool:
    """Return whether a file is a recipe of another project, judged by its names."""
    foreign = [key for key in layer if key not in catalogue() and (key in OWNED_KEYS or key in names())]
    return len(foreign) >= _FEWEST_FOREIGN


def migration(path: Path, layer: Mapping[str, Value]) -> list[Problem]:
    """Return a problem that recommends `grpo new --from` if a file is a recipe of another project; else [].

    Return [] also if no installed extension translates recipes.
    """
    if not is_foreign(layer) or not any(extension.translate for extension in extensions()):
        return []
    command = f"grpo new {shell_quote(f'my-{path.stem}.yaml')} --from {shell_path(path)}"
    return [Problem(display_path(path), "this looks like a recipe of another project", f"{command} translates it")]
