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
from grpo_recipes.paths import display_path
from grpo_recipes.recipe.converters import ALIASES, migration, nearest, recipe_keys
from grpo_recipes.recipe.converters.files import Surroundings, converter_of
from grpo_recipes.recipe.document import UNSET, Value, convert_value, read_document, read_flags, unset_keys
from grpo_recipes.recipe.keys import catalogue, environment_keys
from grpo_recipes.secrets import secret_value

DEFAULT_SOURCE = "default"


class BrokenKey(Exception):
    """A rule read a key whose given value is wrong, so that nothing that depends on it can be judged."""


@dataclass(frozen=True)
class Recipe:
    """A typed recipe: every key of the catalogue with its value and source."""

    path: Path  # the YAML file it was read from
    values: dict[str, Value]
    notes: list[str] = field(default_factory=list)  # what was accepted and is worth knowing
    broken: frozenset[str] = frozenset()  # keys whose given value is wrong; none after ``read_recipe``
    entry: str | None = None  # the user's entry script of the trainers; None for the task's own

    def __getitem__(self, key: str) -> Any:
        if key in self.broken:
            raise BrokenKey(key)
        return self.values[key].value

    def source(self, key: str) -> str:
        """Return where the value of ``key`` came from."""
        return self.values[key].source

    def is_set(self, key: str) -> bool:
        """Return whether the user set ``key`` anywhere."""
        return self.source(key) != DEFAULT_SOURCE

    def location(self, key: str, *inside: str | int) -> str:
        """Return where a person looks for ``key``, or what is ``inside`` it; the file where nobody gave it."""
        return self.values[key].lines.get((key, *inside)) or (
            self.source(key) if self.is_set(key) else display_path(self.path)
        )

    def problem(self, key: str, what: str, fix: str) -> Problem:
        """Return a problem with ``key`` at the place where a person looks for it."""
        return Problem(self.location(key), what, fix)

    def with_value(self, key: str, value: Value) -> Recipe:
        """Return a copy with another value of ``key``."""
        return replace(self, values={**self.values, key: value})

    def as_yaml(self) -> str:
        """Return the given values as YAML, each under a comment that names its source."""
        return "".join(
            f"# {self.source(key)}\n{yaml.safe_dump({key: self[key]}, allow_unicode=True, width=10**6)}"
            for key in sorted(self.values)
            if self.is_set(key)
        )


def read_frozen(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None,
    keys: Mapping[str, Value] | None = None,
) -> Recipe:  # fmt: skip
    """Read what ``as_yaml`` wrote, with the sources it names, and what overrides it now, as ``read_recipe``."""
    recipe = read_recipe(path, flags, environment, keys)
    lines = path.read_text(encoding="utf-8").splitlines()
    for key, value in recipe.values.items():
        name, _, line = value.source.rpartition(":")
        if name == display_path(path):
            recipe = recipe.with_value(key, Value(value.value, lines[int(line) - 2].removeprefix("# ")))
    return recipe


def read_recipe(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None,
    keys: Mapping[str, Value] | None = None,
) -> Recipe:  # fmt: skip
    """Read a recipe and what overrides it; a ConfigError reports everything that is wrong at once."""
    recipe, problems = merge_recipe(path, flags, environment, keys=keys)
    if problems:
        raise ConfigError(*problems)
    return recipe


def merge_recipe(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None, device: str | None = None,
    keys: Mapping[str, Value] | None = None,
) -> tuple[Recipe, list[Problem]]:  # fmt: skip
    """Return what could be read, and the problems; a ConfigError only where the file cannot be read at all.

    ``device`` is the one that the run is for, "cpu" or "cuda"; None if it is not known. ``keys`` are set by the entry
    point of another tool. They override the file and the variables, and flags override them.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    given: dict[str, Value] = {}
    files, flagged = read_document(path, problems), read_flags(flags, problems)
    values = {name: raw.value for layer in (*files, keys or {}) for name, raw in layer.items()}
    around = Surroundings(values | dict(flagged), device)
    for file in files:
        if converter := converter_of(file):
            file = converter.as_keys(file, around, problems, notes)
        given |= recipe_keys(file.items(), problems, notes)
        problems += migration(path, file)
    places = {key: value.source for key, value in given.items()}
    variables = ((key, name, (environment or {}).get(name)) for name, key in environment_keys().items())
    texts = [(key, Value(text, name, from_text=True)) for key, name, text in variables if text]
    options = [(key, Value(text, f"--{key}", from_text=True)) for key, text in flagged if key != UNSET]
    translated = [(key, replace(value, by_entry_point=True)) for key, value in (keys or {}).items()]
    for layer in (texts, translated, options):
        if layer is options:
            _unset(given, flagged, problems, {key for key, _ in translated})
        found = recipe_keys(layer, problems, notes)
        given |= {key: replace(value, shadowed=places.get(key, "")) for key, value in found.items()}
    typed_values = {key: Value(entry["default"], DEFAULT_SOURCE) for key, entry in catalogue().items()}
    broken = set()
    for key, value in given.items():
        if secret_value(value.value):
            what = f"'{key}' holds what looks like a secret"
            converted, wrong = None, [Problem(value.source, what, "remove it and export it as a variable")]
        else:
            converted, wrong = convert_value(key, catalogue()[key], value)
        problems += wrong
        typed_values[key] = replace(value, value=converted)
        broken |= {key} if wrong else set()
    return Recipe(path, typed_values, notes, frozenset(broken)), sort_problems(problems)


def _unset(
    given: dict[str, Value], flagged: Iterable[tuple[str, Any]], problems: list[Problem], translated: set[str]
) -> None:
    """Take back the keys that ``--unset`` lists, so that they have their defaults; unknown names are problems."""
    flags = {ALIASES.get(name, name) for name, _ in flagged} | translated
    if any(text is True for name, text in flagged if name == UNSET):
        problems.append(Problem(f"--{UNSET}", "is given without a value", f"write --{UNSET} KEY"))
    for name in unset_keys(flagged):
        key = ALIASES.get(name, name)
        if key not in catalogue():
            close = nearest(name)
            fix = f"write --{UNSET} {close}" if close in catalogue() else f"remove --{UNSET} {name}"
            problems.append(Problem(f"--{UNSET}", f"unknown key '{name}'", fix))
        elif key in flags:
            problems.append(
                Problem(f"--{UNSET}", f"--{UNSET} {key} and --{key} can't be combined", "remove one of them")
            )
        given.pop(key, None)


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return each problem once: those of a file by its lines, then those of the whole file, of flags and variables."""

    def place(problem: Problem) -> tuple[bool, str, int]:
        name, _, line = problem.where.rpartition(":")
        return (False, name, int(line)) if line.isdigit() else (True, problem.where, 0)

    return sorted(dict.fromkeys(problems), key=place)
