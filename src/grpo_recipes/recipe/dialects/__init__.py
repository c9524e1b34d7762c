"""Where foreign names become recipe keys: each is translated, or refused with what to write instead.

``recipe_keys`` reads one layer of a recipe (a file, the variables, the flags); after it there are only keys of the
catalogue. ``names.yaml`` has the names of other projects and of older versions, which are read when one is met.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.paths import as_argument, quoted, shown
from grpo_recipes.recipe.document import Value, as_bool
from grpo_recipes.recipe.keys import OWNED_KEYS, catalogue, each, environment_keys, nearest_of
from grpo_recipes.recipe.registry import rewards
from grpo_recipes.secrets import secret_value

NAMES_FILE = Path(__file__).with_name("names.yaml")
# Other names that a recipe may use, those of the Slurm training guide; both in one place contradict each other.
ALIASES = {"gen_temperature": "temperature", "gen_top_p": "top_p", "init_kl_coeff": "beta",
           "weight_bridge_mode": "weight_sync"}  # fmt: skip
# The modes of Atropos' example trainer -> our bridges.
BRIDGE_MODES = {"none": "restart", "shared_vllm": "shared", "lora_only": "lora", "lora_restart": "restart"}
ADAPTER_MODES = ("lora_only", "lora_restart")  # those with use_peft, where nothing else is said
# Values elsewhere that mean one of ours.
SAME_VALUES: dict[str, Mapping[Any, str]] = {
    "scale_rewards": {True: "group", False: "none"}, "weight_sync": BRIDGE_MODES
}  # fmt: skip
# Names that are refused -> patterns of the values that ask for what happens anyway: accepted with a note.
HARMLESS = each(
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
    ("label_smoothing_factor", "0 0.0"),
    ("local_rank", "-1"),
    ("vllm_device", "auto"),
    ("disable_log_stats", "true"),
    ("sync_frequency", "1"),
)
# Variables of older TRL and transformers, and of the guide -> what to set instead.
UNREAD_VARIABLES = each(
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
_WORD = re.compile(r"[\d.eE+-]+|true|false")  # of the command line, where all values are texts
_MOST_SUGGESTIONS = 20  # of one file, which is not a recipe if it has more unknown names
_FEWEST_FOREIGN = 3  # names by which a file is one of another project, rather than a recipe with a slip


def short(value: Any) -> str:
    """Return ``: value`` as a recipe has it, an empty text where it is too long for a message."""
    if isinstance(value, str) and _WORD.fullmatch(value):
        return f": {value}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n...\n").strip()
    return f": {text}" if value is not None and len(text) <= 60 and not secret_value(value) else ""


def _as_flag(key: str, value: Any) -> str:
    """Return a key with its value as the command line has them; ``VALUE`` for one that is missing, long or secret."""
    text = short(",".join(map(str, value)) if isinstance(value, list) else value).removeprefix(": ")
    missing = value is True and catalogue()[key]["type"] != "bool"
    return f"--{key} {quoted(text) if text and not missing else 'VALUE'}"


@dataclass(frozen=True)
class Meaning:
    """What a foreign name is here."""

    writes: Mapping[str, Any]  # keys of the catalogue with their values; "{value}" is the one that was given
    instead: str = ""  # what to do where no key has this meaning

    def values(self, value: Any) -> dict[str, Any]:
        """Return keys with the values that the foreign name's ``value`` gives them."""
        if isinstance(value, list) and len(value) == 1 and [catalogue()[key]["type"] for key in self.writes] == ["str"]:
            value = value[0]
        return {key: value if given == "{value}" else given for key, given in self.writes.items()}

    def fix(self, value: Any, flag: bool = False) -> str:
        """Return what to write instead of the name, with its own ``value``: lines of a recipe, or flags."""
        given = self.values(value).items()
        words = " ".join(_as_flag(*one) for one in given) if flag else " and ".join(f"{k}{short(v)}" for k, v in given)
        return self.instead or f"write {words}"


@functools.cache
def _tables() -> dict[str, Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML's own takes longer than all of grpo check
    tables: dict[str, Any] = yaml.load(NAMES_FILE.read_text(encoding="utf-8"), loader)
    return tables


@functools.cache
def names() -> dict[str, Meaning]:
    """Return what each name of other projects means here."""
    tables = _tables()
    found = {name: Meaning({key: "{value}"}) for key, of_key in tables["same"].items() for name in of_key.split()}
    found |= {name: Meaning(writes) for of_row, writes in tables["other"].items() for name in of_row.split()}
    return found | {name: Meaning({}, why) for why, of_row in tables["gone"].items() for name in of_row.split()}


def by_value(name: str, value: Any) -> dict[str, Any]:
    """Return what replaces a setting whose value decides which, nothing where it is no such setting."""
    for of_row, writes in _tables()["by_value"].items():
        if name in of_row.split():
            return next((writes[one] for one in writes if fnmatchcase(str(value).lower(), one)), {})
    return {}


@functools.cache
def reward_names() -> dict[str, str]:
    """Return the reward here for each name of one elsewhere."""
    return {name: ours for ours, of_ours in _tables()["rewards"].items() for name in of_ours.split()}


@functools.cache
def other_rewards(judging: bool) -> dict[str, str]:
    """Return why there is no reward here for a name of one elsewhere, which judges answers or only their form."""
    rows = _tables()["judging_rewards" if judging else "other_rewards"]
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


def meaning_of(name: str) -> Meaning | None:
    """Return what a name is here, a key of the catalogue itself included; None where nobody knows.

    Of a nested name, ``actor.optim.lr``, the longest known end decides.
    """
    parts = name.split(".")
    if _OTHER_PARTS & set(parts[:-1]):
        return None
    for end in (".".join(parts[start:]) for start in range(len(parts))):
        key = ALIASES.get(end, end)
        if key in catalogue():
            return Meaning({key: "{value}"})
        if key in names() or key in OWNED_KEYS:
            return names().get(key) or Meaning({}, OWNED_KEYS[key])
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
    return known.fix(None).removeprefix("remove it; ")


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
        elif problem := refusal(key, raw.source, raw.value, suggest=unknown < _MOST_SUGGESTIONS):
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


def refusal(key: str, source: str, value: Any = None, suggest: bool = True) -> Problem | None:
    """Return why a name is not a key of the catalogue, and what to write instead; None if it is one.

    The search for the nearest key takes milliseconds; ``suggest`` turns it off.
    """
    if key in catalogue():
        return None
    if key in OWNED_KEYS:
        return Problem(source, f"'{key}' cannot be set in a recipe", OWNED_KEYS[key])
    flag = source.startswith("--")
    if known := names().get(key):
        return Problem(source, f"'{key}' is not a key here", known.fix(value, flag))
    close = nearest(key) if suggest else None
    if close is None:
        return Problem(source, f"unknown key '{key}'", "remove it")
    meant = names().get(close) or Meaning({close: "{value}"})
    fix = meant.fix(value, flag) if flag or close in names() else f"write '{close}'"
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


def migration(path: Path, layer: Mapping[str, Value]) -> list[Problem]:
    """Return the answer to a file that is a recipe of another project by the names in it, nothing to any other."""
    if sum(key not in catalogue() and (key in OWNED_KEYS or key in names()) for key in layer) < _FEWEST_FOREIGN:
        return []
    command = f"grpo new {quoted(f'my-{path.stem}.yaml')} --from {as_argument(path)}"
    return [Problem(shown(path), "this looks like a recipe of another project", f"{command} translates it")]
