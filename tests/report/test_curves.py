"""Thinning and smoothing."""

from __future__ import annotations

import pytest

from grpo_recipes.report.chart import buckets, means, smooth, usual_range, window_of


@pytest.mark.parametrize(("count", "parts"), [(0, 0), (1, 1), (240, 240), (241, 240), (5000, 240)])
def test_parts_cover_every_row_once(count: int, parts: int) -> None:
    made = buckets(count)
    assert len(made) == parts
    assert [row for part in made for row in range(part.start, part.stop)] == list(range(count))


def test_parts_have_a_mean_and_gaps_stay_gaps() -> None:
    parts = [slice(0, 2), slice(2, 4), slice(4, 6)]
    values = [1.0, 3.0, None, 5.0, None, None]
    assert means(values, parts) == [2.0, 5.0, None]


def test_the_line_is_the_mean_around_each_row() -> None:
    ones = [slice(row, row + 1) for row in range(5)]
    assert smooth([1.0, 2.0, 6.0, None, 2.0], ones, 3) == [1.5, 3.0, 4.0, 4.0, 2.0]
    assert smooth([1.0, 2.0, 6.0, None, 2.0], ones, 1) == [1.0, 2.0, 6.0, None, 2.0]


def test_a_huge_value_does_not_spoil_those_after_it() -> None:
    values = [1e30, *[0.5] * 30]
    ones = [slice(row, row + 1) for row in range(31)]
    assert smooth(values, ones, 3)[10] == 0.5


def test_short_runs_are_not_smoothed() -> None:
    assert [window_of(count) for count in (1, 19, 20, 60, 5000)] == [1, 1, 3, 5, 333]


def test_rare_extremes_do_not_set_the_range() -> None:
    assert usual_range([1.0, 2.0]) == (1.0, 2.0)
    low, high = usual_range([*[1.0, 2.0] * 50, 500.0])
    assert (low, high) == (1.0, 3.5)
    assert usual_range([*[1.0, 2.0] * 50, 3.0]) == (1.0, 3.0)
