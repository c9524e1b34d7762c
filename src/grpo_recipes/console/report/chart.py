"""Compute charts for ``charts.html.j2``: axes, thinned curves and their SVG paths.

A drawing has ``WIDTH`` by ``HEIGHT`` units and stretches to any width; its letters and lines keep their size. Charts
are drawn here, so they are readable without scripts. ``assets/charts.js`` draws the same SVG again after a zoom, with
another smoothing or on another axis. A curve has at most 240 points, so no chart library is needed.
"""

import bisect
import functools
import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from grpo_recipes.console.report.page import ENOUGH_SEEDS, clamp, format_number, format_points, use_minus_signs
from grpo_recipes.console.report.read import Column, Scored, Table
from grpo_recipes.runs.health import drop_missing, mean
from grpo_recipes.stats import t_interval_half_width

WIDTH, HEIGHT = 2000, 1000
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_HISTOGRAM_COLUMNS = 60
_FEW_VALUES = 8  # up to this number of distinct rewards, each has a separate row
Marks = list[tuple[float, str]]  # (position from 0 to 1, label) next to a drawing


@dataclass(frozen=True)
class Axis:
    """An axis of a chart: its lowest and highest value, and the numbers marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def locate(self, value: float) -> float:
        """Return the position of a value on the axis as a fraction: 0.0 at ``low``, 1.0 at ``high``, clamped."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def marks(self, text: Callable[[float], str] | None = None) -> Marks:
        """Return position (0 to 1) and label of each tick; ``text`` formats a tick, and labels are always distinct."""
        labels = [(text or _format_tick)(tick) for tick in self.ticks]
        if len(set(labels)) < len(labels):
            scale, unit = (100, " %") if labels[0].endswith("%") else (1, "")
            gap = 1.001 * min(b - a for a, b in itertools.pairwise(self.ticks))  # a tick may be 1e-16 short
            digits = 1 - math.floor(math.log10(scale * gap))
            numbers = [f"{scale * tick:,.{max(0, digits)}f}" for tick in self.ticks]
            if digits > 0 and all(number.endswith("0") for number in numbers):
                numbers = [number.removesuffix("0").removesuffix(".") for number in numbers]
            labels = [use_minus_signs(f"{number}{unit}") for number in numbers]
        return [(self.locate(tick), label) for tick, label in zip(self.ticks, labels, strict=True)]


def _format_tick(tick: float) -> str:
    """Return the label of a tick: 1,234 or 0.05; with an exponent or suffix below 0.001 and from 100,000."""
    return use_minus_signs(f"{tick:,g}") if 1e-3 <= abs(tick) < 1e5 else format_number(tick)


def make_axis(low: float, high: float, count: int = 4, *, whole: bool = False) -> Axis:
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


def make_step_axis(steps: Sequence[float], count: int = 5) -> Axis:
    """Return the axis of optimizer steps, from the first to the last step, with integer ticks."""
    low, high = min(steps), max(steps)
    if low == high:
        return Axis(low - 0.5, high + 0.5, (low,))
    marks = make_axis(low, high, count, whole=all(float(step).is_integer() for step in steps)).ticks
    inside = [mark for mark in marks if low <= mark <= high]
    gap = 0.6 * (marks[1] - marks[0])
    first = [low] if not inside or inside[0] - low > gap else []
    last = [high] if not inside or high - inside[-1] > gap else []
    return Axis(low, high, (*first, *inside, *last))


def choose_window(count: int) -> int:
    """Return the number of rows over which a curve of ``count`` rows is averaged: odd, about a fifteenth of them.

    Below 20 rows, return 1: no average.
    """
    return 1 if count < 20 else max(3, count // 15 | 1)


def split_rows(count: int, limit: int = 240) -> list[slice]:
    """Return at most ``limit`` slices of nearly equal length that together cover ``count`` rows."""
    parts = min(count, limit)
    return [slice(index * count // parts, (index + 1) * count // parts) for index in range(parts)]


def smooth_values(values: Column, parts: Sequence[slice], window: int = 1) -> Column:
    """Return a mean for each slice of ``values`` in ``parts``: the points of a smoothed curve.

    The mean covers the rows of the slice, and the ``window`` rows around its middle if these are more. It is None if
    none of these rows has a value.
    """
    line: Column = []
    for part in parts:
        middle = (part.start + part.stop - 1) // 2
        span = slice(min(part.start, max(0, middle - window // 2)), max(part.stop, middle + window // 2 + 1))
        line.append(mean(drop_missing(values[span])) if part.start < len(values) else None)
    return line


def find_usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest value to draw, without rare outliers.

    This is the range from the 1st to the 99th percentile, extended on both sides by 1.5 times its length, and cut at
    the lowest and the highest value. With fewer than 20 values, none is an outlier.
    """
    ordered = sorted(values)
    rare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
    low, high = ordered[rare], ordered[-1 - rare]
    margin = 1.5 * (high - low)
    return max(ordered[0], low - margin), min(ordered[-1], high + margin)


@dataclass(frozen=True)
class Curve:
    """A curve of a chart: N points, drawn as a line, as dots or as an area."""

    label: str
    x: Sequence[float]  # increasing
    line: Column  # None at a gap
    colour: int = 1  # 1 to 8
    kind: str = "line"  # or "line dashed", "dots", or "layer": the area of the band, with ``line`` as its thickness
    faint: Sequence[Column] = ()  # values behind the line, which is their mean: single values, or one line per seed
    band: tuple[Column, Column] | None = None  # lower and upper edge of the area around the line
    band_label: str = ""  # meaning of the area; with a label, the read-out shows its range
    raw_band: tuple[Column, Column] | None = None  # the band before smoothing, if it is smoothed like the line
    fixed_band: bool = False  # whether the page has the band for the first smoothing only
    raw: Column | None = None  # the values of the line before smoothing; None: the line is not smoothed
    seeds: Sequence[Column] = ()  # one line per seed before smoothing, if ``faint`` has one line per seed
    clock: int = 0  # index of the ``Clock`` of its runs on the page

    @property
    def values(self) -> Column:
        """The values before smoothing, which the script smooths with another window."""
        return self.line if self.raw is None else self.raw

    @property
    def ranges(self) -> str:
        """The lower and upper edge of the band at each point, as text for the script; "" without a band."""
        band = self.raw_band or self.band
        pairs = zip(*band, strict=True) if band else ()
        return " ".join("-" if None in pair else format_points(pair).replace(" ", ":") for pair in pairs)


@dataclass(frozen=True)
class Clock:
    """Minutes and tokens at each point of the curves of some runs, for the other horizontal axes of the page."""

    steps: Sequence[float]  # (N,)
    minutes: Column  # (N,) minutes in steps up to each point; [] if unknown
    tokens: Column  # (N,) tokens trained on up to each point; [] if unknown
    rows: int  # number of steps before thinning
    window: int  # number of steps over which curves are smoothed at first


def make_clock(tables: Sequence[Table], window: int) -> Clock:
    """Return the mean elapsed minutes and trained tokens of a group's runs at each point of the curves.

    Charts use them as horizontal axes instead of steps. ``tables`` has one table of metrics per run. ``window`` is the
    number of steps over which the page's curves are smoothed at first.
    """
    longest = max((table.steps for table in tables), key=len)
    ends = [part.stop - 1 if part.start else 0 for part in split_rows(len(longest))]
    minutes: list[Column] = [
        [total / 60 for total in itertools.accumulate(value or 0.0 for value in table.column("seconds/step"))]
        for table in tables
        if table.known("seconds/step")
    ]
    tokens = [table.column("num_tokens") for table in tables if table.known("num_tokens")]

    def average(lines: Sequence[Column]) -> Column:
        """Return the mean over the runs that have a value, at each point; [] without runs."""
        return [mean(drop_missing(line[end] for line in lines if end < len(line))) for end in ends] if lines else []

    steps, rows = [longest[end] for end in ends], len(longest)
    return Clock(steps, average(minutes), average(tokens), rows, window)


def make_curve(
    tables: Sequence[Table], name: str, label: str, colour: int = 1, kind: str = "line", *, window: int | None = None,
    behind: bool = True, limits: tuple[float | None, float | None] = (None, None), clock: int = 0,
) -> Curve:  # fmt: skip
    """Return a smoothed curve of the metric ``name``; ``tables`` has one table of metrics per run.

    For several runs, the curve is the mean of their smoothed lines. Behind it is the 95 % interval over the runs, cut
    at ``limits``, or each run's line if there are fewer than 5. For a single run and with ``behind``, the single values
    are behind the line, or the range of each slice if there are more than 240 rows. ``window`` is the number of
    averaged rows, by default chosen by ``choose_window``. ``Curve`` explains ``label``, ``colour``, ``kind`` and
    ``clock``.
    """
    longest = max((table.steps for table in tables), key=len)
    parts, window = split_rows(len(longest)), window or choose_window(len(longest))
    xs = [longest[part.stop - 1 if part.start else 0] for part in parts]  # the first point is at the start of the axis
    lines = [smooth_values(table.column(name), parts, window) for table in tables]
    raws = [smooth_values(table.column(name), parts) for table in tables] if window > 1 else lines
    columns = [drop_missing(column) for column in zip(*lines, strict=True)]
    line, raw = ([mean(drop_missing(column)) for column in zip(*rows, strict=True)] for rows in (lines, raws))
    curve = Curve(label, xs, line, colour, kind, raw=raw, clock=clock)
    if len(tables) > 1:
        if len(tables) < ENOUGH_SEEDS:
            return replace(curve, faint=lines, seeds=raws)
        band = make_band(line, [t_interval_half_width(column) for column in columns], limits)
        return replace(curve, band=band, band_label="95 %", fixed_band=True)
    values = tables[0].column(name)
    if not behind:
        return curve
    if len(parts) == len(values):
        return replace(curve, faint=[values] if line != values else ())
    low, high = ([end(drop_missing(values[part]), default=None) for part in parts] for end in (min, max))
    return replace(curve, band=(low, high))


def make_band(
    middles: Column, halves: Column, limits: tuple[float | None, float | None] = (None, None)
) -> tuple[Column, Column]:
    """Return the edges of a band: the columns ``middles - halves`` and ``middles + halves``, clamped to ``limits``.

    An entry is None if its middle or its half is None.
    """
    pairs = list(zip(middles, halves, strict=True))
    low, high = (
        [None if a is None or b is None else clamp(a + sign * b, limits) for a, b in pairs] for sign in (-1, 1)
    )
    return low, high


def split_at_gaps(rows: Sequence[Sequence[float | None]]) -> list[list[tuple[float, ...]]]:
    """Drop the rows that contain None, and split the other rows at gaps; return the parts.

    A gap is a distance between two kept rows that exceeds the median distance. For example, if a generation is used for
    two steps, its metrics are on every second row, which is not a gap.
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
    """A chart: curves that share two axes. At least one curve has a value."""

    title: str
    curves: Sequence[Curve]
    note: str = ""
    bounds: tuple[float, float] | None = None  # range of the vertical axis, if it contains the lines
    shares: bool = False  # values are shares, labeled in percent
    x_name: str = "step"
    unit: str = ""  # unit of the values
    y_name: str = ""  # title of the vertical axis, if the chart's title is not enough
    large: bool = False  # twice the height and the whole width
    smooth: bool = True  # whether the page's smoothing applies

    @functools.cached_property
    def across(self) -> Axis:
        """The horizontal axis: all points of the curves; for minutes, from 0."""
        return make_step_axis(
            [*([] if self.x_name == "step" else [0.0]), *[x for curve in self.curves for x in curve.x]]
        )

    @functools.cached_property
    def up(self) -> Axis:
        """The vertical axis: ``bounds`` if they contain the lines, else a range with nearly all values.

        The range includes faint lines and bands. It starts or ends at 0 if 0 is near. For ``shares``, it stays within
        0 to 1.
        """
        lines = [value for curve in self.curves for value in drop_missing(curve.line)]
        low, high = find_usual_range(lines)
        if self.bounds and self.bounds[0] <= low <= high <= self.bounds[1]:
            low, high = self.bounds
        else:
            columns = [column for curve in self.curves for column in (*curve.faint, *(curve.band or ()))]
            behind = [value for column in columns for value in drop_missing(column)]
            few, many = find_usual_range(behind) if behind else (low, high)
            low, high = min(low, few), max(high, many)
        if 0 < low <= 0.5 * high or low < 0 <= min(lines):
            low = 0.0
        elif low <= 2 * high < 0:
            high = 0.0
        if self.shares:
            low, high = max(low, 0.0), min(high, 1.0)
        return make_axis(low, high, 5 if self.large else 4)

    @property
    def outside(self) -> int:
        """The number of values that are outside the frame and not drawn."""
        columns = [column for curve in self.curves if curve.kind != "layer" for column in curve.faint or [curve.line]]
        return sum(not self.up.low <= value <= self.up.high for column in columns for value in drop_missing(column))

    def path(self, kind: str, xs: Sequence[float], *edges: Column) -> str:
        """Return the ``d`` attribute of an SVG path: a line along one column of ``edges``, or the area between two.

        Gaps that are longer than the usual distance of values interrupt it. ``kind`` "dots" draws each point
        separately, and other kinds connect the points of an edge. A separate point, or the only point between two gaps,
        is a line of length 0, which round line ends make visible.
        """
        parts = []
        for stretch in split_at_gaps(list(zip(xs, *edges, strict=True))):
            xs_of_stretch, *values = zip(*stretch, strict=True)
            lines = [[self._locate(x, y) for x, y in zip(xs_of_stretch, column, strict=True)] for column in values]
            if len(lines) == 2:
                parts.append(f"{_connect(lines[1] + lines[0][::-1])}z")
            elif kind == "dots" or len(stretch) == 1:
                parts += [f"M{x} {y}h0" for x, y in lines[0]]
            else:
                parts.append(_connect(lines[0]))
        return "".join(parts)

    def lone_points(self, curve: Curve) -> str:
        """Return the SVG path of a line's points between two gaps, which must be drawn as dots to be visible.

        Return "" for curves of kind "dots" and "layer".
        """
        if curve.kind in ("dots", "layer"):
            return ""
        parts = split_at_gaps(list(zip(curve.x, curve.line, strict=True)))
        points = (self._locate(*part[0]) for part in parts if len(part) == 1)
        return "".join(f"M{x} {y}h0" for x, y in points)

    def _locate(self, x: float, y: float) -> tuple[int, int]:
        """Return the coordinates of a point in units of the drawing (2000 wide, 1000 high, Y downwards)."""
        return round(WIDTH * self.across.locate(x)), round(HEIGHT * (1 - self.up.locate(y)))


def _connect(points: Sequence[tuple[int, int]]) -> str:
    """Return an SVG path along points; relative coordinates make it short."""
    moves = (f"{c - a} {d - b}" for (a, b), (c, d) in itertools.pairwise(points))
    return f"M{points[0][0]} {points[0][1]}l{' '.join(moves)}".replace(" -", "-")


@dataclass(frozen=True)
class Histogram:
    """The distribution of the rewards of single completions: at each of N steps, and in the first and last steps."""

    names: Sequence[str]  # (R,) names of the bins, the lowest first
    edged: bool  # True: a bin is a range, named by its lower end; False: a bin is a single value
    across: Axis  # axis of the N steps
    up: Axis  # axis of the bars
    shares: Sequence[Sequence[float]]  # (N, R) share of each step's completions per bin; rows sum to 1
    ends: Sequence[tuple[str, Sequence[float]]]  # name and shares of the first steps, and of the last steps

    @property
    def cells(self) -> dict[str, str]:
        """Opacity -> an SVG path of the cells with it, one unit wide and high. Cells with a larger share are darker."""
        most, paths = max(map(max, self.shares), default=0.0) or 1.0, defaultdict[str, str](str)
        for column, shares in enumerate(self.shares):
            for row, share in enumerate(reversed(shares)):
                if share:
                    paths[f"{(share / most) ** 0.7:.2f}"] += f"M{column} {row}h1v1h-1z"
        return paths

    def marks(self) -> Marks:
        """Return at most 8 labels of bins with their positions from 0 to 1, for the axis of rewards."""
        stride, middle = -(-len(self.names) // 8), 0.0 if self.edged else 0.5
        return [((row + middle) / len(self.names), self.names[row]) for row in range(0, len(self.names), stride)]


def make_histogram(scored: Sequence[Scored]) -> Histogram | None:
    """Return the distribution of rewards, or None for fewer than three steps with rewards.

    Up to 8 distinct rewards get a bin each. More rewards are put into about 16 bins of equal width. The first and the
    last tenth of the steps are also summarized.
    """
    scored = [row for row in scored if row.rewards]
    parts = split_rows(len(scored), _HISTOGRAM_COLUMNS)
    if len(parts) <= 2:
        return None
    values = sorted({reward for row in scored for reward in row.rewards})
    edged = len(values) > _FEW_VALUES
    bins = list(make_axis(values[0], values[-1], 16).ticks[:-1]) if edged else values

    def shares(rows: Sequence[Scored]) -> list[float]:
        """Return the share of the rewards of these rows in each bin."""
        # The ends of ranges are sums with rounding errors: a range from 0.30000000000000004 must contain 0.3.
        counts = Counter(bisect.bisect(bins, reward + 1e-9) - 1 for row in rows for reward in row.rewards)
        return [counts[index] / counts.total() for index in range(len(bins))]

    tenth = max(1, len(scored) // 10)
    ends = [(f"steps {rows[0].step} to {rows[-1].step}" if len(rows) > 1 else f"step {rows[0].step}", shares(rows))
            for rows in (scored[:tenth], scored[-tenth:])]  # fmt: skip
    across = make_step_axis([scored[part.stop - 1 if part.start else 0].step for part in parts])
    up = make_axis(0.0, max(max(heights) for _, heights in ends))
    return Histogram([*map(format_number, bins)], edged, across, up, [shares(scored[part]) for part in parts], ends)
