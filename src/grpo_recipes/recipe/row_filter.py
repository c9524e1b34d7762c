"""Select rows of a dataset by a number in a column: ``dataset_filter: pass_rate in 0.1..0.9``. No torch.

row_filter = parse_row_filter("pass_rate in 0.1..0.9")  # None if the text is not a filter
row_filter.keeps(0.1)  # True: both ends are included
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check_data import head_of, training_source
from grpo_recipes.recipe.generated import generated
from grpo_recipes.recipe.rules import Rule
from grpo_recipes.recipe.shapes import root_of, value_at
from grpo_recipes.recipe.sources import requested_source

_EXAMPLE = "dataset_filter: 'pass_rate in 0.1..0.9'"
_FILTER = re.compile(r"\s*(\S+)\s+in\s+(\S+)\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
MOST_COUNTS = 20  # numbers in the distribution of a column
_RANGE = re.compile(rf"({_NUMBER.pattern})\.\.({_NUMBER.pattern})")


@dataclass(frozen=True)
class RowFilter:
    """Rows with a number from ``least`` to ``most`` in a column, both included."""

    column: str
    least: float
    most: float

    def keeps(self, value: Any) -> bool:
        """Return whether a value of the column is a number in the range; false for a missing value or another text."""
        number = _read_number(value)
        return number is not None and self.least <= number <= self.most

    def count(self, values: Iterable[Any]) -> list[tuple[float, int, bool]]:
        """Return each number among the values, with its count and whether it is kept.

        More than ``MOST_COUNTS`` different numbers are rounded down to that many steps between the smallest and the
        largest. A step is kept if any of its numbers is.
        """
        read = map(_read_number, values)
        numbers = Counter(float(number) for number in read if number is not None and math.isfinite(number))
        if len(numbers) <= MOST_COUNTS:
            return [(number, numbers[number], self.keeps(number)) for number in sorted(numbers)]
        low, high = min(numbers), max(numbers)
        width = (high - low) / MOST_COUNTS
        rows, selected = Counter[float](), set[float]()
        for number, count in numbers.items():
            start = low + width * min(int((number - low) / width), MOST_COUNTS - 1)
            rows[start] += count
            selected |= {start} if self.keeps(number) else set()
        return [(start, rows[start], start in selected) for start in sorted(rows)]


def _read_number(value: Any) -> int | float | None:
    """Return the number in a column, also from a text as in .csv files; None for NaN and all other values."""
    if isinstance(value, str):
        return float(value) if _NUMBER.fullmatch(value) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    return value if is_number else None


def parse_range(text: str) -> tuple[float, float] | None:
    """Return the two ends of a range such as ``0.1..0.9``; None for another text or if the first end is larger."""
    match = _RANGE.fullmatch(text.strip())
    if match is None or float(match[1]) > float(match[2]):
        return None
    return float(match[1]), float(match[2])


def parse_row_filter(text: str) -> RowFilter | None:
    """Return the filter of a text such as ``pass_rate in 0.1..0.9``; None if the text is not a filter."""
    match = _FILTER.fullmatch(text)
    limits = parse_range(match[2]) if match else None
    return RowFilter(match[1], *limits) if match and limits else None


def find_column_problem(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem if the local training dataset lacks the filter's column, or has no number in its first rows."""
    row_filter = parse_row_filter(recipe.data.filter or "")
    if row_filter is None or not recipe.data.name or recipe.data.mixture is not None:
        return
    head = head_of(source := training_source(recipe))
    if head is None:
        return
    column = row_filter.column
    if root_of(column, head.columns) not in head.columns:
        message = f"dataset_filter: '{source.id}' has no column '{column}'"
        yield recipe.problem("dataset_filter", message, f"write one of {', '.join(head.columns)}")
    values = [value_at(row, column) for row in head.rows if root_of(column, head.columns) in row]
    if values and all(_read_number(value) is None for value in values):
        message = f"dataset_filter: column '{column}' of '{source.id}' has no number in its first rows"
        yield recipe.problem("dataset_filter", message, "name a column of numbers, or remove dataset_filter")


# fmt: off
RULES = (
    Rule("dataset_filter", lambda r: r.data.filter is not None and parse_row_filter(r.data.filter) is None,
        "dataset_filter: expected COLUMN in LEAST..MOST, got '{dataset_filter}'", f"write {_EXAMPLE}, for example"),
    Rule("dataset_filter", lambda r: r.data.filter is not None and r.data.mixture is not None,
        "dataset_filter and dataset_mixture can't be combined", "{removal}, and filter the files of the mixture"),
    Rule("dataset_filter", lambda r: r.data.filter is not None
        and (requested_source(r) or generated(r.data.name) is not None),
        "dataset_filter needs a dataset with the column, but this recipe generates its prompts", "{removal}"),
)
# fmt: on
