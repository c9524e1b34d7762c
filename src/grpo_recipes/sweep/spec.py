"""What a sweep varies: ``key=v1,v2`` and ``key=1..3`` as people write them."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.recipe.dialects import ALIASES, refusal
from grpo_recipes.recipe.document import read_flags
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.report.compare import NO_EXPERIMENT

MOST_CELLS = 1000  # the usual MaxArraySize of Slurm is 1001
_AXIS = re.compile(r"([A-Za-z_][\w-]*)=(.*)", re.DOTALL)
_RANGE = re.compile(r"([+-]?\d{1,18})\.\.([+-]?\d{1,18})")
_SWEEPS_OWN = {
    "run_name": "name the sweep with --name; each run is called after its values",
    "run_root": "write --run_root DIR; the runs of a sweep stand in one folder",
}


@dataclass(frozen=True)
class Axis:
    """A recipe key and the values it takes.

    Attributes:
        key: as the catalogue has it.
        values: texts, typed later as a flag's would be; at least one.
    """

    key: str
    values: tuple[str, ...]


def is_axis(word: str) -> bool:
    """Whether a word of the command line is meant as ``key=values``."""
    return _AXIS.fullmatch(word) is not None


def is_number(key: str) -> bool:
    """Whether the values of a key are numbers."""
    return catalogue()[key]["type"] in ("int", "float")


def read_axes(words: Sequence[str], flags: Iterable[str]) -> list[Axis]:
    """The axes of a command line.

    Args:
        words: ``key=values``, each.
        flags: the recipe flags that hold for all runs.

    Raises:
        ConfigError: everything that is wrong with them, at once; there is no axis, or more than ``MOST_CELLS`` runs.
    """
    problems: list[Problem] = []
    fixed = {_canonical(name) for name, _ in read_flags(flags, [])}
    axes: list[Axis] = []
    for word in words:
        axis, found = _read_axis(word)
        problems += found
        if axis is None:
            continue
        if axis.key in (before.key for before in axes):
            problems.append(Problem(word, f"'{axis.key}' is swept twice", "write all its values in one place"))
        elif axis.key in fixed:
            problems.append(Problem(word, f"--{axis.key} is given too", "keep one of the two"))
        axes.append(axis)
    if problems:
        raise ConfigError(*problems)
    if not axes:
        raise ConfigError(Problem("sweep", "nothing is varied", "name keys and values, e.g. learning_rate=1e-6,3e-6"))
    _need_few(axes)
    return axes


def _need_few(axes: Sequence[Axis]) -> None:
    cells = 1
    for axis in axes:
        cells *= len(axis.values)
    if cells > MOST_CELLS:
        what = f"{cells:,} runs are more than {MOST_CELLS:,}"
        raise ConfigError(Problem("sweep", what, "take fewer values, or fewer keys at a time"))


def _read_axis(word: str) -> tuple[Axis | None, list[Problem]]:
    match = _AXIS.fullmatch(word)
    if match is None:
        what = "is no key=value,value"
        return None, [Problem(f"'{word}'", what, "write the recipe first, then e.g. seed=1..3, then --flags")]
    key = _canonical(match[1])
    problem = _key_problem(key, word)
    if problem:
        return None, [problem]
    values, problems = _values(key, match[2], word)
    return (None, problems) if problems else (Axis(key, tuple(values)), [])


def _canonical(name: str) -> str:
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def _key_problem(key: str, word: str) -> Problem | None:
    if key in _SWEEPS_OWN:
        return Problem(word, f"'{key}' is the sweep's to set", _SWEEPS_OWN[key])
    if key in NO_EXPERIMENT:
        what = f"'{key}' changes nothing in what is learned"
        return Problem(word, what, f"write --{key} VALUE for all runs")
    return refusal(key, word)


def _values(key: str, text: str, word: str) -> tuple[list[str], list[Problem]]:
    """The values between commas, ranges written out."""
    try:
        # A value with a comma is quoted as in a CSV file.
        parts = [part.strip() for row in csv.reader([text], strict=True, skipinitialspace=True) for part in row]
    except csv.Error as error:
        fix = f"quote a whole value, e.g. '{key}=\"a,b\",c'"
        return [], [Problem(word, f"its quotes or line ends cannot be read ({error})", fix)]
    if not parts or "" in parts:
        return [], [Problem(word, "has an empty value", f"write values between commas, e.g. {key}=A,B; null for none")]
    values: list[str] = []
    problems: list[Problem] = []
    for part in parts:
        if not is_number(key) or ".." not in part:
            values.append(part)
            continue
        found, problem = _range(key, part, word)
        values += found
        problems += [problem] if problem else []
    return values, problems


def _range(key: str, part: str, word: str) -> tuple[list[str], Problem | None]:
    match = _RANGE.fullmatch(part)
    if match is None:
        return [], Problem(word, f"'{part}' is no range of whole numbers", f"write {key}=1..3 for 1, 2 and 3")
    first, last = int(match[1]), int(match[2])
    if last < first:
        return [], Problem(word, f"the range {part} runs backwards", f"write {key}={last}..{first}")
    if last - first >= MOST_CELLS:
        return [], Problem(word, f"the range {part} has more than {MOST_CELLS:,} values", "take fewer")
    return [str(value) for value in range(first, last + 1)], None
