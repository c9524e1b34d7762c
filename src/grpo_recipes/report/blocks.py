"""Stacked areas, heat maps and bars, in the frame of the line charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_recipes.report.chart import across_labels, compact, frame, grid, legend, side_labels
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.paths import HEIGHT, WIDTH, band_path
from grpo_recipes.report.units import axis, percent, short, step_axis


@dataclass(frozen=True)
class Layer:
    """One area of a stack: its name and (N,) its thickness."""

    label: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True)
class Rows:
    """The bins of a histogram.

    Attributes:
        names: one a bin, the lowest first.
        edged: a bin is a range and its name the lower end; else it is a single value.
    """

    names: Sequence[str]
    edged: bool

    def marks(self) -> list[tuple[float, str]]:
        """At most 8 names and where they stand, from 0 to 1."""
        stride, middle = -(-len(self.names) // 8), 0.0 if self.edged else 0.5
        return [((row + middle) / len(self.names), self.names[row]) for row in range(0, len(self.names), stride)]


def stack(title: str, note: str, xs: Sequence[float], layers: Sequence[Layer]) -> Html:
    """Areas one on the other, the first at the bottom."""
    tops: list[list[float]] = [[0.0] * len(xs)]
    for layer in layers:
        tops.append([below + value for below, value in zip(tops[-1], layer.values, strict=True)])
    ordered = sorted(tops[-1])
    # A rare slow step (a checkpoint) may stand out of the frame: it would flatten all others.
    up = axis(0.0, max(ordered[-1 - len(ordered) // 50], 1e-9))
    across = step_axis(xs)
    areas = [
        element(
            "path", class_=f"layer c{layer.colour}", d=band_path(xs, [*low], [*high], across, up),
            data_label=layer.label, data_y=" ".join(compact(value) for value in layer.values),
        )
        for layer, low, high in zip(layers, tops, tops[1:], strict=False)
    ]  # fmt: skip
    area = _area(f"{title}: {', '.join(layer.label for layer in layers)}", grid(up), *areas,
                 element("path", class_="cursor"))  # fmt: skip
    labels = side_labels([(1 - up.share(tick), text) for tick, text in zip(up.ticks, up.labels(), strict=True)])
    return element(
        "figure",
        _caption(title, note, [(layer.colour, layer.label, "box") for layer in layers]),
        frame(area, labels, across_labels(across, "step")),
        class_="chart", tabindex="0", data_x=" ".join(compact(x) for x in xs), data_low=compact(across.low),
        data_high=compact(across.high), data_xname="step", data_unit="s",
    )  # fmt: skip


def heat_map(title: str, note: str, xs: Sequence[float], rows: Rows, shares: list[list[float]]) -> Html:
    """Cells as dark as their share.

    Args:
        title: what is drawn.
        note: a few words on it.
        xs: (N,) the step of each column.
        rows: the R bins.
        shares: (N, R), each column's sum 1.
    """
    wide, high = WIDTH / len(xs), HEIGHT / len(rows.names)
    most = max(max(line) for line in shares) or 1.0
    cells = [
        element(
            "rect", x=round(column * wide), y=round(HEIGHT - (row + 1) * high),
            width=round((column + 1) * wide) - round(column * wide),
            height=round(HEIGHT - row * high) - round(HEIGHT - (row + 1) * high),
            fill_opacity=f"{(share / most) ** 0.7:.2f}",
        )
        for column, line in enumerate(shares)
        for row, share in enumerate(line)
        if share > 0
    ]  # fmt: skip
    area = _area(
        title, element("rect", class_="ground", width=WIDTH, height=HEIGHT), element("g", *cells, class_="heat")
    )
    labels = side_labels([(1 - place, name) for place, name in rows.marks()])
    return element(
        "figure", _caption(title, note, []), frame(area, labels, across_labels(step_axis(xs), "step")), class_="chart"
    )


def bar_pairs(title: str, note: str, rows: Rows, names: tuple[str, str], pairs: list[tuple[float, float]]) -> Html:
    """Two bars side by side for each row: shares of two groups."""
    up = axis(0.0, max(max(pair) for pair in pairs) or 1.0)
    wide = WIDTH / len(rows.names)
    bars = [
        element(
            "rect", class_=f"bar c{colour}", x=round((row + 0.14 + 0.36 * side) * wide), width=round(0.34 * wide),
            y=round(HEIGHT * (1 - up.share(pair[side]))), height=round(HEIGHT * up.share(pair[side])),
        )
        for row, pair in enumerate(pairs)
        for side, colour in ((0, 8), (1, 1))
    ]  # fmt: skip
    texts = [
        element("text", name, x=f"{100 * place:.2f}%", y="12", text_anchor="middle") for place, name in rows.marks()
    ]
    labels = side_labels([(1 - up.share(tick), percent(tick)) for tick in up.ticks])
    return element(
        "figure",
        _caption(title, note, [(8, names[0], "box"), (1, names[1], "box")]),
        frame(_area(title, grid(up), *bars), labels, element("svg", *texts, class_="across", aria_hidden="true")),
        class_="chart",
    )


def meter(share: float, colour: int) -> Html:
    """A bar in a table cell: a share of the whole."""
    return element(
        "svg", element("rect", class_=f"layer c{colour}", width=f"{100 * share:.2f}%", height="100%"), class_="meter",
        aria_hidden="true",
    )  # fmt: skip


def interval(value: float, low: float, high: float) -> Html:
    """A value between 0 and 1 with its interval, in a table cell."""
    return element(
        "svg",
        element("line", class_="rail", x1="0", x2="100%", y1="50%", y2="50%"),
        element("line", class_="whisker", x1=f"{100 * low:.2f}%", x2=f"{100 * high:.2f}%", y1="50%", y2="50%"),
        element("circle", cx=f"{100 * value:.2f}%", cy="50%", r="4"),
        class_="interval", role="img", aria_label=f"{short(value)}, between {short(low)} and {short(high)}",
    )  # fmt: skip


def _area(spoken: str, *parts: Html) -> Html:
    return element("svg", *parts, class_="area", viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none",
                   role="img", aria_label=spoken)  # fmt: skip


def _caption(title: str, note: str, entries: Sequence[tuple[int, str, str]]) -> Html:
    return element(
        "figcaption",
        element("h3", title),
        element("p", note, class_="note") if note else None,
        legend(entries) if entries else None,
    )
