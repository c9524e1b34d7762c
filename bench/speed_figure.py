"""The figure of ``speed.py``: every ratio with its interval and its goal, and the ratio as a step grows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from figure import STYLE, element
from markupsafe import Markup
from speed_page import PAGE, PARTS, arms_of, goal_of, page

from grpo_recipes.console.report.chart import make_axis
from grpo_recipes.console.report.page import format_number
from grpo_recipes.paths import find_code_root

WIDTH, SIDE, TOP, ROW = 358, 16, 68, 32  # the width of a phone; a label is above its ratio
GROWTH = {"prompts": "prompts a step", "longest": "longest", "ranks": "processes"}
GROWTH_LEFT, GROWTH_HEIGHT, GROWTH_GAP = 38, 120, 12
OWN_STYLE = (
    ".point{stroke-width:9}.noise{stroke:var(--muted)}.goal{stroke:var(--c2);stroke-width:3}"
    ".one{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 4}"
)
DRAWN = find_code_root() / "docs/assets/speed.svg"
Found = dict[str, Any]  # the figures of an arm


def write_page(record: dict[str, Any]) -> None:
    """Draw, and put the figure and the tables below the last heading of the page."""
    DRAWN.write_text(figure(record))
    PAGE.write_text(page(record))


def figure(record: dict[str, Any]) -> str:
    """Return the figure of a record as SVG."""
    parts = [name for name in PARTS if name != "growth" and "found" in record.get(name, {})]
    rows = [row for name in parts for row in _rows(name, record[name]["found"])]
    bottom = TOP + ROW * len(rows)
    drawn, height = [_ratios(rows)], bottom + 40
    if "growth" in record:
        drawn.append(_growth(record["growth"]["found"], bottom + 96))
        height = bottom + 96 + GROWTH_HEIGHT + 58
    svg = element(
        "svg",
        element("title", "Seconds of a step as a ratio, with 95 % intervals and goals"),
        element("style", Markup(STYLE + OWN_STYLE)),
        element("rect", class_="ground", width=WIDTH, height=height, rx=8),
        *_legend(),
        *drawn,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height, role="img",
    )  # fmt: skip
    return f"{svg}\n"


def _rows(name: str, findings: dict[str, Any]) -> Iterator[tuple[str, Found | None, float | None]]:
    """Yield label, figures and goal: of the heading without figures, and of each arm."""
    heading, base, _ = PARTS[name]
    yield f"{heading}, over {base}", None, None
    for case, arm, figures in arms_of(findings, base):
        yield ", ".join(filter(None, (case, arm))), figures, goal_of(name, case, arm)


def _ratios(rows: list[tuple[str, Found | None, float | None]]) -> Markup:
    highest = max(figures["ratio"]["high"] for _, figures, _ in rows if figures)
    across, width, bottom = make_axis(0.0, max(1.1, highest)), WIDTH - 2 * SIDE, ROW * len(rows)
    drawn = [
        element("path", class_="grid", d="".join(f"M{_at(width * across.locate(t))} 0v{bottom}" for t in across.ticks)),
        element("path", class_="one", d=f"M{_at(width * across.locate(1.0))} 0v{bottom}"),
    ]
    for number, (label, figures, goal) in enumerate(rows):
        y = ROW * number + 23
        if figures is None:
            drawn.append(element("text", label, class_="title", y=y))
            continue
        low, middle, high = (_at(width * across.locate(figures["ratio"][key])) for key in ("low", "median", "high"))
        kind = "noise" if label.endswith("again") else "c1"
        drawn.append(element("text", label, y=y - 12))
        drawn.append(element("path", class_=kind, d=f"M{low} {y}H{high}"))
        drawn.append(element("path", class_=f"{kind} point", d=f"M{middle} {y}h0"))
        if goal is not None:
            drawn.append(element("path", class_="goal", d=f"M{_at(width * across.locate(goal))} {y - 7}v14"))
    labels = [
        element("text", format_number(tick), x=_at(width * across.locate(tick)), y=bottom + 20, text_anchor="middle")
        for tick in across.ticks
    ]
    return element("g", *drawn, *labels, transform=f"translate({SIDE} {TOP})")


def _growth(growth: dict[str, Any], top: int) -> Markup:
    """Draw ours over bare TRL as one thing grows, a frame for each thing."""
    highest = max(case["ours"]["ratio"]["high"] for cases in growth.values() for case in cases.values())
    up, width = make_axis(0.0, max(1.1, highest)), (WIDTH - GROWTH_LEFT - SIDE + GROWTH_GAP) / len(growth) - GROWTH_GAP
    frames = []
    for index, (parameter, cases) in enumerate(growth.items()):
        xs = [width * (0.5 + number) / len(cases) for number in range(len(cases))]
        ratios = [case["ours"]["ratio"] for case in cases.values()]
        ys = [{key: _at(GROWTH_HEIGHT * (1 - up.locate(value))) for key, value in ratio.items()} for ratio in ratios]
        middles = [f"{_at(x)} {y['median']}" for x, y in zip(xs, ys, strict=True)]
        levels = [(tick, _at(GROWTH_HEIGHT * (1 - up.locate(tick)))) for tick in up.ticks]
        frames.append(element(
            "g",
            element("path", class_="grid", d="".join(f"M0 {y}h{_at(width)}" for _, y in levels)),
            *[
                element("text", format_number(tick), x=-8, y=y + 4, text_anchor="end")
                for tick, y in levels
                if not index
            ],
            element("path", class_="c1", d=f"M{'L'.join(middles)}"),
            element("path", class_="c1 point", d="".join(f"M{point}h0" for point in middles)),
            element("path", class_="c1", d="".join(f"M{_at(x)} {y['low']}V{y['high']}"
                                                   for x, y in zip(xs, ys, strict=True))),
            *[element("text", case, x=_at(x), y=GROWTH_HEIGHT + 20, text_anchor="middle")
              for x, case in zip(xs, cases, strict=True)],
            element("text", GROWTH[parameter], x=_at(width / 2), y=GROWTH_HEIGHT + 40, text_anchor="middle"),
            transform=f"translate({_at(GROWTH_LEFT + index * (width + GROWTH_GAP))} 0)",
        ))  # fmt: skip
    heading = element("text", "Update phase as it grows, over bare TRL", class_="title", x=SIDE, y=-24)
    return element("g", heading, *frames, transform=f"translate(0 {top})")


def _legend() -> list[Markup]:
    return [
        element("path", class_="c1", d="M18 24h28"),
        element("path", class_="c1 point", d="M32 24h0"),
        element("text", "median and 95 % interval", x=54, y=28),
        element("path", class_="goal", d="M240 17v14"),
        element("text", "goal", x=250, y=28),
        element("path", class_="noise", d="M18 46h28"),
        element("path", class_="noise point", d="M32 46h0"),
        element("text", "the base once more: noise", x=54, y=50),
    ]


def _at(place: float) -> float:
    return round(place, 1)
