"""Numbers, times and axes as people read them."""

from __future__ import annotations

import pytest

from grpo_recipes.report.chart import axis, step_axis
from grpo_recipes.report.page import duration, minus, short, signed
from grpo_recipes.runs.health import percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "\u2013"),
        (0.0, "0"),
        (0.8906, "0.891"),
        (-2.51e-4, "-2.51e-4"),
        (2.4e-7, "2.4e-7"),
        (12.0, "12"),
        (153.4, "153"),
        (1234.0, "1,234"),
        (9999.9, "10,000"),
        (12345.0, "12.3k"),
        (2_500_000.0, "2.5M"),
        (3e12, "3e12"),
    ],
)
def test_three_digits_that_count(value: float | None, text: str) -> None:
    assert short(value) == minus(text)


def test_signs_and_shares() -> None:
    assert (signed(0.4), signed(-0.4), signed(0.0), signed(None)) == ("+0.4", minus("-0.4"), "0", "\u2013")
    assert (percent(0.0), percent(0.512), percent(1.0)) == ("0 %", "51.2 %", "100 %")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.99, "1 min 00 s"),
        (61.0, "1 min 01 s"),
        (3599.9, "1 h 00 min"),
        (11_100.0, "3 h 05 min"),
        (86_399.0, "1 d 00 h"),
        (183_600.0, "2 d 03 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("low", "high", "ticks", "labels"),
    [
        (0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), ["0.00", "0.25", "0.50", "0.75", "1.00"]),
        (0.0, 3e-7, (0.0, 1e-7, 2e-7, 3e-7), ["0", "1e-7", "2e-7", "3e-7"]),
        (2300.0, 9100.0, (2000.0, 4000.0, 6000.0, 8000.0, 10000.0), ["2k", "4k", "6k", "8k", "10k"]),
        (-0.02, 0.01, (-0.02, -0.01, 0.0, 0.01), ["-0.02", "-0.01", "0.00", "0.01"]),
    ],
)
def test_axes_have_round_marks_and_hold_the_data(low, high, ticks, labels) -> None:
    made = axis(low, high)
    assert made.ticks == pytest.approx(ticks)
    assert made.low <= low and made.high >= high
    assert made.labels() == [minus(label) for label in labels]


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-9, 1e30])
def test_an_axis_of_one_value_has_a_width(value: float) -> None:
    made = axis(value, value)
    assert made.low < made.high and made.low <= value <= made.high
    assert 0 <= made.share(value) <= 1


def test_the_axis_of_steps_ends_where_the_data_end() -> None:
    made = step_axis([1, 2, 60])
    assert (made.low, made.high, made.ticks) == (1, 60, (1, 20, 40, 60))
    assert step_axis([7]).ticks == (7,)
    assert step_axis([3, 4]).ticks == (3, 4)


def test_what_is_beyond_an_axis_stands_at_its_end() -> None:
    made = axis(0.0, 1.0)
    assert (made.share(-5.0), made.share(0.5), made.share(7.0)) == (0.0, 0.5, 1.0)
