"""What a sweep varies, as people write it (``key=v1,v2``, ``key=1..3``), and the trials that makes. Pure: no torch."""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from grpo_recipes.errors import ConfigError, Problem, collect, config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import checked_recipe
from grpo_recipes.recipe.dialects import ALIASES, refusal
from grpo_recipes.recipe.document import read_flags
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.rules import needed_by
from grpo_recipes.recipe.tasks import RequestedTask
from grpo_recipes.report.compare import NO_EXPERIMENT

Made = TypeVar("Made")
MOST_TRIALS = 1000  # the usual MaxArraySize of Slurm is 1001
_AXIS = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)
_RANGE = re.compile(r"([+-]?\d{1,18})\.\.([+-]?\d{1,18})")
_SET_BY_SWEEP = {
    "run_name": "name the sweep with --name; each run is called after its values",
    "run_root": "write --run_root DIR; the runs of a sweep stand in one folder",
}
_LONGEST_VALUE = 40  # characters of a value in a folder's name
_LONGEST_NAME = 100  # and of the name; logs are called after it too


@dataclass(frozen=True)
class Axis:
    """A recipe key and the values it takes."""

    key: str  # as in the catalogue
    values: tuple[str, ...]  # at least one; typed later, as a flag's would be


@dataclass(frozen=True)
class SweepSpec:
    """What the command line says of the trials of a sweep."""

    path: Path  # of the recipe
    axes: Sequence[Axis]
    flags: Sequence[str] = ()  # recipe flags of all trials
    asked: RequestedTask = field(default_factory=RequestedTask)

    def flags_of(self, values: Mapping[str, str]) -> list[str]:
        """Return the recipe flags of the trial with these values."""
        return [*self.flags, *(f"--{key}={value}" for key, value in values.items())]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    index: int  # from 0; also its index in the array job
    name: str  # of its folder, e.g. ``learning_rate=1e-6,seed=2``; no other trial has it
    values: Mapping[str, str]  # key -> value as the user wrote it
    recipe: Recipe  # checked


def is_axis(word: str) -> bool:
    """Return whether a word of the command line is meant as ``key=values``."""
    return _AXIS.fullmatch(word) is not None


def is_number(key: str) -> bool:
    """Return whether the values of a key are numbers."""
    return catalogue()[key]["type"] in ("int", "float")


def read_axes(words: Sequence[str], flags: Iterable[str]) -> list[Axis]:
    """Read the ``key=values`` of a command line; ``flags`` are the recipe flags that hold for all runs.

    Raises:
        ConfigError: everything that is wrong with them, at once; none is given, or they make too many runs.
    """
    fixed = {_canonical(name) for name, _ in read_flags(flags, [])}
    seen: set[str] = set()

    def read(word: str) -> Axis:
        axis = _read_axis(word)
        if axis.key in seen:
            raise config_error(word, f"'{axis.key}' is swept twice", "write all its values in one place")
        seen.add(axis.key)
        if axis.key in fixed:
            raise config_error(word, f"--{axis.key} is given too", "keep one of the two")
        return axis

    axes = collect(words, read)
    if not axes:
        raise config_error("sweep", "nothing is varied", "name keys and values, e.g. learning_rate=1e-6,3e-6")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST_TRIALS:
        what = f"{count:,} runs are more than {MOST_TRIALS:,}"
        raise config_error("sweep", what, "take fewer values, or fewer keys at a time")
    return axes


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _read_axis(word: str) -> Axis:
    match = _AXIS.fullmatch(word)
    if match is None:
        fix = "write the recipe first, then e.g. seed=1..3, then --flags"
        raise config_error(f"'{word}'", "is not key=value,value", fix)
    key, text = _canonical(match[1]), match[2]
    _need_variable_key(key, word)
    try:
        # A value with a comma is quoted as in a CSV file.
        parts = [part.strip() for row in csv.reader([text], strict=True, skipinitialspace=True) for part in row]
    except csv.Error as error:
        fix = f"quote a whole value, e.g. '{key}=\"a,b\",c'"
        raise config_error(word, f"its quotes or line ends cannot be read ({error})", fix) from None
    if not parts or "" in parts:
        fix = f"write values between commas, e.g. {key}=A,B; null for none"
        raise config_error(word, "has an empty value", fix)
    values = collect(parts, lambda part: _range(key, part, word) if is_number(key) and ".." in part else [part])
    return Axis(key, tuple(itertools.chain.from_iterable(values)))


def _need_variable_key(key: str, word: str) -> None:
    if key in _SET_BY_SWEEP:
        raise config_error(word, f"'{key}' is the sweep's to set", _SET_BY_SWEEP[key])
    if key in NO_EXPERIMENT:
        what = f"'{key}' changes nothing in what is learned"
        raise config_error(word, what, f"write --{key} VALUE for all runs")
    if problem := refusal(key, word):
        raise ConfigError(problem)


def _range(key: str, part: str, word: str) -> list[str]:
    match = _RANGE.fullmatch(part)
    if match is None:
        raise config_error(word, f"'{part}' is not a range of whole numbers", f"write {key}=1..3 for 1, 2 and 3")
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise config_error(word, f"the range {part} runs backwards", f"write {key}={last}..{first}")
    if last - first >= MOST_TRIALS:
        raise config_error(word, f"the range {part} has more than {MOST_TRIALS:,} values", "take fewer")
    return [str(value) for value in range(first, last + 1)]


def make_trials(spec: SweepSpec, environment: Mapping[str, str]) -> list[Trial]:
    """Return every combination of the values, the last axis varying fastest.

    Raises:
        ConfigError: every problem of every trial's recipe; an axis that changes nothing.
    """
    keys = [axis.key for axis in spec.axes]
    combinations = list(itertools.product(*(axis.values for axis in spec.axes)))
    names = _distinct([",".join(map(_part_of_name, keys, values)) for values in combinations])

    def trial(index: int) -> Trial:
        varied = dict(zip(keys, combinations[index], strict=True))
        recipe = checked_recipe(spec.path, spec.flags_of(varied), environment, spec.asked)
        return Trial(index, names[index], varied, recipe)

    trials = for_each(names, trial)
    idle = [problem for axis in spec.axes for problem in _idle(axis, trials)]
    if idle:
        raise ConfigError(*idle)
    return trials


def for_each(names: Sequence[str], work: Callable[[int], Made]) -> list[Made]:
    """Return what ``work`` makes of the index of each trial.

    Raises:
        ConfigError: what ``work`` raised for any of them, each problem once, with the names of its trials.
    """
    done: list[Made] = []
    problems: dict[Problem, list[str]] = {}
    for index, name in enumerate(names):
        try:
            done.append(work(index))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
    if problems:
        raise ConfigError(*(_with_trials(problem, where, len(names)) for problem, where in problems.items()))
    return done


def _with_trials(problem: Problem, names: Sequence[str], count: int) -> Problem:
    if len(names) == count:
        return problem
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return replace(problem, where=f"{names[0]}{others}: {problem.where}")


def _idle(axis: Axis, trials: Sequence[Trial]) -> list[Problem]:
    """Return what is wrong with an axis whose values make no difference."""
    where = f"{axis.key}={','.join(axis.values)}"
    if len(axis.values) == 1:
        what = f"'{axis.key}' has one value, so nothing is varied"
        return [Problem(where, what, f"write --{axis.key} {axis.values[0]}, or more values")]
    if len(set(axis.values)) < len(axis.values):
        return [Problem(where, "a value is given twice: nothing changes between these runs", "keep one of the two")]
    typed: dict[str, str] = {}
    for trial in trials:
        text, value = trial.values[axis.key], json.dumps(trial.recipe[axis.key], sort_keys=True)
        if typed.setdefault(value, text) != text:
            what = f"'{typed[value]}' and '{text}' are the same {axis.key}: nothing changes between these runs"
            return [Problem(where, what, "keep one of the two")]
    needed = [needed_by(trial.recipe, axis.key) for trial in trials]
    if all(needed):
        what = f"'{axis.key}' changes nothing in any run: it does nothing without {needed[0]}"
        return [Problem(where, what, f"remove it, or set {needed[0]}")]
    return []


def _part_of_name(key: str, value: str) -> str:
    short = re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII)[-_LONGEST_VALUE:]
    return f"{key}={short}"


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names, each numbered where two are the same or one is too long for a folder."""
    if len(set(names)) == len(names) and max(map(len, names)) <= _LONGEST_NAME:
        return list(names)
    return [f"{number},{name}"[:_LONGEST_NAME] for number, name in enumerate(names)]
