"""Line charts as inline SVG. The drawing stretches to any width; its letters and lines keep their size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_recipes.report.curves import buckets, highs, known, lows, means, smooth, usual_range, window_of
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.paths import HEIGHT, WIDTH, band_path, dots_path, line_path
from grpo_recipes.report.read import Column, Table
from grpo_recipes.report.units import Axis, axis, percent, short, step_axis


@dataclass(frozen=True)
class Curve:
    """One line of a chart.

    Attributes:
        label: its name in legend and read-out.
        x: (N,) in rising order.
        line: (N,) the line, None where it is broken.
        colour: 1 to 8.
        faint: (N,) what the line is a mean of, drawn behind it.
        band: (N,) and (N,), the area around it.
        band_label: what the area is; the read-out shows its range.
        dots: marks instead of a line.
        dashed: where there are more curves than colours.
    """

    label: str
    x: Sequence[float]
    line: Column
    colour: int = 1
    faint: Column | None = None
    band: tuple[Column, Column] | None = None
    band_label: str = ""
    dots: bool = False
    dashed: bool = False

    @property
    def mark(self) -> str:
        """How the legend shows it."""
        return "dot" if self.dots else "dash" if self.dashed else ""


@dataclass(frozen=True)
class Chart:
    """Curves in one frame.

    Attributes:
        title: what is drawn.
        curves: at least one with a value.
        note: a few words on what the lines are.
        bounds: the least the vertical axis must hold; by default it follows the values.
        shares: values are shares, marked in per cent.
        x_name: what x counts.
        large: twice the height and the whole width.
    """

    title: str
    curves: Sequence[Curve]
    note: str = ""
    bounds: tuple[float, float] | None = None
    shares: bool = False
    x_name: str = "step"
    large: bool = False


def thinned(table: Table, name: str, label: str, colour: int = 1, window: int | None = None) -> Curve:
    """A metric as a line through its noise, with every value, or their range where there are many, faintly behind."""
    values, parts = table.column(name), buckets(len(table.steps))
    line, xs = smooth(values, parts, window or window_of(len(values))), thinned_steps(table)
    if len(parts) == len(values):
        return Curve(label, xs, line, colour, faint=values if line != values else None)
    return Curve(label, xs, line, colour, band=(lows(values, parts), highs(values, parts)))


def thinned_steps(table: Table) -> list[float]:
    """The last step of each part that becomes one point; the first of the first, so that the axis begins there."""
    return [table.steps[part.stop - 1 if part.start else 0] for part in buckets(len(table.steps))]


def thinned_means(table: Table, name: str) -> Column:
    """A metric's mean over each part."""
    return means(table.column(name), buckets(len(table.steps)))


def draw(chart: Chart) -> Html:
    """The chart as a figure."""
    start = [] if chart.x_name == "step" else [0.0]
    across, up = step_axis([*start, *[x for curve in chart.curves for x in curve.x]]), _vertical(chart)
    xs = chart.curves[0].x
    drawn = [part for curve in chart.curves for part in _curve(curve, across, up, own=curve.x != xs)]
    area = element(
        "svg", grid(up), *drawn, element("path", class_="cursor"), class_="area", viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none", role="img", aria_label=_spoken(chart),
    )  # fmt: skip
    return element(
        "figure",
        _caption(chart, up),
        frame(area, _labels_up(chart, up), across_labels(across, chart.x_name)),
        class_="chart large" if chart.large else "chart",
        tabindex="0",
        data_x=_compact_all(xs),
        data_low=compact(across.low),
        data_high=compact(across.high),
        data_xname=chart.x_name,
        data_percent=chart.shares,
    )


def frame(area: Html, up: Html, across: Html) -> Html:
    """A drawing between its labels."""
    canvas = element("div", area, element("p", class_="tip", hidden=True), class_="canvas")
    return element("div", up, canvas, across, class_="plot")


def across_labels(across: Axis, name: str) -> Html:
    """Marks of the horizontal axis, under the drawing."""
    labels = [f"{tick:,.0f}" if name == "step" else short(tick) for tick in across.ticks]
    texts = [
        element("text", label, x=f"{100 * across.share(tick):.2f}%", y="12", text_anchor=_anchor(across.share(tick)))
        for tick, label in zip(across.ticks, labels, strict=True)
    ]
    return element("svg", *texts, class_="across", aria_hidden="true")


def side_labels(places: Sequence[tuple[float, str]]) -> Html:
    """Labels left of the drawing: share of the height from the top, and text."""
    texts = [element("text", text, x="100%", y=f"{100 * place:.2f}%", dy=".32em") for place, text in places]
    return element("svg", *texts, class_="up", aria_hidden="true")


def grid(up: Axis) -> Html:
    """A line at each mark of the vertical axis."""
    lines = "".join(f"M0 {round(HEIGHT * (1 - up.share(tick)))}h{WIDTH}" for tick in up.ticks)
    return element("path", class_="grid", d=lines)


def legend(entries: Sequence[tuple[int, str, str]]) -> Html:
    """Colours, what they stand for, and the kind of mark: a line, a dot or a box."""
    return element("ul", *[element("li", text, class_=f"k{colour} {kind}") for colour, text, kind in entries],
                   class_="legend")  # fmt: skip


def compact(value: float) -> str:
    """A number in few characters, four digits."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e7 else f"{value:.4g}"


def _compact_all(values: Sequence[float | None]) -> str:
    return " ".join("-" if value is None else compact(value) for value in values)


def _anchor(share: float) -> str:
    return "start" if share < 0.04 else "end" if share > 0.96 else "middle"


def _caption(chart: Chart, up: Axis) -> Html:
    notes = ". ".join(note for note in (chart.note, _beyond(chart, up)) if note)
    several = list({curve.label: curve for curve in chart.curves}.values()) if len(chart.curves) > 1 else []
    return element(
        "figcaption",
        element("h3", chart.title),
        element("span", _newest(chart), class_="newest"),
        element("p", notes, class_="note") if notes else None,
        legend([(curve.colour, curve.label, curve.mark) for curve in several]) if several else None,
    )


def _newest(chart: Chart) -> str:
    """The newest value where there is one curve, for the corner."""
    value = next((value for value in reversed(chart.curves[0].line) if value is not None), None)
    if len(chart.curves) > 1 or chart.large or value is None:
        return ""
    return percent(value) if chart.shares else short(value)


def _beyond(chart: Chart, up: Axis) -> str:
    count = sum(not up.low <= value <= up.high for curve in chart.curves for value in known(curve.faint or curve.line))
    return f"{count} value{'s' * (count > 1)} beyond the axis" if count else ""


def _vertical(chart: Chart) -> Axis:
    """An axis that holds the lines and nearly all of what is behind them; from 0 where that is not far."""
    lines = [value for curve in chart.curves for value in known(curve.line)]
    low, high = usual_range(lines)
    if chart.bounds:
        low, high = min(low, chart.bounds[0]), max(high, chart.bounds[1])
    else:
        behind = [value for curve in chart.curves for column in _behind(curve) for value in known(column)]
        few, many = usual_range(behind) if behind else (low, high)
        low, high = min(low, few), max(high, many)
    if 0 < low <= 0.5 * high or low < 0 <= min(lines):
        low = 0.0
    elif low <= 2 * high < 0:
        high = 0.0
    return axis(low, high, 5 if chart.large else 4)


def _behind(curve: Curve) -> list[Column]:
    return [column for column in (curve.faint, *(curve.band or ())) if column]


def _labels_up(chart: Chart, up: Axis) -> Html:
    labels = [percent(tick) for tick in up.ticks] if chart.shares else up.labels()
    return side_labels([(1 - up.share(tick), label) for tick, label in zip(up.ticks, labels, strict=True)])


def _curve(curve: Curve, across: Axis, up: Axis, own: bool) -> list[Html]:
    colour = f"c{curve.colour}"
    drawn = []
    if curve.band:
        drawn.append(element("path", class_=f"band {colour}", d=band_path(curve.x, *curve.band, across, up)))
    if curve.faint:
        drawn.append(element("path", class_=f"faint {colour}", d=line_path(curve.x, curve.faint, across, up)))
    path = (dots_path if curve.dots else line_path)(curve.x, curve.line, across, up)
    data = {"data_label": curve.label, "data_x": _compact_all(curve.x) if own else None}
    data |= {"data_y": _compact_all(curve.line), "data_range": _ranges(curve)}
    kind = "dots" if curve.dots else "line dashed" if curve.dashed else "line"
    return [*drawn, element("path", class_=f"{kind} {colour}", d=path, **data)]


def _ranges(curve: Curve) -> str | None:
    """The band for the read-out, as low:high."""
    if not curve.band_label or not curve.band:
        return None
    pairs = zip(*curve.band, strict=True)
    return " ".join(f"{compact(low)}:{compact(high)}" if low is not None and high is not None else "-"
                    for low, high in pairs)  # fmt: skip


def _spoken(chart: Chart) -> str:
    first = chart.curves[0]
    values = known(first.line)
    ends = f" from {short(values[0])} to {short(values[-1])}" if values else ""
    return f"{chart.title}{ends}, {chart.x_name} {compact(first.x[0])} to {compact(first.x[-1])}"
