"""What a sweep varies, as people write it (``key=v1,v2``, ``key=1..3``), and the trials that makes. Pure: no torch.

A search draws its trials from lists, and from ranges of numbers: ``key=1e-6..1e-4``, ``key=log:1e-6..1e-4``.
"""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from grpo_recipes.console.report.pages import NO_EXPERIMENT
from grpo_recipes.errors import ConfigError, Problem, collect, config_error, translate
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import missing_requirement, resolve_recipe
from grpo_recipes.recipe.converters import ALIASES, key_problem
from grpo_recipes.recipe.document import read_flags
from grpo_recipes.recipe.keys import catalogue

Item = TypeVar("Item")
Made = TypeVar("Made")
MOST_TRIALS = 1000  # the usual MaxArraySize of Slurm is 1001
_AXIS = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)
_RANGE = re.compile(r"([+-]?\d{1,18})\.\.([+-]?\d{1,18})")
_SPAN = re.compile(r"(log:)?([^,]+?)\.\.([^,]+)")
_ODD = re.compile(r"[^\w.+-]+", re.ASCII)  # in a folder's name
_SET_BY_SWEEP = {
    "run_name": "name the sweep with --name; each run is called after its values",
    "run_root": "write --run_root DIR; the runs of a sweep share one folder",
}
SEED = "seed"
_LONGEST_VALUE = 40  # characters of a value in a folder's name
_LONGEST_NAME = 100  # and of the name; logs are called after it too


@dataclass(frozen=True)
class Span:
    """A range of numbers that a search draws from."""

    low: float
    high: float
    log: bool  # the logarithm is drawn evenly
    whole: bool  # whole numbers alone


@dataclass(frozen=True)
class Search:
    """How many trials Optuna chooses, in what ranges, and by what metric."""

    trials: int
    metric: str  # the highest wins
    spans: Mapping[str, Span]  # of the axes that are ranges


@dataclass(frozen=True)
class SweepSpec:
    """The trials of a sweep, as the command line describes them."""

    recipe: str | None  # as the user names it; None for CONFIG or the default one
    axes: Mapping[str, Sequence[str]]  # key -> its values, typed later as a flag's would be; of a range its two ends
    flags: Sequence[str] = ()  # recipe flags of all trials
    task: str | None = None  # that --task names
    search: Search | None = None  # None: every combination is run

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


def read_axes(words: Sequence[str], flags: Iterable[str]) -> dict[str, list[str]]:
    """Read words ``key=values`` as key -> values, or refuse all that is wrong; ``flags`` are those of all runs."""
    fixed = {_canonical(name) for name, _ in read_flags(flags, [])}
    axes: dict[str, list[str]] = {}

    def read(word: str) -> None:
        key, values = _read_axis(word)
        if key in axes:
            raise config_error(word, f"'{key}' is swept twice", "write all its values in one place")
        axes[key] = values
        if key in fixed:
            raise config_error(word, f"--{key} is given too", "keep one of the two")

    collect(words, read)
    if not axes:
        raise config_error("sweep", "nothing is varied", "name keys and values, e.g. learning_rate=1e-6,3e-6")
    count = math.prod(map(len, axes.values()))
    if count > MOST_TRIALS:
        what = f"{count:,} runs are more than {MOST_TRIALS:,}"
        raise config_error("sweep", what, "take fewer values, or fewer keys at a time")
    return axes


def read_space(words: Sequence[str], flags: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, Span]]:
    """Read the words of a search as ``read_axes`` does, with the ranges that are drawn from; refuse to search seeds."""
    spans: dict[str, Span] = {}

    def ends(word: str) -> str:
        """Return a range as the list of its two ends, and note it; any other word as it is."""
        match = _AXIS.fullmatch(word)
        key, text = (_canonical(match[1]), match[2]) if match else ("", "")
        found = _SPAN.fullmatch(text)
        if key == SEED:
            fix = "write --seed N for all trials, and sweep the best values over seed=1..5"
            raise config_error(word, "a search for the best seed finds the luckiest one", fix)
        if found is None or key not in catalogue() or not is_number(key):
            return word
        spans[key] = _span(key, found, word)
        return f"{key}={found[2]},{found[3]}"

    return read_axes(collect(words, ends), flags), spans


def _span(key: str, found: re.Match[str], word: str) -> Span:
    whole = catalogue()[key]["type"] == "int"
    kind = "whole numbers" if whole else "numbers"
    fix = f"write {key}={'1..8' if whole else '1e-6..1e-4'}, or with log: before it for a range of magnitudes"
    with translate(ValueError, lambda _: config_error(word, f"'{found[0]}' is not a range of {kind}", fix)):
        low, high = ((int if whole else float)(end) for end in found.group(2, 3))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise config_error(word, f"{found[2]} is not below {found[3]}", "write the lower end first")
    if found[1] and low <= 0:
        raise config_error(
            word, f"a logarithm needs numbers above 0, and {found[2]} is not", "raise it, or leave out log:"
        )
    return Span(low, high, bool(found[1]), whole)


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _read_axis(word: str) -> tuple[str, list[str]]:
    if (match := _AXIS.fullmatch(word)) is None:
        fix = "write the recipe first, then e.g. seed=1..3, then --flags"
        raise config_error(f"'{word}'", "is not key=value,value", fix)
    key, text = _canonical(match[1]), match[2]
    if key in _SET_BY_SWEEP:
        raise config_error(word, f"'{key}' is set by the sweep", _SET_BY_SWEEP[key])
    if key in NO_EXPERIMENT:
        raise config_error(word, f"'{key}' changes nothing in what is learned", f"write --{key} VALUE for all runs")
    if problem := key_problem(key, word):
        raise ConfigError(problem)
    fix = f"quote a whole value, e.g. '{key}=\"a,b\",c'"
    with translate(csv.Error, lambda error: config_error(word, f"its quotes or line ends are wrong ({error})", fix)):
        # A value with a comma is quoted as in a CSV file.
        parts = [part.strip() for row in csv.reader([text], strict=True, skipinitialspace=True) for part in row]
    if not parts or "" in parts:
        raise config_error(word, "has an empty value", f"write values between commas, e.g. {key}=A,B; null for none")
    values = collect(parts, lambda part: _range(key, part, word) if is_number(key) and ".." in part else [part])
    return key, [*itertools.chain.from_iterable(values)]


def _range(key: str, part: str, word: str) -> list[str]:
    if (match := _RANGE.fullmatch(part)) is None:
        fix = f"write {key}=1..3 for 1, 2 and 3, or add --search optuna --trials N to search a range"
        raise config_error(word, f"'{part}' is not a range of whole numbers", fix)
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise config_error(word, f"the range {part} runs backwards", f"write {key}={last}..{first}")
    if last - first >= MOST_TRIALS:
        raise config_error(word, f"the range {part} has more than {MOST_TRIALS:,} values", "take fewer")
    return [str(value) for value in range(first, last + 1)]


def make_trials(spec: SweepSpec, environment: Mapping[str, str], device: str) -> list[Trial]:
    """Return every combination of the values, the last axis varying fastest.

    A ConfigError names every problem of every trial's recipe, and an axis that changes nothing.
    """
    varied = [dict(zip(spec.axes, values, strict=True)) for values in itertools.product(*spec.axes.values())]
    names = [name_of(values) for values in varied]
    if len(set(names)) < len(names) or max(map(len, names)) > _LONGEST_NAME:
        names = [numbered(number, name) for number, name in enumerate(names)]

    def trial(index: int) -> Trial:
        recipe = resolve_recipe(spec.recipe, spec.task, spec.flags_of(varied[index]), environment, device)
        return Trial(index, names[index], varied[index], recipe)

    trials = for_each({name: index for index, name in enumerate(names)}, trial)
    idle = [problem for key, values in spec.axes.items() if (problem := _idle(key, values, trials))]
    if idle:
        raise ConfigError(*idle)
    return trials


def name_of(values: Mapping[str, str]) -> str:
    """Return values as the name of a folder, which another trial may have too."""
    return ",".join(f"{key}={_ODD.sub('-', value)[-_LONGEST_VALUE:]}" for key, value in values.items())


def numbered(number: int, name: str) -> str:
    """Return a name that no trial with another number has."""
    return f"{number},{name}"[:_LONGEST_NAME]


def for_each(items: Mapping[str, Item], work: Callable[[Item], Made]) -> list[Made]:
    """Return what ``work`` makes of each trial's item, by the names of the trials.

    A ConfigError has what ``work`` raised for any of them, each problem once, with the names of its trials.
    """
    done: list[Made] = []
    problems: dict[Problem, list[str]] = {}
    for name, item in items.items():
        try:
            done.append(work(item))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
    found = []
    for problem, names in problems.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        named = f"{names[0]}{others}: {problem.where}"
        found.append(problem if len(names) == len(items) else replace(problem, where=named))
    if found:
        raise ConfigError(*found)
    return done


def _idle(key: str, values: Sequence[str], trials: Sequence[Trial]) -> Problem | None:
    """Return what is wrong with a key whose values make no difference."""
    where = f"{key}={','.join(values)}"
    if len(values) == 1:
        what = f"'{key}' has one value, so nothing is varied"
        return Problem(where, what, f"write --{key} {values[0]}, or more values")
    typed = {text: json.dumps(trial.recipe[key], sort_keys=True) for trial in trials for text in [trial.values[key]]}
    for one, other in itertools.combinations(values, 2):
        if typed[one] == typed[other]:
            what = f"'{one}' and '{other}' are the same {key}: nothing changes between their runs"
            return Problem(where, what, "keep one of the two")
    needed = [missing_requirement(trial.recipe, key) for trial in trials]
    if all(needed):
        what = f"'{key}' changes nothing in any run: it does nothing without {needed[0]}"
        return Problem(where, what, f"remove it, or set {needed[0]}")
    return None
