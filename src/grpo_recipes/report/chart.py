"""What a chart shows, for ``charts.html.j2``: axes, thinned curves and their paths.

A drawing has ``WIDTH`` by ``HEIGHT`` units and stretches to any width; its letters and lines keep their size. The
charts are drawn here rather than by a library's script: they can be read without a script, and no file is vendored.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from grpo_recipes.report.page import compact, half_interval, minus, scale_of, scientific, short
from grpo_recipes.report.read import Column, Scored, Table
from grpo_recipes.runs.health import known, mean

WIDTH, HEIGHT = 2000, 1000
MOST_POINTS = 240
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_HISTOGRAM_COLUMNS = 60
_FEW_VALUES = 8  # distinct rewards up to which each has a row of its own
Marks = list[tuple[float, str]]  # labels beside a drawing, and their places from 0 to 1


@dataclass(frozen=True)
class Axis:
    """A range and the round numbers marked on it."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return the place of a value between low (0) and high (1); values beyond an end are put there."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)

    def marks(self, text: Callable[[float], str] | None = None) -> Marks:
        """Return place and label of each tick; the labels have the same digits unless ``text`` writes them."""
        texts = [text(tick) for tick in self.ticks] if text else self._labels()
        return [(self.share(tick), label) for tick, label in zip(self.ticks, texts, strict=True)]

    def _labels(self) -> list[str]:
        step = self.ticks[1] - self.ticks[0] if len(self.ticks) > 1 else 1.0
        largest = max(abs(tick) for tick in self.ticks)
        if largest and (largest < 1e-3 or largest >= 1e9):
            return [scientific(tick) for tick in self.ticks]
        scale, suffix = scale_of(largest) if step >= 10 else (1.0, "")
        digits = max(0, -int(Decimal(f"{step / scale:.6g}").as_tuple().exponent))
        return [minus(f"{tick / scale:,.{digits}f}{suffix if tick else ''}") for tick in self.ticks]


def axis(low: float, high: float, wanted: int = 4, *, whole: bool = False) -> Axis:
    """Return a range that holds ``low`` and ``high``, in about ``wanted`` steps; ``whole`` marks integers alone."""
    if math.isclose(low, high):  # a mean of equal values may differ from them by a rounding error
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
    return [slice(index * count // parts, (index + 1) * count // parts) for index in range(parts)]


def smooth(values: Column, parts: Sequence[slice], window: int = 1) -> Column:
    """Return for each part the mean of its values and of those within ``window`` rows around its middle."""
    line: Column = []
    for part in parts:
        middle = (part.start + part.stop - 1) // 2
        span = slice(min(part.start, max(0, middle - window // 2)), max(part.stop, middle + window // 2 + 1))
        line.append(mean(known(values[span])) if part.start < len(values) else None)
    return line


def usual_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range from the 1st to the 99th percentile, or of all values where that is not much more."""
    ordered = sorted(values)
    rare = max(1, len(ordered) // 100) if len(ordered) >= 20 else 0
    low, high = ordered[rare], ordered[-1 - rare]
    margin = 1.5 * (high - low)
    return max(ordered[0], low - margin), min(ordered[-1], high + margin)


@dataclass(frozen=True)
class Curve:
    """One line of a chart of N points."""

    label: str
    x: Sequence[float]  # rising
    line: Column  # None where it is broken
    colour: int = 1  # 1 to 8
    kind: str = "line"  # or "line dashed", "dots", and "layer": the area of the band, whose thickness is ``line``
    faint: Column | None = None  # the values that the line is a mean of, drawn behind it
    band: tuple[Column, Column] | None = None  # lower and upper edge of the area around it
    band_label: str = ""  # what the area shows; the read-out has its range where this is given

    @property
    def ranges(self) -> str:
        """The edges of the band as page.js reads them."""
        pairs = zip(*self.band, strict=True) if self.band and self.band_label else ()
        return " ".join("-" if None in pair else compact(pair).replace(" ", ":") for pair in pairs)


def curve_of(
    tables: Sequence[Table], name: str, label: str, colour: int = 1, kind: str = "line", *, window: int | None = None,
    behind: bool = True,
) -> Curve:  # fmt: skip
    """Return a metric as a line through its noise.

    With ``behind``, every value of a single run is faintly behind the line, or the range of many values. The line of
    several runs is the mean of theirs, and the band its 95 % interval.
    """
    longest = max((table.steps for table in tables), key=len)
    parts, window = buckets(len(longest)), window or window_of(len(longest))
    xs = [longest[part.stop - 1 if part.start else 0] for part in parts]  # the first point is where the axis begins
    lines = [smooth(table.column(name), parts, window) for table in tables]
    if len(tables) > 1:
        columns = [known(column) for column in zip(*lines, strict=True)]
        line = [mean(column) for column in columns]
        band = around(line, [half_interval(column) for column in columns])
        return Curve(label, xs, line, colour, kind, band=band, band_label="95 %")
    values, line = tables[0].column(name), lines[0]
    if not behind:
        return Curve(label, xs, line, colour, kind)
    if len(parts) == len(values):
        return Curve(label, xs, line, colour, kind, faint=values if line != values else None)
    low, high = ([of(known(values[part]), default=None) for part in parts] for of in (min, max))
    return Curve(label, xs, line, colour, kind, band=(low, high))


def around(middles: Column, halves: Column) -> tuple[Column, Column]:
    """Return the lower and upper edge of a band; None where middle or half is."""
    pairs = list(zip(middles, halves, strict=True))
    low, high = ([None if a is None or b is None else a + sign * b for a, b in pairs] for sign in (-1, 1))
    return low, high


@dataclass(frozen=True)
class Chart:
    """Curves in one frame, of which at least one has a value."""

    title: str
    curves: Sequence[Curve]
    note: str = ""
    bounds: tuple[float, float] | None = None  # the least that the vertical axis must hold instead of what is behind
    shares: bool = False  # values are shares, marked in per cent
    x_name: str = "step"
    unit: str = ""  # of the values
    large: bool = False  # twice the height and the whole width

    @functools.cached_property
    def across(self) -> Axis:
        """The horizontal axis."""
        return step_axis([*([] if self.x_name == "step" else [0.0]), *[x for curve in self.curves for x in curve.x]])

    @functools.cached_property
    def up(self) -> Axis:
        """The vertical axis: it holds the lines and nearly all of what is behind them, from 0 where that is not far."""
        if self.curves[-1].kind == "layer" and self.curves[-1].band:
            tops = sorted(known(self.curves[-1].band[1]))
            # A rare slow step (a checkpoint) may exceed the frame: it would flatten all others.
            return axis(0.0, max(tops[-1 - len(tops) // 50], 1e-9))
        lines = [value for curve in self.curves for value in known(curve.line)]
        low, high = usual_range(lines)
        if self.bounds:
            low, high = min(low, self.bounds[0]), max(high, self.bounds[1])
        else:
            columns = [column for curve in self.curves for column in (curve.faint, *(curve.band or ())) if column]
            behind = [value for column in columns for value in known(column)]
            few, many = usual_range(behind) if behind else (low, high)
            low, high = min(low, few), max(high, many)
        if 0 < low <= 0.5 * high or low < 0 <= min(lines):
            low = 0.0
        elif low <= 2 * high < 0:
            high = 0.0
        return axis(low, high, 5 if self.large else 4)

    @property
    def beyond(self) -> int:
        """How many values of the lines are outside the frame."""
        columns = [curve.faint or curve.line for curve in self.curves if curve.kind != "layer"]
        return sum(not self.up.low <= value <= self.up.high for column in columns for value in known(column))

    def line_path(self, xs: Sequence[float], values: Column, kind: str = "line") -> str:
        """Return a line through the points, broken where a value is missing; a lone point or each of ``dots`` is a dot.

        A dot is a line of no length, which round line ends make visible.
        """
        pieces = _unbroken(list(zip(xs, values, strict=True)))
        if kind == "dots":
            pieces = [[point] for piece in pieces for point in piece]
        lines = ["L".join(self._point(x, y) for x, y in piece) for piece in pieces]
        return "".join(f"M{line}{'h0' if 'L' not in line else ''}" for line in lines)

    def band_path(self, xs: Sequence[float], low: Column, high: Column) -> str:
        """Return the area between two lines, in as many parts as missing values make."""
        closed = []
        for piece in _unbroken(list(zip(xs, low, high, strict=True))):
            there = [self._point(x, top) for x, _, top in piece]
            back = [self._point(x, bottom) for x, bottom, _ in reversed(piece)]
            closed.append(f"M{'L'.join(there + back)}z")
        return "".join(closed)

    def _point(self, x: float, y: float) -> str:
        return f"{round(WIDTH * self.across.share(x))} {round(HEIGHT * (1 - self.up.share(y)))}"


def _unbroken(points: Sequence[tuple[float | None, ...]]) -> list[list[tuple[float, ...]]]:
    """Return the stretches of points without a missing value."""
    stretches = itertools.groupby(points, key=lambda point: None not in point)
    return [list(points) for whole, points in stretches if whole]  # type: ignore[arg-type]


def stack(title: str, xs: Sequence[float], layers: Sequence[tuple[str, int, Sequence[float]]]) -> Chart:
    """Return areas one on the other, in seconds, the first at the bottom: label, colour and thickness of each."""
    curves: list[Curve] = []
    below = [0.0] * len(xs)
    for label, colour, values in layers:
        above = [low + value for low, value in zip(below, values, strict=True)]
        curves.append(Curve(label, xs, [*values], colour, "layer", band=([*below], [*above])))
        below = above
    return Chart(title, curves, unit="s")


@dataclass(frozen=True)
class Histogram:
    """The rewards of single completions, over the steps and at both ends of a run."""

    names: Sequence[str]  # (R,) of the bins, the lowest first
    edged: bool  # a bin is a range and its name the lower end; else it is a single value
    across: Axis  # of N steps
    up: Axis  # of the bars
    shares: Sequence[Sequence[float]]  # (N, R) shares of each step's completions, which add up to 1
    ends: Sequence[tuple[str, Sequence[float]]]  # name and shares of the first steps, and of the last

    def marks(self) -> Marks:
        """Return at most 8 of the names."""
        stride, middle = -(-len(self.names) // 8), 0.0 if self.edged else 0.5
        return [((row + middle) / len(self.names), self.names[row]) for row in range(0, len(self.names), stride)]


def histogram(scored: Sequence[Scored]) -> Histogram | None:
    """Return how rewards are spread, or None for fewer than three steps with rewards."""
    scored = [row for row in scored if row.rewards]
    parts = buckets(len(scored), _HISTOGRAM_COLUMNS)
    if len(parts) <= 2:
        return None
    counts = Counter(reward for row in scored for reward in row.rewards)
    edged = len(counts) > _FEW_VALUES
    scale = axis(min(counts), max(counts), 16)
    bins = list(scale.ticks[:-1]) if edged else sorted(counts)

    def place(reward: float) -> int:
        # The ends of ranges are sums of steps, so a reward of 0.3 is not compared with them.
        return min(len(bins) - 1, int(scale.share(reward) * len(bins) + 1e-9)) if edged else bins.index(reward)

    def shares(rows: Sequence[Scored]) -> list[float]:
        places = [place(reward) for row in rows for reward in row.rewards]
        found = Counter(places)
        return [found[index] / len(places) for index in range(len(bins))]

    tenth, ends = max(1, len(scored) // 10), []
    for rows in (scored[:tenth], scored[-tenth:]):
        first, last = rows[0].step, rows[-1].step
        ends.append((f"step {first}" if first == last else f"steps {first} to {last}", shares(rows)))
    across = step_axis([scored[part.stop - 1 if part.start else 0].step for part in parts])
    up = axis(0.0, max(max(heights) for _, heights in ends))
    return Histogram([*map(short, bins)], edged, across, up, [shares(scored[part]) for part in parts], ends)
