"""A figure of the documentation: panels of lines as one SVG without other files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape

from grpo_recipes.console.report.chart import Axis, make_axis
from grpo_recipes.console.report.page import format_number

# The letters, lines and colours of report.html.
STYLE = """
svg{--surface:#fff;--ink:#1b1b19;--muted:#62605a;--line:#e3e1dc;
--c1:#2a6fd0;--c2:#d9480f;--c3:#1a9e6d;--c4:#b8860b;--c5:#7a4fc4;--c6:#c93a7c;font:13px system-ui,sans-serif}
@media (prefers-color-scheme:dark){svg{--surface:#1d1d1b;--ink:#ecebe6;--muted:#a8a59c;--line:#363531;
--c1:#5e9df2;--c2:#f2854b;--c3:#3cc08f;--c4:#dcab33;--c5:#a98bea;--c6:#ee77a8}}
text{fill:var(--muted)}.title{fill:var(--ink);font-weight:600}.ground{fill:var(--surface)}
path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}.grid{stroke:var(--line);stroke-width:1}
.dash{stroke-dasharray:6 5}.dots{stroke-width:7}
.c1{stroke:var(--c1)}.c2{stroke:var(--c2)}.c3{stroke:var(--c3)}.c4{stroke:var(--c4)}.c5{stroke:var(--c5)}
.c6{stroke:var(--c6)}.c0{stroke:var(--muted)}
"""
WIDTH, HEIGHT, GAP, LEFT, TOP = 300, 230, 62, 44, 44
FOOT = 74
_LOW = 0.7  # lines below it have their own vertical axis


@dataclass(frozen=True)
class Line:
    """Points joined in order; ``colour`` 0 is grey, 1 to 6 are the page's."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int
    dashed: bool = False
    marked: bool = False


@dataclass(frozen=True)
class Panel:
    """One frame; the vertical axis goes from 0 to 1, or to a tick above lines that stay low."""

    title: str
    x_name: str
    lines: Sequence[Line]
    logarithmic: bool = False


def element(name: str, /, *children: object, **attributes: object) -> Markup:
    """Return ``<name attributes>children</name>``; ``class_`` is ``class``, other underscores become hyphens."""
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    inside = "".join(escape(child) for child in children)
    return Markup(f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>")


def write_figure(path: Path, panels: Sequence[Panel], spoken: str) -> None:
    """Draw the panels side by side, one legend under them."""
    width = LEFT + len(panels) * (WIDTH + GAP) - GAP + 20
    known = {line.label: line for panel in panels for line in panel.lines}
    legend, rows = _legend(list(known.values()), width - LEFT - 20)
    height = TOP + HEIGHT + FOOT + 22 * rows
    drawn = element(
        "svg",
        element("title", spoken),
        element("style", Markup(STYLE)),
        element("rect", class_="ground", width=width, height=height, rx=8),
        *[_panel(panel, LEFT + place * (WIDTH + GAP)) for place, panel in enumerate(panels)],
        element("g", *legend, transform=f"translate({LEFT} {TOP + HEIGHT + FOOT})"),
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width} {height}", width=width, height=height, role="img",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn + "\n")


def _panel(panel: Panel, left: float) -> Markup:
    across, levels = _axis(panel), _levels(panel)
    low, high, top = across.low, across.high, levels[-1]
    return element(
        "g",
        element("text", panel.title, class_="title", y=-16),
        element("path", class_="grid", d="".join(f"M0 {_up(level, top)}h{WIDTH}" for level in levels)),
        *[element("text", format_number(level), x=-8, y=_up(level, top) + 4, text_anchor="end") for level in levels],
        *[
            element("text", format_number(tick), x=_across(panel, tick, low, high), y=HEIGHT + 20, text_anchor="middle")
            for tick in across.ticks
        ],
        element("text", panel.x_name, x=WIDTH / 2, y=HEIGHT + 42, text_anchor="middle"),
        *[drawn for line in panel.lines for drawn in _line(panel, line, low, high, top)],
        transform=f"translate({left} {TOP})",
    )


def _line(panel: Panel, line: Line, low: float, high: float, top: float) -> list[Markup]:
    points = [f"{_across(panel, x, low, high)} {_up(y, top)}" for x, y in zip(line.xs, line.ys, strict=True)]
    kind = f"c{line.colour}{' dash' if line.dashed else ''}"
    drawn = [element("path", class_=kind, d=f"M{'L'.join(points)}")]
    if line.marked:
        drawn.append(element("path", class_=f"c{line.colour} dots", d="".join(f"M{point}h0" for point in points)))
    return drawn


def _legend(lines: Sequence[Line], width: float) -> tuple[list[Markup], int]:
    """Entries one after another, as many to a row as fit."""
    drawn, x, row = [], 0.0, 0
    for line in lines:
        size = 44 + 7 * len(line.label)
        if x and x + size > width:
            x, row = 0.0, row + 1
        y = 22 * row
        kind = f"c{line.colour}{' dash' if line.dashed else ''}"
        drawn.append(element("path", class_=kind, d=f"M{x:g} {y}h22"))
        drawn.append(element("text", line.label, x=f"{x + 28:g}", y=y + 4))
        x += size
    return drawn, row + 1


def _axis(panel: Panel) -> Axis:
    xs = [x for line in panel.lines for x in line.xs]
    low, high = min(xs), max(xs)
    return Axis(low, high, tuple(_powers(low, high))) if panel.logarithmic else make_axis(low, high)


def _levels(panel: Panel) -> tuple[float, ...]:
    highest = max(y for line in panel.lines for y in line.ys)
    return make_axis(0.0, highest if highest < _LOW else 1.0).ticks


def _across(panel: Panel, x: float, low: float, high: float) -> float:
    if panel.logarithmic:
        x, low, high = math.log(x), math.log(low), math.log(high)
    return round(WIDTH * (x - low) / (high - low), 1)


def _up(y: float, top: float) -> float:
    return round(HEIGHT * (1 - y / top), 1)


def _powers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times the powers of ten within the range."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [round(factor * 10.0**power, 12) for power in powers for factor in (1, 2, 5)]
    return [mark for mark in marks if low <= mark <= high]
