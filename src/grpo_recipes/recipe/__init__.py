"""Read, merge and type a recipe, with the source of every value. No torch.

Precedence: flag > environment variable > YAML > default. The trainer gets the result through TrlParser alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe.dialects import translate
from grpo_recipes.recipe.document import read_document, read_flags
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS, catalogue
from grpo_recipes.recipe.values import Raw, typed
from grpo_recipes.secrets import secret_value

DEFAULT_SOURCE = "default"


@dataclass(frozen=True)
class Value:
    """A value, of the catalogue's type, and where it came from."""

    value: Any
    source: str  # file:line, --flag, a variable's name, or "default"
    shadowed: str = ""  # file:line of the recipe's value that a flag or a variable overrides


class BrokenKey(Exception):
    """A key was read whose given value is wrong, so that nothing that depends on it can be judged."""


@dataclass(frozen=True)
class Recipe:
    """A typed recipe: every key of the catalogue with its value and source."""

    path: Path  # the YAML file it was read from
    values: dict[str, Value]
    notes: list[str] = field(default_factory=list)  # what was accepted and is worth knowing
    broken: frozenset[str] = frozenset()  # keys whose given value is wrong; none after ``read_recipe``

    def __getitem__(self, key: str) -> Any:
        if key in self.broken:
            raise BrokenKey(key)
        return self.values[key].value

    def source(self, key: str) -> str:
        """Return where the value of ``key`` came from."""
        return self.values[key].source

    def given(self, key: str) -> bool:
        """Return whether the user set ``key`` anywhere."""
        return self.source(key) != DEFAULT_SOURCE

    def place(self, key: str) -> str:
        """Return where a person looks for ``key``: its source, or the file where nobody gave it."""
        return self.source(key) if self.given(key) else self.path.name

    def problem(self, key: str, what: str, fix: str) -> Problem:
        """Return a problem with ``key`` at the place where a person looks for it."""
        return Problem(self.place(key), what, fix)

    def with_value(self, key: str, value: Value) -> Recipe:
        """Return a copy with another value of ``key``."""
        return replace(self, values={**self.values, key: value})

    def as_yaml(self) -> str:
        """Return the given values as YAML, each under a comment that names its source."""
        return "".join(
            f"# {entry.source}\n{yaml.safe_dump({key: entry.value}, allow_unicode=True, width=10**6)}"
            for key, entry in sorted(self.values.items())
            if entry.source != DEFAULT_SOURCE
        )


def read_frozen(path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Recipe:
    """Read what ``as_yaml`` wrote, with the sources it names, and what overrides it now, as ``read_recipe``."""
    recipe = read_recipe(path, flags, environment)
    lines = path.read_text(encoding="utf-8").splitlines()
    values = dict(recipe.values)
    for key, entry in recipe.values.items():
        name, _, line = entry.source.rpartition(":")
        if name == path.name:
            values[key] = Value(entry.value, lines[int(line) - 2].removeprefix("# "))
    return Recipe(path, values, recipe.notes)


def read_recipe(path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe, and the flags and variables that override it.

    A ConfigError reports every unknown key, duplicate, wrong type, value out of range and secret at once.
    """
    recipe, problems = merge_recipe(path, flags, environment)
    if problems:
        raise ConfigError(*problems)
    return recipe


def merge_recipe(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> tuple[Recipe, list[Problem]]:
    """Return what could be read, and the problems; a ConfigError only where the file cannot be read at all."""
    problems: list[Problem] = []
    notes: list[str] = []
    given = _layered(path, flags, environment or {}, problems, notes)
    values = {key: Value(entry["default"], DEFAULT_SOURCE) for key, entry in catalogue().items()}
    broken = set()
    for key, raw in given.items():
        if secret_value(raw.value):
            what = f"'{key}' holds what looks like a secret"
            value, found = None, [Problem(raw.source, what, "remove it and export it as a variable")]
        else:
            value, found = typed(key, catalogue()[key], raw)
        problems += found
        values[key] = Value(value, raw.source, raw.shadowed)
        broken |= {key} if found else set()
    return Recipe(path, values, notes, frozenset(broken)), in_order(problems)


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """Return each problem once: those of a file by its lines, then those of the whole file, of flags and variables."""

    def place(problem: Problem) -> tuple[bool, str, int]:
        name, _, line = problem.where.rpartition(":")
        return (False, name, int(line)) if line.isdigit() else (True, problem.where, 0)

    return sorted(dict.fromkeys(problems), key=place)


def _layered(
    path: Path, flags: Iterable[str], environment: Mapping[str, str], problems: list[Problem], notes: list[str]
) -> dict[str, Raw]:
    """Return what the user gave for each key: files from the last base on, then environment, then flags."""
    given: dict[str, Raw] = {}
    for file in read_document(path, problems):
        given |= translate(file.items(), problems, notes)
    places = {key: raw.source for key, raw in given.items()}
    variables = ((name, key) for name, key in ENVIRONMENT_KEYS.items() if environment.get(name))
    layers = [[(key, Raw(environment[name], name, from_text=True)) for name, key in variables]]
    layers.append([(key, Raw(text, f"--{key}", from_text=True)) for key, text in read_flags(flags, problems)])
    for layer in layers:
        texts = translate(layer, problems, notes)
        given |= {key: replace(raw, shadowed=places.get(key, "")) for key, raw in texts.items()}
    return given
