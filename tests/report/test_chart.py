"""Charts put values where they belong."""

from __future__ import annotations

import math
import re

import pytest

from grpo_recipes.report.chart import (
    Axis,
    Chart,
    Curve,
    Layer,
    Rows,
    band_path,
    bar_pairs,
    dots_path,
    draw,
    heat_map,
    line_path,
    stack,
    thinned,
)
from grpo_recipes.report.page import fragment, minus
from grpo_recipes.report.read import Table

ACROSS, UP = Axis(0, 10, (0, 10)), Axis(0, 1, (0, 1))


def test_points_are_measured_from_the_top_left() -> None:
    assert line_path([0, 5, 10], [0.0, 0.5, 1.0], ACROSS, UP) == "M0 1000L1000 500L2000 0"
    assert dots_path([5], [1.0], ACROSS, UP) == "M1000 0h0"


def test_a_missing_value_breaks_the_line_and_the_band() -> None:
    assert line_path([0, 1, 2, 3], [0.0, None, 1.0, 1.0], ACROSS, UP) == "M0 1000h0M400 0L600 0"
    band = band_path([0, 1, 2], [0.0, 0.0, None], [1.0, 1.0, 1.0], ACROSS, UP)
    assert band == "M0 0L200 0L200 1000L0 1000z"


def test_a_chart_holds_its_numbers_for_the_read_out() -> None:
    curve = Curve("mean", [1, 2, 3], [0.5, None, 0.25], band=([0.0, None, 0.0], [1.0, None, 0.5]), band_label="range")
    other = Curve("dots", [2], [0.125], 2, dots=True)
    made = draw(Chart("Title <b>", [curve, other]))
    assert 'data-x="1 2 3"' in made and 'data-y="0.5 - 0.25"' in made and 'data-range="0:1 - 0:0.5"' in made
    assert 'class="dots c2"' in made and 'data-x="2"' in made
    assert "Title &lt;b&gt;" in made and "<b>" not in made


def test_a_single_spike_leaves_the_others_readable_and_is_told() -> None:
    values: list[float | None] = [1.0 + 0.1 * (row % 3) for row in range(300)]
    values[77] = 1e6
    made = draw(Chart("Norm", [Curve("norm", list(range(300)), values)]))
    assert "1 value beyond the axis" in made
    labels = re.findall(r'dy=".32em">([^<]*)<', made)
    assert all(float(label) < 10 for label in labels)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.4, 0.9], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.8, 0.9], ["0.80", "0.82", "0.84", "0.86", "0.88", "0.90"]),
        ([-9.0, -3.0], ["-10", "-8", "-6", "-4", "-2", "0"]),
    ],
)
def test_the_axis_begins_at_zero_where_that_is_near(values: list[float], labels: list[str]) -> None:
    made = draw(Chart("x", [Curve("x", [1, 2], list(values))], large=True))
    assert re.findall(r'dy=".32em">([^<]*)<', made) == [minus(label) for label in labels]


def test_a_long_metric_is_thinned_to_a_line_and_its_range() -> None:
    table = Table(steps=list(range(1, 5001)), columns={"m": [float(step % 10) for step in range(5000)]})
    curve = thinned(table, "m", "m")
    assert curve.band is not None and curve.faint is None
    assert len(curve.line) == len(curve.x) == 240
    assert (curve.x[0], curve.x[-1]) == (1, 5000)
    assert all(value is not None and abs(value - 4.5) < 0.2 for value in curve.line)
    assert (min(curve.band[0]), max(curve.band[1])) == (0.0, 9.0)


def test_areas_stand_on_one_another() -> None:
    made = stack("Time", "", [1, 2], [Layer("a", [1.0, 1.0], 1), Layer("b", [1.0, 3.0], 2)])
    first, second = re.findall(r'class="layer c\d" d="([^"]*)"', made)
    assert first == "M0 750L2000 750L2000 1000L0 1000z"
    assert second == "M0 500L2000 0L2000 750L0 750z"


def test_a_heat_map_has_a_cell_for_each_share_above_zero() -> None:
    made = heat_map("r", "", [1, 2, 3], Rows(["0", "1"], edged=False), [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    assert re.findall(r'y="(\d+)"[^>]*fill-opacity="([\d.]+)"', made) == [
        ("500", "1.00"),
        ("500", f"{0.5**0.7:.2f}"),
        ("0", f"{0.5**0.7:.2f}"),
        ("0", "1.00"),
    ]


def test_bars_are_as_high_as_their_shares() -> None:
    made = bar_pairs("r", "", Rows(["0", "1"], edged=False), ("first", "last"), [(0.5, 0.25), (0.5, 0.75)])
    assert re.findall(r'class="bar c\d".*?height="(\d+)"', made) == ["625", "312", "625", "938"]


def test_an_interval_shows_value_and_ends() -> None:
    made = fragment("charts.html.j2", "interval", 0.5, 0.25, 1.0)
    assert 'x1="25.00%" x2="100.00%"' in made and 'cx="50.00%"' in made


def test_names_of_many_bins_are_thinned() -> None:
    assert Rows([str(row) for row in range(16)], edged=True).marks()[:2] == [(0.0, "0"), (0.125, "2")]
    assert Rows(["0", "1"], edged=False).marks() == [(0.25, "0"), (0.75, "1")]


def test_values_that_are_all_the_same_are_drawn() -> None:
    for value in (0.0, 3e-4, -2.0, 1e30):
        made = draw(Chart("x", [Curve("x", [1, 2, 3], [value] * 3)]))
        places = [int(y) for y in re.findall(r"[ML]\d+ (\d+)", re.findall(r'class="line c1" d="([^"]*)"', made)[0])]
        assert len(set(places)) == 1 and math.isfinite(places[0])
