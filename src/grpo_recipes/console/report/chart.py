"""Compute charts for ``charts.html.j2``: axes, thinned curves and their SVG paths.

A drawing has ``WIDTH`` by ``HEIGHT`` units and stretches to any width; its letters and lines keep their size. Charts
are drawn here and not by a JavaScript library, so they are readable without scripts and no file is vendored.
"""

import bisect
import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_recipes.console.report.page import ENOUGH_SEEDS, clamp, compact, minus, short
from grpo_recipes.console.report.read import Column, Scored, Table
from grpo_recipes.runs.health import drop_missing, mean
from grpo_recipes.stats import half_interval

WIDTH, HEIGHT = 2000, 1000
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_HISTOGRAM_COLUMNS = 60
_FEW_VALUES = 8  # up to this number of distinct rewards, each has a separate row
Marks = list[tuple[float, str]]  # (position from 0 to 1, label) next to a drawing


@dataclass(frozen=True)
class Axis:
    """A range and the round numbers marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return the position of a value between low (0) and high (1), clamped to this range."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def marks(self, text: Callable[[float], str] | None = None) -> Marks:
        """Return position (0 to 1) and label of each tick; ``text`` formats a tick, and labels are always distinct."""
        labels = [(text or _tick_text)(tick) for tick in self.ticks]
        if len(set(labels)) < len(labels):
            scale, unit = (100, " %") if labels[0].endswith("%") else (1, "")
            digits = 1 - math.floor(math.log10(scale * min(b - a for a, b in itertools.pairwise(self.ticks))))
            labels = [minus(f"{scale * tick:,.{max(0, digits)}f}{unit}") for tick in self.ticks]
        return [(self.share(tick), label) for tick, label in zip(self.ticks, labels, strict=True)]


def _tick_text(tick: float) -> str:
    """Return the label of a tick, without an exponent if it is of usual size."""
    return minus(f"{tick:,g}") if 1e-3 <= abs(tick) < 1e5 else short(tick)


def axis(low: float, high: float, count: int = 4, *, whole: bool = False) -> Axis:
    """Return an axis that contains ``low`` and ``high`` and has ticks at round numbers, about ``count`` intervals.

    With ``whole``, all ticks are integers.
    """
    if math.isclose(low, high):  # a mean of equal values may differ from them by a rounding error
        low, high = (min(low, 0.0), max(high, 0.0)) if low else (0.0, 1.0)
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in _STEPS if power * factor >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(first, last + 1))
    return Axis(min(low, ticks[0]), max(high, ticks[-1]), ticks)  # a tick may be 1e-16 short of the value


def step_axis(steps: Sequence[float], count: int = 5) -> Axis:
    """Return the axis of optimizer steps, from the first to the last step, with integer ticks."""
    low, high = min(steps), max(steps)
    if low == high:
        return Axis(low - 0.5, high + 0.5, (low,))
    marks = axis(low, high, count, whole=all(float(step).is_integer() for step in steps)).ticks
    inside = [mark for mark in marks if low <= mark <= high]
    gap = 0.6 * (marks[1] - marks[0])
    first = [low] if not inside or inside[0] - low > gap else []
    last = [high] if not inside or high - inside[-1] > gap else []
    return Axis(low, high, (*first, *inside, *last))


def window_of(count: int) -> int:
    """Return the number of rows of the moving mean for ``count`` rows: odd, about a fifteenth of them.

    Below 20 rows the result is 1, that is, no mean.
    """
    return 1 if count < 20 else max(3, count // 15 | 1)


def buckets(count: int, limit: int = 240) -> list[slice]:
    """Divide ``count`` rows into at most ``limit`` slices of nearly equal length."""
    parts = min(count, limit)
    return [slice(index * count // parts, (index + 1) * count // parts) for index in range(parts)]


def smooth(values: Column, parts: Sequence[slice], window: int = 1) -> Column:
    """Return a smoothed value for each slice in ``parts``; None if it has no values.

    A value is the mean over the rows of its slice and over the ``window`` rows around the middle of the slice.
    """
    line: Column = []
    for part in parts:
        middle = (part.start + part.stop - 1) // 2
        span = slice(min(part.start, max(0, middle - window // 2)), max(part.stop, middle + window // 2 + 1))
        line.append(mean(drop_missing(values[span])) if part.start < len(values) else None)
    return line


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and highest value without rare outliers.

    This is the range from the 1st to the 99th percentile with a margin, or the whole range if that is smaller.
    """
    ordered = sorted(values)
    rare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
    low, high = ordered[rare], ordered[-1 - rare]
    margin = 1.5 * (high - low)
    return max(ordered[0], low - margin), min(ordered[-1], high + margin)


@dataclass(frozen=True)
class Curve:
    """One line of a chart of N points."""

    label: str
    x: Sequence[float]  # increasing
    line: Column  # None at a gap
    colour: int = 1  # 1 to 8
    kind: str = "line"  # or "line dashed", "dots", or "layer": the area of the band, with ``line`` as its thickness
    faint: Sequence[Column] = ()  # values behind the line, which is their mean: single values, or one line per seed
    band: tuple[Column, Column] | None = None  # lower and upper edge of the area around the line
    band_label: str = ""  # meaning of the area; with a label, the read-out shows its range

    @property
    def ranges(self) -> str:
        """The edges of the band as text for page.js; "" if the band has no label."""
        pairs = zip(*self.band, strict=True) if self.band and self.band_label else ()
        return " ".join("-" if None in pair else compact(pair).replace(" ", ":") for pair in pairs)


def curve_of(
    tables: Sequence[Table], name: str, label: str, colour: int = 1, kind: str = "line", *, window: int | None = None,
    behind: bool = True, limits: tuple[float | None, float | None] = (None, None),
) -> Curve:  # fmt: skip
    """Return the metric ``name`` of one or several runs as a smoothed line; ``tables`` has a table per run.

    With ``behind``, the values of a single run (or ranges of many values) are drawn faintly behind the line. Several
    runs have the mean of their lines, and behind it the 95 % interval cut at ``limits``, or each run if they are few.
    ``window`` is the number of rows of the moving mean, by default ``window_of``.
    """
    longest = max((table.steps for table in tables), key=len)
    parts, window = buckets(len(longest)), window or window_of(len(longest))
    xs = [longest[part.stop - 1 if part.start else 0] for part in parts]  # the first point is at the start of the axis
    lines = [smooth(table.column(name), parts, window) for table in tables]
    if len(tables) > 1:
        columns = [drop_missing(column) for column in zip(*lines, strict=True)]
        line = [mean(column) for column in columns]
        if len(tables) < ENOUGH_SEEDS:
            return Curve(label, xs, line, colour, kind, faint=lines)
        band = around(line, [half_interval(column) for column in columns], limits)
        return Curve(label, xs, line, colour, kind, band=band, band_label="95 %")
    values, line = tables[0].column(name), lines[0]
    if not behind:
        return Curve(label, xs, line, colour, kind)
    if len(parts) == len(values):
        return Curve(label, xs, line, colour, kind, faint=[values] if line != values else ())
    low, high = ([end(drop_missing(values[part]), default=None) for part in parts] for end in (min, max))
    return Curve(label, xs, line, colour, kind, band=(low, high))


def around(
    middles: Column, halves: Column, limits: tuple[float | None, float | None] = (None, None)
) -> tuple[Column, Column]:
    """Return the lower and the upper edge of a band of ``middles`` plus and minus ``halves``, clamped to ``limits``.

    Points are None if the middle or the half is None.
    """
    pairs = list(zip(middles, halves, strict=True))
    low, high = (
        [None if a is None or b is None else clamp(a + sign * b, limits) for a, b in pairs] for sign in (-1, 1)
    )
    return low, high


def stretches(rows: Sequence[Sequence[float | None]]) -> list[list[tuple[float, ...]]]:
    """Return the rows without None, split at gaps that are longer than the usual distance between them.

    For example, if a generation is used for two steps, its metrics are on every second row, which is not a gap.
    """
    complete = [index for index, row in enumerate(rows) if None not in row]
    distances = [following - index for index, following in itertools.pairwise(complete)]
    usual = statistics.median(distances) if distances else 1
    parts: list[list[tuple[float, ...]]] = []
    for index, distance in zip(complete, [math.inf, *distances], strict=True):
        if distance > usual:
            parts.append([])
        parts[-1].append(tuple(value for value in rows[index] if value is not None))
    return parts


@dataclass(frozen=True)
class Chart:
    """Curves in one frame; at least one curve has a value."""

    title: str
    curves: Sequence[Curve]
    note: str = ""
    bounds: tuple[float, float] | None = None  # range of the vertical axis, if it contains the lines
    shares: bool = False  # values are shares, labeled in percent
    x_name: str = "step"
    unit: str = ""  # unit of the values
    y_name: str = ""  # title of the vertical axis, if the chart's title is not enough
    large: bool = False  # twice the height and the whole width

    @functools.cached_property
    def across(self) -> Axis:
        """The horizontal axis: all points of the curves; for minutes, from 0."""
        return step_axis([*([] if self.x_name == "step" else [0.0]), *[x for curve in self.curves for x in curve.x]])

    @functools.cached_property
    def up(self) -> Axis:
        """The vertical axis: contains the lines and nearly all faint values, and starts at 0 if 0 is near."""
        lines = [value for curve in self.curves for value in drop_missing(curve.line)]
        low, high = usual_range(lines)
        if self.bounds and self.bounds[0] <= low <= high <= self.bounds[1]:
            low, high = self.bounds
        else:
            columns = [column for curve in self.curves for column in (*curve.faint, *(curve.band or ()))]
            behind = [value for column in columns for value in drop_missing(column)]
            few, many = usual_range(behind) if behind else (low, high)
            low, high = min(low, few), max(high, many)
        if 0 < low <= 0.5 * high or low < 0 <= min(lines):
            low = 0.0
        elif low <= 2 * high < 0:
            high = 0.0
        if self.shares:
            low, high = max(low, 0.0), min(high, 1.0)
        return axis(low, high, 5 if self.large else 4)

    @property
    def outside(self) -> int:
        """The number of values that are outside the frame and not drawn."""
        columns = [column for curve in self.curves if curve.kind != "layer" for column in curve.faint or [curve.line]]
        return sum(not self.up.low <= value <= self.up.high for column in columns for value in drop_missing(column))

    def path(self, kind: str, xs: Sequence[float], *edges: Column) -> str:
        """Return the ``d`` attribute of an SVG path: a line along one edge, or the area between two edges.

        Gaps that are longer than the usual distance of values interrupt it. ``kind`` "dots" draws each point
        separately, and other kinds connect the points of an edge. A separate point, or the only point between two gaps,
        is a line of length 0, which round line ends make visible.
        """
        parts = []
        for stretch in stretches(list(zip(xs, *edges, strict=True))):
            xs_of_stretch, *values = zip(*stretch, strict=True)
            lines = [[self._point(x, y) for x, y in zip(xs_of_stretch, column, strict=True)] for column in values]
            if len(lines) == 2:
                parts.append(f"M{'L'.join(lines[1] + lines[0][::-1])}z")
            elif kind == "dots" or len(stretch) == 1:
                parts += [f"M{point}h0" for point in lines[0]]
            else:
                parts.append(f"M{'L'.join(lines[0])}")
        return "".join(parts)

    def lone_points(self, curve: Curve) -> str:
        """Return the SVG path of points without a neighbor, to be drawn as dots, since the line itself is too thin."""
        if curve.kind in ("dots", "layer"):
            return ""
        parts = stretches(list(zip(curve.x, curve.line, strict=True)))
        return "".join(f"M{self._point(*part[0])}h0" for part in parts if len(part) == 1)

    def _point(self, x: float, y: float) -> str:
        """Return a point in the units of the drawing, as text for an SVG path."""
        return f"{round(WIDTH * self.across.share(x))} {round(HEIGHT * (1 - self.up.share(y)))}"


@dataclass(frozen=True)
class Histogram:
    """The distribution of completions' rewards over the steps, and in the first and last steps."""

    names: Sequence[str]  # (R,) names of the bins, the lowest first
    edged: bool  # True: a bin is a range, named by its lower end; False: a bin is a single value
    across: Axis  # axis of the N steps
    up: Axis  # axis of the bars
    shares: Sequence[Sequence[float]]  # (N, R) share of each step's completions per bin; rows sum to 1
    ends: Sequence[tuple[str, Sequence[float]]]  # name and shares of the first steps, and of the last steps

    def marks(self) -> Marks:
        """Return at most 8 of the names with their positions between 0 and 1, for the axis of rewards."""
        stride, middle = -(-len(self.names) // 8), 0.0 if self.edged else 0.5
        return [((row + middle) / len(self.names), self.names[row]) for row in range(0, len(self.names), stride)]


def histogram(scored: Sequence[Scored]) -> Histogram | None:
    """Return the distribution of rewards, or None for fewer than three steps with rewards."""
    scored = [row for row in scored if row.rewards]
    parts = buckets(len(scored), _HISTOGRAM_COLUMNS)
    if len(parts) <= 2:
        return None
    values = sorted({reward for row in scored for reward in row.rewards})
    edged = len(values) > _FEW_VALUES
    bins = list(axis(values[0], values[-1], 16).ticks[:-1]) if edged else values

    def shares(rows: Sequence[Scored]) -> list[float]:
        """Return the share of the rewards of these rows in each bin."""
        # The ends of ranges are sums with rounding errors: a range from 0.30000000000000004 must contain 0.3.
        counts = Counter(bisect.bisect(bins, reward + 1e-9) - 1 for row in rows for reward in row.rewards)
        return [counts[index] / counts.total() for index in range(len(bins))]

    tenth = max(1, len(scored) // 10)
    ends = [(f"steps {rows[0].step} to {rows[-1].step}" if len(rows) > 1 else f"step {rows[0].step}", shares(rows))
            for rows in (scored[:tenth], scored[-tenth:])]  # fmt: skip
    across = step_axis([scored[part.stop - 1 if part.start else 0].step for part in parts])
    up = axis(0.0, max(max(heights) for _, heights in ends))
    return Histogram([*map(short, bins)], edged, across, up, [shares(scored[part]) for part in parts], ends)
