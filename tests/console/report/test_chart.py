"""Charts draw each value at its position."""

from __future__ import annotations

import re
from array import array
from pathlib import Path

import pytest

from grpo_recipes.console.report.chart import (
    Axis,
    Chart,
    Curve,
    Histogram,
    choose_window,
    find_usual_range,
    make_axis,
    make_curve,
    make_histogram,
    make_step_axis,
    smooth_values,
    split_rows,
)
from grpo_recipes.console.report.page import format_number, format_points, render_fragment, use_minus_signs
from grpo_recipes.console.report.read import Column, Scored, Table, read_run
from grpo_recipes.console.report.run_charts import make_phase_chart, make_reward_chart
from grpo_recipes.runs.health import percent

from .synthetic_runs import make_run

FRAME = Chart("from 0 to 10 and from 0 to 1", [Curve("", [0, 10], [0.0, 1.0])])
AXES = (make_step_axis([1, 2, 3]), make_axis(0.0, 0.75))
ENDS = [("first", [0.5, 0.5]), ("last", [0.25, 0.75])]
HISTOGRAM = Histogram(["0", "1"], False, *AXES, [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]], ENDS)


def draw(chart: Chart) -> str:
    return render_fragment("charts.html.j2", "lines", chart)


def test_points_are_measured_from_the_top_left() -> None:
    assert FRAME.path("line", [0, 5, 10], [0.0, 0.5, 1.0]) == "M0 1000l1000-500 1000-500"
    assert FRAME.path("dots", [5, 5], [1.0, 0.0]) == "M1000 0h0M1000 1000h0"


def test_a_missing_value_breaks_the_line_and_the_band() -> None:
    assert FRAME.path("line", [0, 1, 2, 3], [0.0, None, 1.0, 1.0]) == "M0 1000h0M400 0l200 0"
    band = FRAME.path("band", [0, 1, 2], [0.0, 0.0, None], [1.0, 1.0, 1.0])
    assert band == "M0 0l200 0 0 1000-200 0z"


def test_a_chart_holds_its_numbers_for_the_read_out() -> None:
    curve = Curve("mean", [1, 2, 3], [0.5, None, 0.25], band=([0.0, None, 0.0], [1.0, None, 0.5]), band_label="range")
    other = Curve("dots", [2], [0.125], 2, "dots")
    figure = draw(Chart("Title <b>", [curve, other]))
    assert 'data-x="1 2 3"' in figure and 'data-y="0.5 - 0.25"' in figure and 'data-band="0:1 - 0:0.5"' in figure
    assert 'class="curve c2" data-label="dots" data-kind="dots" data-clock="0" data-x="2"' in figure
    assert "Title &lt;b&gt;" in figure and "<b>" not in figure


def test_a_single_spike_leaves_the_others_readable_and_is_told() -> None:
    values: list[float | None] = [1.0 + 0.1 * (row % 3) for row in range(300)]
    values[77] = 1e6
    figure = draw(Chart("Norm", [Curve("norm", list(range(300)), values)]))
    assert "1 value outside the axis" in figure
    labels = re.findall(r'dy=".32em">([^<]*)<', figure)
    assert all(float(label) < 10 for label in labels)


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ([0.4, 0.9], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.8, 0.9], ["0.8", "0.82", "0.84", "0.86", "0.88", "0.9"]),
        ([-9.0, -3.0], ["-10", "-8", "-6", "-4", "-2", "0"]),
    ],
)
def test_the_axis_begins_at_zero_where_that_is_near(values: list[float], labels: list[str]) -> None:
    figure = draw(Chart("x", [Curve("x", [1, 2], list(values))], large=True))
    assert re.findall(r'dy=".32em">([^<]*)<', figure) == [use_minus_signs(label) for label in labels]


def test_a_long_metric_is_thinned_to_a_line_and_its_range() -> None:
    table = Table(steps=list(range(1, 5001)), columns={"m": [float(step % 10) for step in range(5000)]})
    curve = make_curve([table], "m", "m")
    assert curve.band is not None and not curve.faint
    assert len(curve.line) == len(curve.x) == 240
    assert (curve.x[0], curve.x[-1]) == (1, 5000)
    assert all(value is not None and abs(value - 4.5) < 0.2 for value in curve.line)
    assert (min(curve.band[0]), max(curve.band[1])) == (0.0, 9.0)


def test_areas_stand_on_one_another() -> None:
    seconds = {"seconds/sample": [1.0, 1.0], "seconds/score": [1.0, 3.0]}
    chart = make_phase_chart(Table(steps=[1, 2], columns={name: [*values] for name, values in seconds.items()}), {})
    assert chart is not None
    figure = draw(chart)
    first, second = re.findall(r'class="layer" d="([^"]*)"', figure)
    assert first == "M0 750l2000 0 0 250-2000 0z"
    assert second == "M0 500l2000-500 0 750-2000 0z"


def test_evaluations_and_saves_are_drawn_at_the_step_that_they_follow() -> None:
    evaluate = [0.0, 0.0, 9.0, 0.0]  # after step 2, so the row of step 3 has it
    columns: dict[str, Column] = {"seconds/sample": [1.0] * 4, "seconds/evaluate": [*evaluate]}
    for last_seconds, value, raw in (({}, 0.0, None), ({"evaluate": 5.0}, 5.0, 5.0)):
        chart = make_phase_chart(Table(steps=[1, 2, 3, 4], columns=columns), last_seconds)
        assert chart is not None
        assert [curve.line for curve in chart.curves] == [[1.0] * 4, [0.0, 9.0, 0.0, value]]
        assert chart.curves[1].values[-1] == raw


def test_the_band_of_the_reward_is_kept_without_smoothing(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path, steps=30))
    chart = make_reward_chart(run)
    assert chart is not None
    curve, reward, half = chart.curves[0], run.metrics.known("reward"), run.metrics.known("reward_std")
    assert curve.band is not None and curve.raw_band is not None
    assert curve.band[0][4] == pytest.approx(sum(reward[3:6]) / 3 - sum(half[3:6]) / 3)
    assert curve.raw_band[0][4] == pytest.approx(reward[4] - half[4])
    assert curve.ranges.split()[4].split(":")[0] == f"{reward[4] - half[4]:.4g}"


def test_a_heat_map_has_a_cell_for_each_share_above_zero() -> None:
    figure = render_fragment("charts.html.j2", "heat_map", "r", "", HISTOGRAM)
    half = f"{0.5**0.7:.2f}"
    assert re.findall(r'fill-opacity="([\d.]+)" d="([^"]*)"', figure) == [
        ("1.00", "M0 1h1v1h-1zM2 0h1v1h-1z"),
        (half, "M1 0h1v1h-1zM1 1h1v1h-1z"),
    ]


def test_bars_are_as_high_as_their_shares() -> None:
    figure = render_fragment("charts.html.j2", "bar_pairs", "r", "", HISTOGRAM)
    assert re.findall(r'class="bar c\d".*?height="(\d+)"', figure) == ["625", "625", "312", "938"]


def test_an_interval_shows_value_and_ends() -> None:
    figure = render_fragment("charts.html.j2", "interval", 0.5, 0.25, 1.0)
    assert 'x1="25.00%" x2="100.00%"' in figure and 'cx="50.00%"' in figure


def test_names_of_many_bins_are_thinned() -> None:
    assert Histogram([str(row) for row in range(16)], True, *AXES, [], []).marks()[:2] == [(0.0, "0"), (0.125, "2")]
    assert HISTOGRAM.marks() == [(0.25, "0"), (0.75, "1")]


def test_values_that_are_all_the_same_are_drawn() -> None:
    for value in (0.0, 3e-4, -2.0, 1e30):
        figure = draw(Chart("x", [Curve("x", [1, 2, 3], [value] * 3)]))
        (path,) = re.findall(r'class="line" d="([^"]*)"', figure)
        assert re.fullmatch(r"M0 \d+l1000 0 1000 0", path)


@pytest.mark.parametrize(
    ("low", "high", "ticks", "labels"),
    [
        (0.0, 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), ["0", "0.25", "0.5", "0.75", "1"]),
        (0.0, 3e-7, (0.0, 1e-7, 2e-7, 3e-7), ["0", "1e-7", "2e-7", "3e-7"]),
        (2300.0, 9100.0, (2000.0, 4000.0, 6000.0, 8000.0, 10000.0), ["2,000", "4,000", "6,000", "8,000", "10,000"]),
        (-0.02, 0.01, (-0.02, -0.01, 0.0, 0.01), ["-0.02", "-0.01", "0", "0.01"]),
        (0.0, 8e6, (0.0, 2e6, 4e6, 6e6, 8e6), ["0", "2M", "4M", "6M", "8M"]),
        (
            0.9999996,
            1.0,
            (0.9999996, 0.9999997, 0.9999998, 0.9999999, 1.0),
            ["0.9999996", "0.9999997", "0.9999998", "0.9999999", "1.0000000"],
        ),
        (300.0, 301.0, (300.0, 300.25, 300.5, 300.75, 301.0), ["300", "300.25", "300.5", "300.75", "301"]),
    ],
)
def test_axes_have_round_marks_and_hold_the_data(low, high, ticks, labels) -> None:
    scale = make_axis(low, high)
    assert scale.ticks == pytest.approx(ticks)
    assert scale.low <= low and scale.high >= high
    assert [label for _, label in scale.marks()] == [use_minus_signs(label) for label in labels]


def test_nearly_equal_points_keep_the_digits_that_differ() -> None:
    assert format_points([0.5, 0.123456, None, 7.0]) == "0.5 0.1235 - 7"
    assert format_points([1.0, 0.99999988, 0.99999976]) == "1 0.99999988 0.99999976"
    assert format_points([1e308, -1e308, 0.5]) == "1e+308 -1e+308 0.5"
    assert format_points([0.3, 0.3]) == "0.3 0.3" and format_points([]) == ""


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-9, 1e30])
def test_an_axis_of_one_value_has_a_width(value: float) -> None:
    scale = make_axis(value, value)
    assert scale.low < scale.high and scale.low <= value <= scale.high
    assert 0 <= scale.locate(value) <= 1


def test_the_axis_of_steps_ends_where_the_data_end() -> None:
    scale = make_step_axis([1, 2, 60])
    assert (scale.low, scale.high, scale.ticks) == (1, 60, (1, 20, 40, 60))
    assert make_step_axis([7]).ticks == (7,)
    assert make_step_axis([3, 4]).ticks == (3, 4)


def test_what_is_beyond_an_axis_stands_at_its_end() -> None:
    scale = make_axis(0.0, 1.0)
    assert (scale.locate(-5.0), scale.locate(0.5), scale.locate(7.0)) == (0.0, 0.5, 1.0)


@pytest.mark.parametrize(("count", "parts"), [(0, 0), (1, 1), (240, 240), (241, 240), (5000, 240)])
def test_parts_cover_every_row_once(count: int, parts: int) -> None:
    slices = split_rows(count)
    assert len(slices) == parts
    assert [row for part in slices for row in range(part.start, part.stop)] == list(range(count))


def test_parts_have_a_mean_and_gaps_stay_gaps() -> None:
    parts = [slice(0, 2), slice(2, 4), slice(4, 6)]
    values = [1.0, 3.0, None, 5.0, None, None]
    assert smooth_values(values, parts) == [2.0, 5.0, None]


def test_the_line_is_the_mean_around_each_row() -> None:
    single_rows = [slice(row, row + 1) for row in range(5)]
    assert smooth_values([1.0, 2.0, 6.0, None, 2.0], single_rows, 3) == [1.5, 3.0, 4.0, 4.0, 2.0]
    assert smooth_values([1.0, 2.0, 6.0, None, 2.0], single_rows, 1) == [1.0, 2.0, 6.0, None, 2.0]


def test_a_huge_value_does_not_spoil_those_after_it() -> None:
    values = [1e30, *[0.5] * 30]
    single_rows = [slice(row, row + 1) for row in range(31)]
    assert smooth_values(values, single_rows, 3)[10] == 0.5


def test_short_runs_are_not_smoothed() -> None:
    assert [choose_window(count) for count in (1, 19, 20, 60, 5000)] == [1, 1, 3, 5, 333]


def test_rare_extremes_do_not_set_the_range() -> None:
    assert find_usual_range([1.0, 2.0]) == (1.0, 2.0)
    low, high = find_usual_range([*[1.0, 2.0] * 50, 500.0])
    assert (low, high) == (1.0, 3.5)
    assert find_usual_range([*[1.0, 2.0] * 50, 3.0]) == (1.0, 3.0)


def test_a_reward_on_the_edge_of_a_range_is_in_the_range_above_it():
    rewards = array("d", [tenth / 10 for tenth in range(11)])
    distribution = make_histogram([Scored(step, rewards) for step in (1, 2, 3)])
    assert distribution is not None
    assert [name for name, _ in distribution.ends] == ["step 1", "step 3"]
    assert distribution.ends[0][1] == pytest.approx([1 / 11] * 9 + [2 / 11])


@pytest.mark.parametrize(
    "ticks",
    [
        (1_234_567.0, 1_234_568.0, 1_234_569.0),
        (0.1, 0.10000001, 0.10000002),
        (100_001.0, 100_002.0),
        (-2e-7, 0.0, 2e-7),
    ],
)
def test_no_two_labels_of_an_axis_are_the_same(ticks: tuple[float, ...]) -> None:
    scale = Axis(ticks[0], ticks[-1], ticks)
    for text in (None, format_number, percent, "{:,.0f}".format):
        labels = [label for _, label in scale.marks(text)]
        assert len(set(labels)) == len(ticks), labels


def test_an_axis_of_shares_ends_at_a_whole() -> None:
    curve = Curve("x", [1, 2, 3], [0.9, 0.95, 1.0], band=([-7.0, 0.5, 0.9], [8.0, 1.4, 1.1]))
    chart = Chart("x", [curve], shares=True)
    assert (chart.up.low, chart.up.high) == (0.0, 1.0)
    assert "800 %" not in draw(chart)


def test_axes_have_titles() -> None:
    figure = draw(Chart("Entropy", [Curve("x", [1, 2], [0.5, 1.0])], y_name="nats a token"))
    assert '<p class="y-title">nats a token</p>' in figure and ">optimizer step</text>" in figure
    assert ">share</p>" in draw(Chart("x", [Curve("x", [1, 2], [0.5, 1.0])], shares=True))
    assert ">minutes in steps</text>" in draw(Chart("x", [Curve("x", [1, 2], [0.5, 1.0])], x_name="min"))


def test_a_metric_of_every_second_step_is_a_line():
    """M17: with two steps per generation, the reward exists on every second step."""
    assert FRAME.path("line", [0, 1, 2, 3, 4], [0.0, None, 0.5, None, 1.0]) == "M0 1000l400-500 400-500"
    band = FRAME.path("band", [0, 1, 2], [0.0, None, 0.0], [1.0, None, 1.0])
    assert band == "M0 0l400 0 0 1000-400 0z"


def test_a_point_without_neighbors_is_drawn_as_a_dot():
    """M17: a line of no length is one pixel wide, so a lone point needs a wider stroke."""
    curve = Curve("reward", [0, 1, 2, 3, 4, 5], [0.0, None, None, None, 1.0, 1.0])
    assert FRAME.lone_points(curve) == "M0 1000h0"
    assert FRAME.lone_points(Curve("reward", [0, 1, 2], [None, 0.5, None])) == "M200 500h0"
    assert FRAME.lone_points(Curve("reward", [0, 1], [0.5, 0.5])) == ""
    assert FRAME.lone_points(Curve("reward", [0, 1], [0.5, None], kind="dots")) == "", "they are dots already"
