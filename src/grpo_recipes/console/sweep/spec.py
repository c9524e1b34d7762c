"""Parse the axes of a sweep (``key=v1,v2``, ``key=1..3``), and make its trials. Nothing is written, no torch is needed.

An axis is a recipe key with the values to try. A trial has one value of each axis, and its checked recipe. A search
chooses from lists and from ranges of numbers: ``key=1e-6..1e-4``, ``key=log:1e-6..1e-4``.
"""

import csv
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from grpo_recipes.cli.sweeps import FlagsOf
from grpo_recipes.console.report.comparison import BOOKKEEPING_KEYS
from grpo_recipes.errors import ConfigError, Problem, collect_results, config_error, translate_errors
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import missing_requirement, resolve_recipe
from grpo_recipes.recipe.converters import ALIASES, key_problem
from grpo_recipes.recipe.document import read_flags
from grpo_recipes.recipe.keys import catalogue

Item = TypeVar("Item")
Made = TypeVar("Made")
MAX_TRIALS = 1000  # the usual MaxArraySize of Slurm is 1001
_AXIS = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)
_RANGE = re.compile(r"([+-]?\d{1,18})\.\.([+-]?\d{1,18})")
_SPAN = re.compile(r"(log:)?([^,]+?)\.\.([^,]+)")
_UNSAFE = re.compile(r"[^\w.+-]+", re.ASCII)  # characters to replace in a folder's name
_SET_BY_SWEEP = {
    "run_name": "name the sweep with --name; the runs are named after their values",
    "run_root": "use --run_root DIR; the runs of a sweep share one folder",
}
SEED = "seed"
_MAX_VALUE = 40  # characters of a value in a folder's name
_MAX_NAME = 100  # characters of a folder's name, which log files use too


@dataclass(frozen=True)
class Span:
    """A range of numbers from which a search chooses."""

    low: float
    high: float
    log: bool  # sample uniformly on a log scale
    whole: bool  # only whole numbers


@dataclass(frozen=True)
class Search:
    """Settings of a search: number of trials, metric, and ranges."""

    trials: int
    metric: str  # metric to maximize
    spans: Mapping[str, Span]  # axes that are ranges


@dataclass(frozen=True)
class SweepSpec:
    """The command line of a sweep."""

    recipe: str | None  # name or path; None for the variable CONFIG or the default recipe
    axes: Mapping[str, Sequence[str]]  # key -> values as text, typed later like a flag; for a range, its two ends
    flags: Sequence[str] = ()  # recipe flags of all trials
    task: str | None = None  # value of --task
    search: Search | None = None  # None to run every combination
    flags_of: FlagsOf | None = None  # translates the values of a trial, for the sweep of an extension

    def make_flags(self, values: Mapping[str, str]) -> list[str]:
        """Return the recipe flags of the trial with these values: the flags of all trials, then ``--KEY=VALUE``.

        ``values`` maps recipe keys to texts. An extension's flags for the values come before the flags of all trials.
        """
        if self.flags_of is not None:
            return [*self.flags_of(values), *self.flags]
        return [*self.flags, *(f"--{key}={value}" for key, value in values.items())]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    index: int  # from 0; also its index in the array job
    name: str  # name of its folder, e.g. ``learning_rate=1e-6,seed=2``; unique in the sweep
    values: Mapping[str, str]  # key -> value as the user wrote it
    recipe: Recipe  # already checked


def is_axis(word: str) -> bool:
    """Return whether a word of the command line has the format ``key=values``."""
    return _AXIS.fullmatch(word) is not None


def is_number(key: str) -> bool:
    """Return whether the values of a recipe key are numbers: its type in the catalog is int or float."""
    return catalogue()[key]["type"] in ("int", "float")


def read_axes(words: Sequence[str], flags: Iterable[str]) -> dict[str, list[str]]:
    """Parse words ``key=values`` to a mapping from each key to its list of values, in the order of the words.

    ``flags`` are the recipe flags of all runs. Raise ConfigError with all wrong words and all keys that are given twice
    or also as a flag, and if there are no words or more than 1,000 combinations.
    """
    fixed = {_normalize_key(name) for name, _ in read_flags(flags, [])}
    axes: dict[str, list[str]] = {}

    def read(word: str) -> None:
        """Parse one word and store it in ``axes``; raise ConfigError if it is wrong or given twice."""
        key, values = _read_axis(word)
        if key in axes:
            raise config_error(word, f"'{key}' is swept twice", "put all its values into one word")
        axes[key] = values
        if key in fixed:
            raise config_error(word, f"can't be combined with --{key}", "keep one of the two")

    collect_results(words, read)
    if not axes:
        raise config_error("sweep", "no key is varied", "add keys and values, e.g. learning_rate=1e-6,3e-6")
    count = math.prod(map(len, axes.values()))
    if count > MAX_TRIALS:
        message = f"{count:,} runs are more than {MAX_TRIALS:,}"
        raise config_error("sweep", message, "use fewer values, or fewer keys at a time")
    return axes


def read_search_space(words: Sequence[str], flags: Iterable[str]) -> tuple[dict[str, list[str]], dict[str, Span]]:
    """Parse the words of a search: return the values of each key, and the spans of the keys with a range of numbers.

    A range such as ``learning_rate=1e-6..1e-4`` is in both results: its values are its two ends. ``flags`` are the
    recipe flags of all trials. Raise ConfigError for a wrong word, for a key that is also in ``flags``, and for the
    seed.
    """
    spans: dict[str, Span] = {}

    def replace_span(word: str) -> str:
        """Store a range ``KEY=LOW..HIGH`` in ``spans`` and return ``KEY=LOW,HIGH``; return other words unchanged.

        Raise ConfigError for the key seed, and for a range with wrong ends.
        """
        match = _AXIS.fullmatch(word)
        key, text = (_normalize_key(match[1]), match[2]) if match else ("", "")
        span = _SPAN.fullmatch(text)
        if key == SEED:
            fix = "use --seed N for all trials, and sweep the best values over seed=1..5"
            raise config_error(word, "a search over seeds finds only the luckiest seed", fix)
        if span is None or key not in catalogue() or not is_number(key):
            return word
        spans[key] = _read_span(key, span, word)
        return f"{key}={span[2]},{span[3]}"

    return read_axes(collect_results(words, replace_span), flags), spans


def _read_span(key: str, match: re.Match[str], word: str) -> Span:
    """Convert the match of a range ``LOW..HIGH`` or ``log:LOW..HIGH`` to a ``Span``.

    ``key`` decides whether its ends are integers, and ``word`` is the word on the command line, for messages. Raise
    ConfigError if an end is not a number, if the lower end is not first, or for a log scale of numbers up to 0.
    """
    whole = catalogue()[key]["type"] == "int"
    kind = "whole numbers" if whole else "numbers"
    example = "1..8" if whole else "1e-6..1e-4"
    fix = f"use {key}={example}, or {key}=log:{example} for a log scale"
    with translate_errors(ValueError, lambda _: config_error(word, f"'{match[0]}' is not a range of {kind}", fix)):
        low, high = ((int if whole else float)(end) for end in match.group(2, 3))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise config_error(word, f"{match[2]} is not below {match[3]}", "put the lower end first")
    if match[1] and low <= 0:
        raise config_error(word, f"a log scale needs numbers above 0, got {match[2]}", "raise it, or leave out log:")
    return Span(low, high, bool(match[1]), whole)


def _normalize_key(name: str) -> str:
    """Return the recipe key of a name on the command line: replace hyphens by underscores, and an alias by its key."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _read_axis(word: str) -> tuple[str, list[str]]:
    """Parse a word ``key=v1,v2`` or ``key=1..3``; return the key and the list of its values as texts.

    A value with a comma is in quotes, as in a CSV file. Raise ConfigError if the word has another format, the key is
    unknown or can't be varied, a value is empty, or a range is reversed or has more than 1,000 values.
    """
    if (match := _AXIS.fullmatch(word)) is None:
        fix = "put the recipe first, then e.g. seed=1..3, then --flags"
        raise config_error(f"'{word}'", "expected key=value,value", fix)
    key, text = _normalize_key(match[1]), match[2]
    if key in _SET_BY_SWEEP:
        raise config_error(word, f"'{key}' is set by the sweep", _SET_BY_SWEEP[key])
    if key in BOOKKEEPING_KEYS:
        raise config_error(word, f"'{key}' does not change the training", f"use --{key} VALUE for all runs")
    if problem := key_problem(key, word):
        raise ConfigError(problem)
    fix = f"quote a whole value, e.g. '{key}=\"a,b\",c'"
    with translate_errors(
        csv.Error, lambda error: config_error(word, f"its quotes or line ends are wrong ({error})", fix)
    ):
        # As in a CSV file, a value with a comma is quoted.
        parts = [part.strip() for row in csv.reader([text], strict=True, skipinitialspace=True) for part in row]
    if not parts or "" in parts:
        raise config_error(word, "has an empty value", f"put values between commas, e.g. {key}=A,B; null for none")
    values = collect_results(
        parts, lambda part: _read_range(key, part, word) if is_number(key) and ".." in part else [part]
    )
    return key, [*itertools.chain.from_iterable(values)]


def _read_range(key: str, part: str, word: str) -> list[str]:
    """Return the integers of a range as texts, for example 1, 2 and 3 for ``1..3``.

    Raise ConfigError if ``part`` is not a range, is reversed, or has more than 1,000 values. ``key`` and ``word`` are
    for messages.
    """
    if (match := _RANGE.fullmatch(part)) is None:
        fix = f"use {key}=1..3 for 1, 2 and 3, or add --search optuna --trials N to search a range"
        raise config_error(word, f"'{part}' is not a range of whole numbers", fix)
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise config_error(word, f"the range {part} is reversed", f"use {key}={last}..{first}")
    if last - first >= MAX_TRIALS:
        raise config_error(word, f"the range {part} has more than {MAX_TRIALS:,} values", "use fewer values")
    return [str(value) for value in range(first, last + 1)]


def make_trials(spec: SweepSpec, environment: Mapping[str, str], device: str) -> list[Trial]:
    """Return a trial for every combination of the values, each with its checked recipe; the last axis varies fastest.

    Raise ConfigError with the problems of all recipes, or with the axes that change nothing.
    """
    combinations = [dict(zip(spec.axes, values, strict=True)) for values in itertools.product(*spec.axes.values())]
    names = [make_trial_name(values) for values in combinations]
    if len(set(names)) < len(names) or max(map(len, names)) > _MAX_NAME:
        names = [prefix_number(number, name) for number, name in enumerate(names)]

    def make_trial(index: int) -> Trial:
        """Return the trial with this index and its checked recipe."""
        values = combinations[index]
        recipe = resolve_recipe(spec.recipe, spec.task, spec.make_flags(values), environment, device)
        return Trial(index, names[index], values, recipe)

    trials = map_trials({name: index for index, name in enumerate(names)}, make_trial)
    problems = [problem for key, values in spec.axes.items() if (problem := _find_axis_problem(key, values, trials))]
    if problems:
        raise ConfigError(*problems)
    return trials


def make_trial_name(values: Mapping[str, str]) -> str:
    """Return a name for a trial's folder such as ``learning_rate=1e-6,seed=2``.

    ``values`` maps recipe keys to texts. Only the last 40 characters of a value are used, so the names of two trials
    may be equal.
    """
    return ",".join(f"{key}={_UNSAFE.sub('-', value)[-_MAX_VALUE:]}" for key, value in values.items())


def prefix_number(number: int, name: str) -> str:
    """Return ``NUMBER,NAME``, cut to 100 characters: a unique name for a trial's folder."""
    return f"{number},{name}"[:_MAX_NAME]


def map_trials(items: Mapping[str, Item], work: Callable[[Item], Made]) -> list[Made]:
    """Call ``work`` on each item and return the results; the keys of ``items`` are names of trials.

    If calls raise ConfigError, continue, and at the end raise one ConfigError. It has each problem once, with the names
    of its trials unless all trials have it.
    """
    results: list[Made] = []
    problems: dict[Problem, list[str]] = {}
    for name, item in items.items():
        try:
            results.append(work(item))
        except ConfigError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
    located = []
    for problem, names in problems.items():
        further = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = f"{names[0]}{further}: {problem.where}"
        located.append(problem if len(names) == len(items) else replace(problem, where=where))
    if located:
        raise ConfigError(*located)
    return results


def _find_axis_problem(key: str, values: Sequence[str], trials: Sequence[Trial]) -> Problem | None:
    """Return a problem if sweeping a key is useless, else None.

    It is useless if it has a single value, if two values are equal, or if the key has no effect in any trial's recipe.
    """
    where = f"{key}={','.join(values)}"
    if len(values) == 1:
        message = f"'{key}' has only one value, so it is not varied"
        return Problem(where, message, f"use --{key} {values[0]}, or add values")
    typed = {text: json.dumps(trial.recipe[key], sort_keys=True) for trial in trials for text in [trial.values[key]]}
    for value, other in itertools.combinations(values, 2):
        if typed[value] == typed[other]:
            message = f"'{value}' and '{other}' are the same {key}: their runs would be equal"
            return Problem(where, message, "keep one of the two")
    needed = [missing_requirement(trial.recipe, key) for trial in trials]
    if all(needed):
        message = f"'{key}' changes nothing in any run: it does nothing without {needed[0]}"
        return Problem(where, message, f"remove it, or set {needed[0]}")
    return None
