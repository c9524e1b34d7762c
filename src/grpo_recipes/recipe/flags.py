"""Recipe keys on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.keys import catalogue


def read_flags(flags: Iterable[str], problems: list[Problem]) -> list[tuple[str, Any]]:
    """``--key value``, ``--key=value``, ``--key`` and ``--no_key`` (booleans), hyphens or underscores."""
    pairs: list[tuple[str, Any]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            fix = "put the recipe right after the command, and write --key value for a key"
            problems.append(Problem(f"'{flag}'", "stands alone on the command line", fix))
            continue
        name, equals, text = flag[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            pairs.append((name, text))
            continue
        values: list[str] = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        pairs.append(_pair(name, values, problems))
    return pairs


def _pair(name: str, values: list[str], problems: list[Problem]) -> tuple[str, Any]:
    if not values and name.startswith("no_") and catalogue().get(name[3:], {}).get("type") == "bool":
        return name[3:], False
    if not values:
        return name, True
    if catalogue().get(name, {}).get("type", "").startswith("list") and len(values) > 1:
        return name, values
    if len(values) > 1:
        problems.append(Problem(f"--{name}", f"takes one value, got {values}", "quote it or drop the rest"))
    return name, values[0]
