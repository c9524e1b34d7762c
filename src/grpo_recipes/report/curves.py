"""Thousands of values as a few hundred that a screen can show, and the line through their noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from grpo_recipes.report.read import Column

MOST_POINTS = 240


def window_of(count: int) -> int:
    """Rows in the moving mean: an odd number, about a fifteenth of all; 1 (none) below 20 rows."""
    return 1 if count < 20 else max(3, count // 15 | 1)


def smooth(values: Column, parts: Sequence[slice], window: int) -> Column:
    """For each part the mean of the values within ``window`` rows around its middle; None where there are none."""
    half = window // 2
    middles = [(part.start + part.stop - 1) // 2 for part in parts]
    spans = [slice(min(part.start, max(0, at - half)), max(part.stop, at + half + 1))
             for part, at in zip(parts, middles, strict=True)]  # fmt: skip
    return means(values, spans)


def buckets(count: int, most: int = MOST_POINTS) -> list[slice]:
    """``count`` rows in at most ``most`` slices of nearly the same length."""
    parts = min(count, most)
    edges = [round(index * count / parts) for index in range(parts + 1)] if parts else []
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def means(values: Column, parts: Sequence[slice]) -> Column:
    """The mean of each part; None where a part holds nothing."""
    return [mean(known) for known in _known(values, parts)]


def lows(values: Column, parts: Sequence[slice]) -> Column:
    """The least value of each part."""
    return [min(known, default=None) for known in _known(values, parts)]


def highs(values: Column, parts: Sequence[slice]) -> Column:
    """The greatest value of each part."""
    return [max(known, default=None) for known in _known(values, parts)]


def known(values: Column) -> list[float]:
    """The values without the gaps."""
    return [value for value in values if value is not None]


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """The range without rare extremes: from the 1st to the 99th percentile, or all where that is not much more."""
    ordered = sorted(values)
    rare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
    low, high = ordered[rare], ordered[-1 - rare]
    margin = 1.5 * (high - low)
    return max(ordered[0], low - margin), min(ordered[-1], high + margin)


def _known(values: Column, parts: Sequence[slice]) -> list[list[float]]:
    return [known(values[part]) for part in parts]


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None
