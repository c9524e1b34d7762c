"""Heat maps of a sweep: the mean result of the completed trials for each pair of values of two keys."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from grpo_recipes.console.sweep.spec import SEED
from grpo_recipes.runs.health import mean

_MAX_VALUES = 12  # of a key; a search with more values has no map
_MAX_MAPS = 6


@dataclass(frozen=True)
class HeatMap:
    """The results of two keys; results of trials that differ in other keys are averaged."""

    row_key: str
    column_key: str
    rows: Sequence[str]  # values of the first key
    columns: Sequence[str]  # values of the second key
    cells: Mapping[tuple[str, str], Sequence[float]]  # (row, column) -> the results of the trials

    def mean(self, row: str, column: str) -> float | None:
        """Return the mean result of a cell, or None if no trial has a result."""
        return mean(self.cells.get((row, column), ()))

    def opacity(self, row: str, column: str) -> float:
        """Return how dark a cell is: 0.04 for the lowest mean, and 0.45 for the highest, so text stays readable.

        A cell without a result gets 0. If all means are equal, they get the middle.
        """
        means = [value for values in self.cells.values() if (value := mean(values)) is not None]
        low, high = min(means), max(means)
        value = self.mean(row, column)
        return 0.0 if value is None else 0.04 + 0.41 * ((value - low) / (high - low) if high > low else 0.5)


def make_heat_maps(keys: Sequence[str], trials: Sequence[tuple[Mapping[str, str], float | None]]) -> list[HeatMap]:
    """Return a heat map for each pair of ``keys`` except the seed, at most 6.

    ``trials`` has the values of the keys and the result of each trial; a trial without a result leaves its cell empty.
    Keys with a single value or more than 12 values have no map.
    """
    values = {key: _sort_values({settings[key] for settings, _ in trials}) for key in keys if key != SEED}
    usable = [key for key, texts in values.items() if 1 < len(texts) <= _MAX_VALUES]
    maps = []
    for row_key, column_key in combinations(usable, 2):
        cells: dict[tuple[str, str], list[float]] = {}
        for settings, result in trials:
            if result is not None:
                cells.setdefault((settings[row_key], settings[column_key]), []).append(result)
        if cells:
            maps.append(HeatMap(row_key, column_key, values[row_key], values[column_key], cells))
    return maps[:_MAX_MAPS]


def _sort_values(texts: set[str]) -> list[str]:
    """Return numbers in ascending order, and other texts after them in alphabetical order."""

    def order(text: str) -> tuple[bool, float, str]:
        """Return a sort key: numbers by value, then other texts."""
        try:
            return False, float(text), text
        except ValueError:
            return True, 0.0, text

    return sorted(texts, key=order)
