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
# Other names that a recipe may use, those of the Slurm training guide; both in one place contradict each other.
ALIASES = {"gen_temperature": "temperature", "gen_top_p": "top_p", "init_kl_coeff": "beta",
           "weight_bridge_mode": "weight_sync"}  # fmt: skip
# The weight sync methods under their names in an example trainer -> ours.
SYNC_METHOD_ALIASES = {"none": "restart", "shared_vllm": "shared", "lora_only": "lora", "lora_restart": "restart"}
ADAPTER_MODES = ("lora_only", "lora_restart")  # those with use_peft, where nothing else is said
# Values elsewhere that mean one of ours.
SAME_VALUES: dict[str, Mapping[Any, str]] = {
    "scale_rewards": {True: "group", False: "none"}, "weight_sync": SYNC_METHOD_ALIASES
}  # fmt: skip
# Names that are refused -> patterns of the values that ask for what happens anyway: accepted with a note.
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
# Variables of older TRL and transformers, and of the guide -> what to set instead.
UNREAD_VARIABLES = expand_names(
    ("TRANSFORMERS_CACHE", "set CACHE_ROOT or HF_HOME"),
    ("HF_HUB_ENABLE_HF_TRANSFER", "set HF_XET_HIGH_PERFORMANCE=1"),
    ("HF_HUB_REQUEST_TIMEOUT", "set HF_HUB_DOWNLOAD_TIMEOUT"),
    ("TORCH_LOAD_WEIGHTS_ONLY TORCH_FORCE_FULL_STATE_DICT", "unset it"),
    ("GPUS_PER_NODE", "unset it; the launcher counts the GPUs"),
    ("MAX_PROMPT_CHARS", "write max_prompt_length: tokens, above which a prompt is dropped"),
    ("FLASH_ATTENTION_FORCE_DISABLED TRANSFORMERS_NO_FLASH_ATTN", "write attn_implementation: sdpa"),
)
# Parts of nested settings whose names mean something else than the same names elsewhere.
_OTHER_PARTS = frozenset(
    ("critic", "reward_model", "ref", "reference", "val_kwargs", "eval", "evaluation", "validation", "test",
     "tokenizer", "teacher", "judge")
)  # fmt: skip
_MOST_SUGGESTIONS = 20  # of one file, which is not a recipe if it has more unknown names
_FEWEST_FOREIGN = 3  # names by which a file is one of another project, rather than a recipe with a slip


@functools.cache
def names() -> dict[str, Row]:
    """Return what each name of other projects means here."""
    return dict(read_table(NAMES_FILE, "names").by_name)


def by_value(name: str, value: Any) -> dict[str, Any]:
    """Return the keys that replace a setting whose value decides, or nothing if it has no such values."""
    row = names().get(name) or read_table(NAMES_FILE, "values_of_owned_keys").by_name.get(name)
    return dict(row.keys_for(value) or {}) if row and row.values else {}


@functools.cache
def reward_names() -> dict[str, str]:
    """Return the reward here for each name of one elsewhere."""
    return {name: ours for ours, of_ours in read_file(NAMES_FILE)["rewards"].items() for name in of_ours.split()}


@functools.cache
def other_rewards(judging: bool) -> dict[str, str]:
    """Return why there is no reward here for a name of one elsewhere, which judges answers or only their form."""
    rows = read_file(NAMES_FILE)["judging_rewards" if judging else "other_rewards"]
    return {name: why for why, of_row in rows.items() for name in of_row.split()}


def reward_fix(name: str) -> str:
    """Return what to write instead of a name that is not a reward."""
    if close := reward_names().get(name) or nearest_of(name, rewards()):
        return f"write {close}"
    if why := {**other_rewards(True), **other_rewards(False)}.get(name):
        return f"remove it ({why}), or write your own as file.py:function"
    if name.endswith(".py"):
        return f"write {name}:function"
    if "/" in name:
        return "write a function that asks the model, as file.py:function (docs/rewards.md)"
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        return f"write {':'.join(name.rsplit('.', 1))}"
    return f"write one of {', '.join(sorted(rewards()))}, or your own as module:function or file.py:function"


def meaning_of(name: str) -> Row | None:
    """Return what a name is here, a key of the catalogue itself included; None where nobody knows.

    Of a nested name, ``actor.optim.lr``, the longest known end decides.
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
    """Return why a setting changes nothing though it is not ours, empty where it would."""
    if name == "logging_steps" and str(value) in ("1", "1.0"):  # a frozen recipe has the number as TRL types it
        return ""
    patterns = HARMLESS.get(name, "").split()
    patterns += ["none"] if name in OWNED_KEYS or name in names() else []
    known = meaning_of("logging_strategy" if name == "logging_steps" else name)
    if known is None or not any(fnmatchcase(str(as_bool(value)).lower(), pattern) for pattern in patterns):
        return ""
    return known.fix_for(None).removeprefix("remove it; ")


def recipe_keys(layer: Iterable[tuple[str, Value]], problems: list[Problem], notes: list[str]) -> dict[str, Value]:
    """Return what a layer gives for each recipe key; every name that cannot be one becomes a problem."""
    found: dict[str, Value] = {}
    given: dict[str, str] = {}
    unknown = 0
    for name, raw in layer:
        key = ALIASES.get(name, name)
        known = key in catalogue() and key != "logging_steps"
        if not known and (why := harmless(name, raw.value)):
            notes.append(f"{raw.source}: {name}{short(raw.value)} changes nothing: {why}")
        elif problem := key_problem(key, raw.source, raw.value, suggest=unknown < _MOST_SUGGESTIONS):
            problems.append(problem)
            unknown += problem.what.startswith("unknown")
        else:
            if given.get(key, name) != name:
                what = f"'{name}' and '{given[key]}' are two names of one key"
                problems.append(Problem(raw.source, what, f"remove {name if name != key else given[key]}"))
            elif key != name:
                notes.append(f"{raw.source}: '{name}' is read as {key}")
            if key == "weight_sync" and raw.value in ADAPTER_MODES:
                found.setdefault("use_peft", replace(raw, value=True))
            value = as_bool(raw.value)
            if isinstance(value, bool | str):
                raw = replace(raw, value=SAME_VALUES.get(key, {}).get(value, raw.value))
            found[key], given[key] = raw, name
    return found


def key_problem(key: str, source: str, value: Any = None, suggest: bool = True) -> Problem | None:
    """Return why a name is not a key of the catalogue, and what to write instead; None if it is one.

    The search for the nearest key takes milliseconds; ``suggest`` turns it off.
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
    """Return the key of which ``name`` is a misspelling, or that a variable stands for; None when there is none."""
    if name.upper() in environment_keys():
        return environment_keys()[name.upper()]
    begun = [key for key in catalogue() if key.startswith(name)] if len(name) > 3 else []
    shortest = min(begun, key=len, default="")  # of num_gen: num_generations, which begins the others
    clear = begun and all(key.startswith(shortest) for key in begun)
    return shortest if clear else nearest_of(name, [*catalogue(), *names()])


class TranslatedRecipe(Protocol):
    """A recipe of another project after its translation, for `grpo new --from`."""

    def files(self) -> dict[Path, str]:
        """Return the text of each file to write."""

    def report(self) -> list[str]:
        """Return the lines to print: every change, and what is left to do."""


def is_foreign(layer: Mapping[str, Value]) -> bool:
    """Return whether a file is a recipe of another project, by the names in it."""
    foreign = [key for key in layer if key not in catalogue() and (key in OWNED_KEYS or key in names())]
    return len(foreign) >= _FEWEST_FOREIGN


def migration(path: Path, layer: Mapping[str, Value]) -> list[Problem]:
    """Return the command that translates a recipe of another project; nothing for a recipe of this package."""
    if not is_foreign(layer) or not any(extension.translate for extension in extensions()):
        return []
    command = f"grpo new {shell_quote(f'my-{path.stem}.yaml')} --from {shell_path(path)}"
    return [Problem(display_path(path), "this looks like a recipe of another project", f"{command} translates it")]
