"""The runs of a sweep: every combination of its values, each with its own checked recipe. Pure: no torch."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import checked_recipe
from grpo_recipes.recipe.rules import needed_by
from grpo_recipes.recipe.tasks import RequestedTask
from grpo_recipes.sweep.spec import Axis

Made = TypeVar("Made")
_LONGEST_VALUE = 40  # characters of a value in a folder's name
_LONGEST_NAME = 100  # and of the name; logs are called after it too


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        index: its place, from 0, which is also its index in the array job.
        name: its folder's, e.g. ``learning_rate=1e-6,seed=2``; no other cell has it.
        values: key -> value as the user wrote it.
        recipe: its recipe, checked.
    """

    index: int
    name: str
    values: Mapping[str, str]
    recipe: Recipe


@dataclass(frozen=True)
class Question:
    """The command line of a sweep, as far as it says what the runs are.

    Attributes:
        path: the recipe.
        axes: what is varied.
        flags: recipe flags of all runs.
        asked: the task that is asked for.
    """

    path: Path
    axes: Sequence[Axis]
    flags: Sequence[str] = ()
    asked: RequestedTask = field(default_factory=RequestedTask)


def make_cells(question: Question, environment: Mapping[str, str]) -> list[Cell]:
    """Every combination of the values, the last axis the quickest.

    Args:
        question: what is asked for.
        environment: variables of the user.

    Raises:
        ConfigError: every problem of every cell's recipe; an axis that changes nothing.
    """
    keys = [axis.key for axis in question.axes]
    combinations = list(itertools.product(*(axis.values for axis in question.axes)))
    names = _unlike([_name(keys, values) for values in combinations])

    def cell(index: int) -> Cell:
        varied = dict(zip(keys, combinations[index], strict=True))
        recipe = checked_recipe(question.path, flags_of(question, varied), environment, question.asked)
        return Cell(index, names[index], varied, recipe)

    cells = for_each(names, cell)
    idle = [problem for axis in question.axes for problem in _idle(axis, cells)]
    if idle:
        raise ConfigError(*idle)
    return cells


def flags_of(question: Question, values: Mapping[str, str]) -> list[str]:
    """The recipe flags of the run with these values."""
    return [*question.flags, *(f"--{key}={value}" for key, value in values.items())]


def for_each(names: Sequence[str], work: Callable[[int], Made]) -> list[Made]:
    """What ``work`` makes of each cell.

    Args:
        names: those of the cells.
        work: is given the index of a cell.

    Raises:
        ConfigError: what ``work`` refused in any of them, each problem once, with the names of its cells.
    """
    done: list[Made] = []
    problems: dict[Problem, list[str]] = {}
    for index, name in enumerate(names):
        try:
            done.append(work(index))
        except ConfigError as refused:
            for problem in refused.problems:
                problems.setdefault(problem, []).append(name)
    if problems:
        raise ConfigError(*(_told(problem, where, len(names)) for problem, where in problems.items()))
    return done


def _told(problem: Problem, names: Sequence[str], count: int) -> Problem:
    if len(names) == count:
        return problem
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return replace(problem, where=f"{names[0]}{others}: {problem.where}")


def _idle(axis: Axis, cells: Sequence[Cell]) -> list[Problem]:
    """What is wrong with an axis whose values make no difference."""
    where = f"{axis.key}={','.join(axis.values)}"
    if len(axis.values) == 1:
        what = f"'{axis.key}' has one value, so nothing is varied"
        return [Problem(where, what, f"write --{axis.key} {axis.values[0]}, or more values")]
    if len(set(axis.values)) < len(axis.values):
        return [Problem(where, "a value stands there twice: nothing changes between these runs", "keep one of the two")]
    typed: dict[str, str] = {}
    for cell in cells:
        text, value = cell.values[axis.key], json.dumps(cell.recipe[axis.key], sort_keys=True)
        if typed.setdefault(value, text) != text:
            what = f"'{typed[value]}' and '{text}' are the same {axis.key}: nothing changes between these runs"
            return [Problem(where, what, "keep one of the two")]
    needed = [needed_by(cell.recipe, axis.key) for cell in cells]
    if all(needed):
        what = f"'{axis.key}' changes nothing in any run: it does nothing without {needed[0]}"
        return [Problem(where, what, f"remove it, or set {needed[0]}")]
    return []


def _name(keys: Sequence[str], values: Sequence[str]) -> str:
    return ",".join(f"{key}={_short(value)}" for key, value in zip(keys, values, strict=True))


def _short(value: str) -> str:
    """A value as a part of a folder's name."""
    return re.sub(r"[^\w.+-]+", "-", value, flags=re.ASCII)[-_LONGEST_VALUE:]


def _unlike(names: Sequence[str]) -> list[str]:
    """The names; all with their number before them where some are too long or not alone."""
    if len(set(names)) == len(names) and max(map(len, names)) <= _LONGEST_NAME:
        return list(names)
    return [f"{number},{name}"[:_LONGEST_NAME] for number, name in enumerate(names)]
