"""Read a recipe, merge it with variables and flags, and type every value. No torch.

A flag overrides an environment variable, a variable overrides the YAML file, and the file overrides the default. Every
value keeps its source, so that messages and the frozen recipe of a run can name it.

    recipe = read_recipe(Path("recipe.yaml"), flags=["--seed", "3"], environment=os.environ)
    recipe.batch.seed, recipe.source("seed")  # 3, "--seed"

``sections`` lists the typed attributes.
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
from grpo_recipes.recipe.sections import Sections
from grpo_recipes.secrets import contains_secret

DEFAULT_SOURCE = "default"


class BrokenKey(Exception):
    """A rule read a key with an invalid value, so the rule cannot be checked."""


@dataclass(frozen=True)
class Recipe(Sections):
    """A typed recipe: every key of the catalog with its value and source."""

    path: Path  # the YAML file that it was read from
    values: dict[str, Value]  # key -> its value and source, defaults included
    notes: list[str] = field(default_factory=list)  # remarks about accepted settings, one line each
    broken: frozenset[str] = frozenset()  # keys with an invalid value; empty after ``read_recipe``
    entry: str | None = None  # the user's entry script of the trainers; None for the script of the task
    frozen: bool = False  # whether a run continues with it: ``read_frozen`` read it from the run's folder

    @property
    def run_name(self) -> str:
        """The name of its runs: the key ``run_name``, or by default the name of the file."""
        return self.run.name or self.path.stem.removeprefix("config_")

    def __getitem__(self, key: str) -> Any:
        """Return the value of a key, e.g. ``recipe["use_peft"]``.

        Raise BrokenKey if the value is invalid, and KeyError for an unknown key.
        """
        if key in self.broken:
            raise BrokenKey(key)
        return self.values[key].value

    def source(self, key: str) -> str:
        """Return the source of a value: file:line, --flag, a variable, or "default"."""
        return self.values[key].source

    def is_set(self, key: str) -> bool:
        """Return whether a file, a variable or a flag sets ``key``."""
        return self.source(key) != DEFAULT_SOURCE

    def location(self, key: str, *inside: str | int) -> str:
        """Return the file:line, flag or variable that sets ``key``, or the recipe file if the user did not set it.

        ``inside`` is the path of names and indices to a value in the key's mapping or list; the line of that value is
        returned if it is known.
        """
        if line := self.values[key].lines.get((key, *inside)):
            return line
        return self.source(key) if self.is_set(key) else display_path(self.path)

    def problem(self, key: str, message: str, fix: str) -> Problem:
        """Return a problem at the location of ``key``."""
        return Problem(self.location(key), message, fix)

    def with_value(self, key: str, value: Value) -> Recipe:
        """Return a copy of the recipe with another value and source of ``key``. The value is not checked."""
        return replace(self, values={**self.values, key: value})

    def as_yaml(self) -> str:
        """Return the values that the user set as YAML, each under a comment with its source."""
        return "".join(
            f"# {self.source(key)}\n{yaml.safe_dump({key: self[key]}, allow_unicode=True, width=10**6)}"
            for key in sorted(self.values)
            if self.is_set(key)
        )


def read_frozen(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None,
    keys: Mapping[str, Value] | None = None,
) -> Recipe:  # fmt: skip
    """Read a recipe that ``as_yaml`` wrote for a run; each value gets the source in the comment above it.

    Arguments and errors are the same as in ``read_recipe``.
    """
    recipe = read_recipe(path, flags, environment, keys)
    lines = path.read_text(encoding="utf-8").splitlines()
    for key, value in recipe.values.items():
        file, _, line = value.source.rpartition(":")
        if file == display_path(path):
            recipe = recipe.with_value(key, Value(value.value, lines[int(line) - 2].removeprefix("# ")))
    return replace(recipe, frozen=True)


def read_recipe(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None,
    keys: Mapping[str, Value] | None = None,
) -> Recipe:  # fmt: skip
    """Read a recipe and apply environment variables, ``keys`` and flags, in this order.

    ``keys`` are set by the entry point of another tool. Raise a ConfigError with all problems at once. Rules about
    combinations of keys are not checked (``recipe.check``).
    """
    recipe, problems = merge_recipe(path, flags, environment, keys=keys)
    if problems:
        raise ConfigError(*problems)
    return recipe


def merge_recipe(
    path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None, device: str | None = None,
    keys: Mapping[str, Value] | None = None,
) -> tuple[Recipe, list[Problem]]:  # fmt: skip
    """Return the recipe and all problems of single keys, sorted; raise ConfigError only if a file can't be read.

    A key with an invalid value is listed in the recipe's ``broken``. ``device`` is the device of the run, "cpu" or
    "cuda"; None if it is not known. ``keys`` are set by the entry point of another tool. They override the file and the
    variables, and flags override them.
    """
    problems: list[Problem] = []
    notes: list[str] = []
    raw_values: dict[str, Value] = {}
    files, flag_pairs = read_document(path, problems), read_flags(flags, problems)
    all_values = {name: raw.value for layer in (*files, keys or {}) for name, raw in layer.items()}
    surroundings = Surroundings(all_values | dict(flag_pairs), device)
    for file in files:
        if converter := converter_of(file):
            file = converter.as_keys(file, surroundings, problems, notes)
        raw_values |= recipe_keys(file.items(), problems, notes)
        problems += migration(path, file)
    lines = {key: raw.source for key, raw in raw_values.items()}
    variables = ((key, name, (environment or {}).get(name)) for name, key in environment_keys().items())
    from_variables = [(key, Value(text, name, from_text=True)) for key, name, text in variables if text]
    from_flags = [(key, Value(text, f"--{key}", from_text=True)) for key, text in flag_pairs if key != UNSET]
    from_entry_point = [(key, replace(raw, by_entry_point=True)) for key, raw in (keys or {}).items()]
    for layer in (from_variables, from_entry_point, from_flags):
        if layer is from_flags:
            _remove_unset_keys(raw_values, flag_pairs, problems, {key for key, _ in from_entry_point})
        layer_values = recipe_keys(layer, problems, notes)
        raw_values |= {key: replace(raw, shadowed=lines.get(key, "")) for key, raw in layer_values.items()}
    values = {key: Value(entry["default"], DEFAULT_SOURCE) for key, entry in catalogue().items()}
    broken = set()
    for key, raw in raw_values.items():
        if contains_secret(raw.value):
            converted = None
            key_problems = [Problem(raw.source, f"{key} looks like a secret", "remove it and export it as a variable")]
        else:
            converted, key_problems = convert_value(key, catalogue()[key], raw)
        problems += key_problems
        values[key] = replace(raw, value=converted)
        broken |= {key} if key_problems else set()
    return Recipe(path, values, notes, frozenset(broken)), sort_problems(problems)


def _remove_unset_keys(
    raw_values: dict[str, Value],
    flag_pairs: Iterable[tuple[str, Any]],
    problems: list[Problem],
    entry_point_keys: set[str],
) -> None:
    """Remove the keys that ``--unset`` lists from ``raw_values``, so that they get their defaults.

    Append a problem for an unknown name, and for a key that a flag also sets.
    """
    flag_keys = {ALIASES.get(name, name) for name, _ in flag_pairs} | entry_point_keys
    if any(text is True for name, text in flag_pairs if name == UNSET):
        problems.append(Problem(f"--{UNSET}", "is given without a value", f"write --{UNSET} KEY"))
    for name in unset_keys(flag_pairs):
        key = ALIASES.get(name, name)
        if key not in catalogue():
            close = nearest(name)
            fix = f"write --{UNSET} {close}" if close in catalogue() else f"remove --{UNSET} {name}"
            problems.append(Problem(f"--{UNSET}", f"unknown key '{name}'", fix))
        elif key in flag_keys:
            message = f"--{UNSET} {key} and --{key} can't be combined"
            problems.append(Problem(f"--{UNSET}", message, "remove one of them"))
        raw_values.pop(key, None)


def sort_problems(problems: Iterable[Problem]) -> list[Problem]:
    """Return the problems without duplicates, sorted by file and line; problems without a line come last."""

    def position(problem: Problem) -> tuple[bool, str, int]:
        """Return the sort key of a problem: whether it has no line, its file or place, and its line."""
        name, _, line = problem.where.rpartition(":")
        return (False, name, int(line)) if line.isdigit() else (True, problem.where, 0)

    return sorted(dict.fromkeys(problems), key=position)
