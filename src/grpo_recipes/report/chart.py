"""Charts as inline SVG: axes, thinned curves, and four kinds of drawing in one frame.

A drawing has ``WIDTH`` by ``HEIGHT`` units and stretches to any width; its letters and lines keep their size. The
charts are drawn here rather than by a library's script: they can be read without a script, and no file is vendored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from grpo_recipes.report.page import compact, compact_all, fragment, minus, scale_of, scientific, short
from grpo_recipes.report.read import Column, Table
from grpo_recipes.runs.health import known, mean, percent

WIDTH, HEIGHT = 2000, 1000
MOST_POINTS = 240
_TEMPLATE = "charts.html.j2"
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True)
class Axis:
    """A range and the round numbers marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return where ``value`` stands between low (0) and high (1); what is beyond stands at the end."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def labels(self) -> list[str]:
        """Return a label for each tick, all with the same digits."""
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        largest = max(abs(tick) for tick in self.ticks)
        if largest and (largest < 1e-3 or largest >= 1e9):
            return [scientific(tick) for tick in self.ticks]
        scale, suffix = scale_of(largest) if step >= 10 else (1.0, "")
        power = math.floor(math.log10(step / scale) + 1e-9)
        mantissa = step / scale / 10.0**power
        digits = max(0, -power + (abs(mantissa - round(mantissa)) >= 1e-6))
        return [minus(f"{tick / scale:,.{digits}f}{suffix if tick else ''}") for tick in self.ticks]


def axis(low: float, high: float, wanted: int = 4, *, whole: bool = False) -> Axis:
    """Return a range that holds ``low`` and ``high``, in about ``wanted`` steps; ``whole`` marks integers alone."""
    if low == high:
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in _STEPS if power * factor >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks)  # a tick may be 1e-16 short of the value


def step_axis(steps: Sequence[float], wanted: int = 5) -> Axis:
    """Return the axis of optimizer steps: it ends where the data end, and marks whole numbers."""
    low, high = min(steps), max(steps)
    if low == high:
        return Axis(low - 0.5, high + 0.5, (low,))
    marks = axis(low, high, wanted, whole=all(float(step).is_integer() for step in steps)).ticks
    inside = [mark for mark in marks if low <= mark <= high]
    gap = 0.6 * (marks[1] - marks[0])
    first = [low] if not inside or inside[0] - low > gap else []
    last = [high] if not inside or high - inside[-1] > gap else []
    return Axis(low, high, (*first, *inside, *last))


def window_of(count: int) -> int:
    """Return the rows of the moving mean: an odd number, about a fifteenth of all; 1 (none) below 20 rows."""
    return 1 if count < 20 else max(3, count // 15 | 1)


def buckets(count: int, most: int = MOST_POINTS) -> list[slice]:
    """Return ``count`` rows in at most ``most`` slices of nearly the same length."""
    parts = min(count, most)
    edges = [round(index * count / parts) for index in range(parts + 1)] if parts else []
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def means(values: Column, parts: Sequence[slice]) -> Column:
    """Return the mean of each part; None where a part holds nothing."""
    return [mean(known(values[part])) for part in parts]


def smooth(values: Column, parts: Sequence[slice], window: int) -> Column:
    """Return for each part the mean of the values within ``window`` rows around its middle."""
    middles = [(part.start + part.stop - 1) // 2 for part in parts]
    spans = [slice(min(part.start, max(0, at - window // 2)), max(part.stop, at + window // 2 + 1))
             for part, at in zip(parts, middles, strict=True)]  # fmt: skip
    return means(values, spans)


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range from the 1st to the 99th percentile, or of all values where that is not much more."""
    ordered = sorted(values)
    rare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
    low, high = ordered[rare], ordered[-1 - rare]
    margin = 1.5 * (high - low)
    return max(ordered[0], low - margin), min(ordered[-1], high + margin)


def around(middles: Column, halves: Column) -> tuple[Column, Column]:
    """Return the lower and upper edge of a band; None where middle or half is."""
    pairs = list(zip(middles, halves, strict=True))
    return (
        [None if middle is None or half is None else middle - half for middle, half in pairs],
        [None if middle is None or half is None else middle + half for middle, half in pairs],
    )


def line_path(xs: Sequence[float], values: Column, across: Axis, up: Axis) -> str:
    """Return a line through the points, broken where a value is missing; a lone point is a dot."""
    pieces = _unbroken(list(zip(xs, values, strict=True)))
    lines = ["L".join(_point(across, up, x, y) for x, y in piece) for piece in pieces]
    return "".join(f"M{line}{'h0' if 'L' not in line else ''}" for line in lines)


def dots_path(xs: Sequence[float], values: Column, across: Axis, up: Axis) -> str:
    """Return a dot for each point: a line of no length, which round line ends make visible."""
    points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
    return "".join(f"M{_point(across, up, x, value)}h0" for x, value in points)


def band_path(xs: Sequence[float], low: Column, high: Column, across: Axis, up: Axis) -> str:
    """Return the area between two lines, in as many parts as missing values make."""
    closed = []
    for piece in _unbroken(list(zip(xs, low, high, strict=True))):
        there = [_point(across, up, x, top) for x, _, top in piece]
        back = [_point(across, up, x, bottom) for x, bottom, _ in reversed(piece)]
        closed.append(f"M{'L'.join(there + back)}z")
    return "".join(closed)


def _unbroken(points: Sequence[tuple[float | None, ...]]) -> list[list[tuple[float, ...]]]:
    """Return the stretches of points without a missing value."""
    stretches = itertools.groupby(points, key=lambda point: None not in point)
    return [list(points) for whole, points in stretches if whole]  # type: ignore[arg-type]


def _point(across: Axis, up: Axis, x: float, y: float) -> str:
    return f"{round(WIDTH * across.share(x))} {round(HEIGHT * (1 - up.share(y)))}"


@dataclass(frozen=True)
class Curve:
    """One line of a chart of N points."""

    label: str
    x: Sequence[float]  # rising
    line: Column  # None where it is broken
    colour: int = 1  # 1 to 8
    faint: Column | None = None  # what the line is a mean of, drawn behind it
    band: tuple[Column, Column] | None = None  # lower and upper edge of the area around it
    band_label: str = ""  # what the area is; the read-out shows its range where this is given
    dots: bool = False  # marks instead of a line
    dashed: bool = False  # where there are more curves than colours


@dataclass(frozen=True)
class Chart:
    """Curves in one frame, of which at least one has a value."""

    title: str
    curves: Sequence[Curve]
    note: str = ""
    bounds: tuple[float, float] | None = None  # the least that the vertical axis must hold instead of what is behind
    shares: bool = False  # values are shares, marked in per cent
    x_name: str = "step"
    large: bool = False  # twice the height and the whole width


def thinned(table: Table, name: str, label: str, colour: int = 1, window: int | None = None) -> Curve:
    """Return a metric as a line through its noise; faintly behind it every value, or the range of many values."""
    values, parts = table.column(name), buckets(len(table.steps))
    line, xs = smooth(values, parts, window or window_of(len(values))), thinned_steps(table)
    if len(parts) == len(values):
        return Curve(label, xs, line, colour, faint=values if line != values else None)
    low, high = ([of(found, default=None) for found in (known(values[part]) for part in parts)] for of in (min, max))
    return Curve(label, xs, line, colour, band=(low, high))


def thinned_steps(table: Table) -> list[float]:
    """Return the last step of each part that becomes one point; the first of the first, where the axis begins."""
    return [table.steps[part.stop - 1 if part.start else 0] for part in buckets(len(table.steps))]


def draw(chart: Chart) -> Markup:
    """Return lines, dots and bands as a figure."""
    start = [] if chart.x_name == "step" else [0.0]
    across, up = step_axis([*start, *[x for curve in chart.curves for x in curve.x]]), _vertical(chart)
    first, several = chart.curves[0], len(chart.curves) > 1
    paths = [path for curve in chart.curves for path in _paths(curve, across, up, own=curve.x != first.x)]
    kinds = {curve.label: ("dot" if curve.dots else "dash" if curve.dashed else "", curve.colour)
             for curve in chart.curves}  # fmt: skip
    newest = next((value for value in reversed(first.line) if value is not None), None)
    values = known(first.line)
    ends = f" from {short(values[0])} to {short(values[-1])}" if values else ""
    return fragment(
        _TEMPLATE, "lines",
        title=chart.title, large=chart.large, paths=paths, grid=_grid(up), across=_across(across, chart.x_name),
        up=_up(up, percent if chart.shares else None), note=". ".join(filter(None, (chart.note, _beyond(chart, up)))),
        legend=[(colour, label, kind) for label, (kind, colour) in kinds.items()] if several else [],
        newest="" if several or chart.large or newest is None else percent(newest) if chart.shares else short(newest),
        spoken=f"{chart.title}{ends}, {chart.x_name} {compact(first.x[0])} to {compact(first.x[-1])}",
        data={"x": compact_all(first.x), "low": compact(across.low), "high": compact(across.high),
              "xname": chart.x_name, "percent": chart.shares, "unit": ""},
    )  # fmt: skip


def _beyond(chart: Chart, up: Axis) -> str:
    count = sum(not up.low <= value <= up.high for curve in chart.curves for value in known(curve.faint or curve.line))
    return f"{count} value{'s' * (count > 1)} beyond the axis" if count else ""


def _vertical(chart: Chart) -> Axis:
    """Return an axis that holds the lines and nearly all of what is behind them; from 0 where that is not far."""
    lines = [value for curve in chart.curves for value in known(curve.line)]
    low, high = usual_range(lines)
    if chart.bounds:
        low, high = min(low, chart.bounds[0]), max(high, chart.bounds[1])
    else:
        columns = [column for curve in chart.curves for column in (curve.faint, *(curve.band or ())) if column]
        behind = [value for column in columns for value in known(column)]
        few, many = usual_range(behind) if behind else (low, high)
        low, high = min(low, few), max(high, many)
    if 0 < low <= 0.5 * high or low < 0 <= min(lines):
        low = 0.0
    elif low <= 2 * high < 0:
        high = 0.0
    return axis(low, high, 5 if chart.large else 4)


def _paths(curve: Curve, across: Axis, up: Axis, own: bool) -> list[dict[str, str]]:
    """Return the paths of a curve, those behind it first; ``own``: its points are not at the x of the chart."""
    behind, ranges = [], ""
    if curve.band:
        behind.append({"kind": f"band c{curve.colour}", "d": band_path(curve.x, *curve.band, across, up)})
        if curve.band_label:
            pairs = zip(*curve.band, strict=True)
            ranges = " ".join("-" if low is None or high is None else f"{compact(low)}:{compact(high)}"
                              for low, high in pairs)  # fmt: skip
    if curve.faint:
        behind.append({"kind": f"faint c{curve.colour}", "d": line_path(curve.x, curve.faint, across, up)})
    kind = "dots" if curve.dots else "line dashed" if curve.dashed else "line"
    path = (dots_path if curve.dots else line_path)(curve.x, curve.line, across, up)
    numbers = {"x": compact_all(curve.x) if own else "", "y": compact_all(curve.line), "range": ranges}
    return [*behind, {"kind": f"{kind} c{curve.colour}", "d": path, "label": curve.label, **numbers}]


def _grid(up: Axis) -> str:
    """Return a line at each mark of the vertical axis."""
    return "".join(f"M0 {round(HEIGHT * (1 - up.share(tick)))}h{WIDTH}" for tick in up.ticks)


def _up(up: Axis, text: Callable[[float], str] | None = None) -> list[tuple[str, str]]:
    """Return the labels left of the drawing: share of the height from the top in per cent, and text."""
    labels = [text(tick) for tick in up.ticks] if text else up.labels()
    return [(f"{100 * (1 - up.share(tick)):.2f}", label) for tick, label in zip(up.ticks, labels, strict=True)]


def _across(across: Axis, name: str) -> list[tuple[str, str, str]]:
    """Return the labels under the drawing: share of the width in per cent, text and its anchor."""
    labels = []
    for tick in across.ticks:
        share = across.share(tick)
        anchor = "start" if share < 0.04 else "end" if share > 0.96 else "middle"
        labels.append((f"{100 * share:.2f}", f"{tick:,.0f}" if name == "step" else short(tick), anchor))
    return labels


@dataclass(frozen=True)
class Layer:
    """One area of a stack: its name and (N,) its thickness."""

    label: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True)
class Rows:
    """The bins of a histogram, the lowest first."""

    names: Sequence[str]
    edged: bool  # a bin is a range and its name the lower end; else it is a single value

    def marks(self) -> list[tuple[float, str]]:
        """Return at most 8 names and where they stand, from 0 to 1."""
        stride, middle = -(-len(self.names) // 8), 0.0 if self.edged else 0.5
        return [((row + middle) / len(self.names), self.names[row]) for row in range(0, len(self.names), stride)]


def stack(title: str, note: str, xs: Sequence[float], layers: Sequence[Layer]) -> Markup:
    """Return areas one on the other, in seconds, the first at the bottom."""
    tops: list[list[float]] = [[0.0] * len(xs)]
    for layer in layers:
        tops.append([below + value for below, value in zip(tops[-1], layer.values, strict=True)])
    ordered = sorted(tops[-1])
    # A rare slow step (a checkpoint) may stand out of the frame: it would flatten all others.
    up, across = axis(0.0, max(ordered[-1 - len(ordered) // 50], 1e-9)), step_axis(xs)
    paths = [
        {"kind": f"layer c{layer.colour}", "d": band_path(xs, [*low], [*high], across, up), "label": layer.label,
         "x": "", "y": compact_all(layer.values), "range": ""}
        for layer, low, high in zip(layers, tops, tops[1:], strict=False)
    ]  # fmt: skip
    return fragment(
        _TEMPLATE, "lines",
        title=title, note=note, paths=paths, grid=_grid(up), up=_up(up), across=_across(across, "step"),
        legend=[(layer.colour, layer.label, "box") for layer in layers],
        spoken=f"{title}: {', '.join(layer.label for layer in layers)}",
        data={"x": compact_all(xs), "low": compact(across.low), "high": compact(across.high), "xname": "step",
              "percent": False, "unit": "s"},
    )  # fmt: skip


def heat_map(title: str, note: str, xs: Sequence[float], rows: Rows, shares: list[list[float]]) -> Markup:
    """Return cells as dark as their share: ``shares`` (N, R) add up to 1 in each column; ``xs`` (N,) are its steps."""
    wide, high = WIDTH / len(xs), HEIGHT / len(rows.names)
    most = max(max(line) for line in shares) or 1.0
    cells = [
        (round(column * wide), round(HEIGHT - (row + 1) * high), round((column + 1) * wide) - round(column * wide),
         round(HEIGHT - row * high) - round(HEIGHT - (row + 1) * high), f"{(share / most) ** 0.7:.2f}")
        for column, line in enumerate(shares)
        for row, share in enumerate(line)
        if share > 0
    ]  # fmt: skip
    up = [(f"{100 * (1 - place):.2f}", name) for place, name in rows.marks()]
    return fragment(_TEMPLATE, "heat_map", title=title, note=note, up=up, across=_across(step_axis(xs), "step"),
                    cells=cells)  # fmt: skip


def bar_pairs(title: str, note: str, rows: Rows, names: tuple[str, str], pairs: list[tuple[float, float]]) -> Markup:
    """Return two bars side by side for each row: shares of two groups."""
    up = axis(0.0, max(max(pair) for pair in pairs) or 1.0)
    wide = WIDTH / len(rows.names)
    bars = [
        (colour, round((row + 0.14 + 0.36 * side) * wide), round(0.34 * wide),
         round(HEIGHT * (1 - up.share(pair[side]))), round(HEIGHT * up.share(pair[side])))
        for row, pair in enumerate(pairs)
        for side, colour in ((0, 8), (1, 1))
    ]  # fmt: skip
    across = [(f"{100 * place:.2f}", name, "middle") for place, name in rows.marks()]
    legend = [(8, names[0], "box"), (1, names[1], "box")]
    return fragment(_TEMPLATE, "bar_pairs", title=title, note=note, up=_up(up, percent), across=across, bars=bars,
                    grid=_grid(up), legend=legend)  # fmt: skip
