"""Where foreign names become recipe keys: each is translated, or refused with what to write instead.

A dialect is a module of tables beside this one. ``translate`` reads one layer of a recipe (a file, the variables, the
flags); after it there are only keys of the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.dialects import older_trl, slurm_guide
from grpo_recipes.recipe.document import Value, as_bool
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, OWNED_KEYS, catalogue, nearest_of

ALIASES = slurm_guide.ALIASES
OBSOLETE_KEYS = {**older_trl.REFUSED, **slurm_guide.REFUSED}


def translate(layer: Iterable[tuple[str, Value]], problems: list[Problem], notes: list[str]) -> dict[str, Value]:
    """Return what a layer gives for each recipe key; every name that cannot be one becomes a problem."""
    found: dict[str, Value] = {}
    names: dict[str, str] = {}
    for name, raw in layer:
        key = ALIASES.get(name, name)
        if name in older_trl.HARMLESS and as_bool(raw.value) is older_trl.HARMLESS[name]:
            notes.append(f"{raw.source} {str(raw.value).lower()} has no effect: {OBSOLETE_KEYS[name]}")
        elif problem := refusal(key, raw.source):
            problems.append(problem)
        else:
            if names.get(key, name) != name:
                what = f"'{name}' and '{names[key]}' are two names of one key"
                problems.append(Problem(raw.source, what, f"keep {key}"))
            elif key != name:
                notes.append(f"{raw.source}: '{name}' is read as {key}")
            found[key], names[key] = raw, name
    return found


def refusal(key: str, source: str) -> Problem | None:
    """Return why a name is not a key of the catalogue, and what to write instead; None where it is one."""
    if key in catalogue():
        return None
    if key in OWNED_KEYS:
        return Problem(source, f"'{key}' is not a recipe's to set", OWNED_KEYS[key])
    if key in OBSOLETE_KEYS:
        return Problem(source, f"'{key}' is obsolete", OBSOLETE_KEYS[key])
    close = nearest(key)
    flag = " (flags are not abbreviated)" if source.startswith("--") and close and close.startswith(key) else ""
    return Problem(source, f"unknown key '{key}'{flag}", f"write '{close}'" if close else "remove it")


def nearest(name: str) -> str | None:
    """Return the key most like ``name``, or that a variable ``name`` stands for; None when nothing is close."""
    if name.upper() in ENVIRONMENT_KEYS:
        return ENVIRONMENT_KEYS[name.upper()]
    begun = [key for key in catalogue() if key.startswith(name)]
    return begun[0] if len(begun) == 1 else nearest_of(name, [*catalogue(), *OBSOLETE_KEYS])
