"""`grpo keys`: search the keys of a recipe, the variables and the benchmarks."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Iterator
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.recipe.dialects import ALIASES, OBSOLETE_KEYS, nearest, slurm_guide
from grpo_recipes.recipe.keys import (
    ENVIRONMENT_KEYS,
    OWNED_KEYS,
    READ_VARIABLES,
    SHELL_VARIABLES,
    catalogue,
    nested_catalogue,
)
from grpo_recipes.recipe.registry import BENCHMARKS

HELP = "search the keys of a recipe"
TAKES_RECIPE = False
_NO_KEYS = {**OBSOLETE_KEYS, **OWNED_KEYS, **{alias: f"write {key}" for alias, key in ALIASES.items()}}

_OTHER_TABLES = {
    "--env": {
        **{name: f"stands for the key {key}" for name, key in ENVIRONMENT_KEYS.items()},
        **READ_VARIABLES,
        **SHELL_VARIABLES,
        **slurm_guide.SHELL_VARIABLES,
    },
    "--benchmarks": {name: benchmark.help for name, benchmark in BENCHMARKS.items()},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The word, which table, and --json."""
    parser.add_argument("word", nargs="?", help="part of a name or of its meaning; every key by default")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--env", action="store_true", help="the environment variables that are read")
    tables.add_argument("--benchmarks", action="store_true", help="the benchmarks that a recipe can name")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace, _: list[str]) -> int:
    """Print the keys, variables or benchmarks that have the word in their name or meaning.

    Returns:
        0.

    Raises:
        ConfigError: nothing has it.
    """
    word = (options.word or "").lower()
    other = "--env" if options.env else "--benchmarks" if options.benchmarks else ""
    found = _keys(word) if not other else _found(_OTHER_TABLES[other], word)
    if not found or (word in _NO_KEYS and not other):
        raise _nothing(options.word, other)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print("\n".join(_lines(found)))
    return 0


def _keys(word: str) -> dict[str, dict[str, Any]]:
    entries = dict(catalogue())
    for path, nested in nested_catalogue().items():
        entries |= {f"{path}.{name}": entry for name, entry in nested.items()}
    return {name: entry for name, entry in sorted(entries.items()) if word in f"{name} {entry['help']}".lower()}


def _found(table: dict[str, str], word: str) -> dict[str, dict[str, Any]]:
    return {name: {"help": text} for name, text in sorted(table.items()) if word in f"{name} {text}".lower()}


def _nothing(word: str, table: str) -> Exception:
    if table:
        return config_error(
            f"'{word}'", f"nothing in grpo keys {table} has that in its name or meaning", "leave it out"
        )
    if word.lower() in _NO_KEYS:
        return config_error(f"'{word}'", "is no key of a recipe", _NO_KEYS[word.lower()])
    close = nearest(word)
    return config_error(
        f"'{word}'", "no key has that in its name or meaning", f"try {close}" if close else "see grpo keys"
    )


def _lines(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, entry in found.items():
        facts = _facts(entry)
        yield f"{name}  ({facts})" if facts else name
        yield from textwrap.wrap(entry["help"], 110, initial_indent="    ", subsequent_indent="    ")


def _facts(entry: dict[str, Any]) -> str:
    if "type" not in entry:
        return ""
    limits = [f"{sign} {entry[limit]:g}" for sign, limit in ((">=", "min"), ("<=", "max")) if limit in entry]
    kind = " | ".join(entry["choices"]) if entry.get("choices") else entry["type"]
    return ", ".join([" ".join([kind, *limits]), f"default {json.dumps(entry['default'])}", entry["config"]])
