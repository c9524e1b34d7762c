"""The figure of ``multi_answer.py``: the way of the arms through mean@8 and coverage@8, and where every run ended."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from multi_answer_report import PARTS, by_arm
from tabular_figure import STYLE, element

from grpo_recipes.report.chart import Axis, axis
from grpo_recipes.report.page import short

WIDTH, LEFT, GAP = 960, 250, 30
WAY_LEFT, WAY_TOP, WAY_WIDTH, WAY_HEIGHT = 56, 48, 360, 240
ROWS_TOP, ROW = WAY_TOP + WAY_HEIGHT + 142, 26
PANELS = [(part, metric) for part in PARTS for metric in ("mean@8", "coverage@8")]
OWN_STYLE = (
    ".faint{opacity:.35}.c1.faint,.c1.point{stroke-width:7}.c1.point{stroke-width:10}"
    ".untrained{stroke:var(--muted);stroke-width:1;stroke-dasharray:3 4}"
)


def write_figure(path: Path, result: dict[str, Any], shown: Sequence[str]) -> None:
    """Draw the result of the table's runs.

    Args:
        path: SVG file.
        result: with ``runs``, ``summary`` and ``baselines``.
        shown: arms whose way is drawn, at most 6.
    """
    height = ROWS_TOP + ROW * len(result["summary"]) + 44
    drawn = element(
        "svg",
        element("title", "Mean over runs of mean@8 and coverage@8 during training, and of every arm at its end"),
        element("style", Markup(STYLE + OWN_STYLE)),
        element("rect", class_="ground", width=WIDTH, height=height, rx=8),
        *[_ways(result, part, place, shown) for place, part in enumerate(PARTS)],
        *_legend(shown),
        *_names(list(result["summary"])),
        *[_ends(result, part, metric, place) for place, (part, metric) in enumerate(PANELS)],
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", width=WIDTH, height=height, role="img",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(drawn + "\n", encoding="utf-8")


def _ways(result: dict[str, Any], part: str, place: int, shown: Sequence[str]) -> Markup:
    """coverage@8 over mean@8, a dot for each measurement; every way begins at the untrained model."""
    arms = by_arm(result["runs"])
    ways = {arm: _mean_way(arms[arm], part) for arm in shown}
    across, up = (axis(*_ends_of([point[i] for way in ways.values() for point in way])) for i in (0, 1))
    lines = []
    for colour, way in enumerate(ways.values(), 1):
        points = [f"{WAY_WIDTH * across.share(x):.1f} {WAY_HEIGHT * (1 - up.share(y)):.1f}" for x, y in way]
        lines.append(element("path", class_=f"c{colour}", d=f"M{'L'.join(points)}"))
        lines.append(element("path", class_=f"c{colour} dots", d="".join(f"M{point}h0" for point in points)))
    return element(
        "g",
        element("text", f"coverage@8 over mean@8, {PARTS[part]}", class_="title", y=-18),
        element("path", class_="grid", d="".join(f"M0 {WAY_HEIGHT * (1 - up.share(t)):.1f}h{WAY_WIDTH}"
                                                 for t in up.ticks)),
        *[element("text", short(t), x=-8, y=round(WAY_HEIGHT * (1 - up.share(t)) + 4, 1), text_anchor="end")
          for t in up.ticks],
        *_labels(across, WAY_WIDTH, WAY_HEIGHT + 18),
        element("text", "mean@8", x=WAY_WIDTH / 2, y=WAY_HEIGHT + 38, text_anchor="middle"),
        *lines,
        transform=f"translate({WAY_LEFT + place * (WIDTH // 2)} {WAY_TOP})",
    )  # fmt: skip


def _mean_way(runs: Sequence[dict[str, Any]], part: str) -> list[tuple[float, float]]:
    """(mean@8, coverage@8) of each measurement, mean over runs."""
    rows = zip(*[run["curve"] for run in runs], strict=True)
    return [tuple(math.fsum(row[part][metric] for row in at_step) / len(runs) for metric in ("mean@8", "coverage@8"))
            for at_step in rows]  # fmt: skip


def _ends_of(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _labels(across: Axis, width: float, y: float) -> list[Markup]:
    return [
        element("text", short(tick), x=round(width * across.share(tick), 1), y=y, text_anchor="middle")
        for tick in across.ticks
    ]


def _legend(shown: Sequence[str]) -> list[Markup]:
    drawn, x, y = [], float(WAY_LEFT), WAY_TOP + WAY_HEIGHT + 68
    for colour, arm in enumerate(shown, 1):
        drawn.append(element("path", class_=f"c{colour}", d=f"M{x:g} {y}h22"))
        drawn.append(element("text", arm, x=x + 28, y=y + 4))
        x += 50 + 6.6 * len(arm)
    return drawn


def _names(arms: Sequence[str]) -> list[Markup]:
    return [
        element("text", arm, x=LEFT - 16, y=ROWS_TOP + ROW * row + 17, text_anchor="end")
        for row, arm in enumerate(arms)
    ]


def _ends(result: dict[str, Any], part: str, metric: str, place: int) -> Markup:
    """A row for each arm: every run a faint dot, mean and 95 % interval over them; dashed: the untrained model."""
    arms, untrained = by_arm(result["runs"]), result["baselines"][part]["untrained"][metric]
    width = (WIDTH - LEFT - GAP * len(PANELS)) / len(PANELS)
    across = axis(*_ends_of([run[part][metric] for run in result["runs"]] + [untrained]), 2)
    bottom = ROW * len(arms)
    lines = [element("path", class_="grid", d="".join(f"M{width * across.share(t):.1f} 0v{bottom}"
                                                      for t in across.ticks))]  # fmt: skip
    lines.append(element("path", class_="untrained", d=f"M{width * across.share(untrained):.1f} 0v{bottom}"))
    for row, (arm, runs) in enumerate(arms.items()):
        y = ROW * row + 13
        one = result["summary"][arm][part][metric]
        dots = "".join(f"M{width * across.share(run[part][metric]):.1f} {y}h0" for run in runs)
        lines.append(element("path", class_="c1 faint", d=dots))
        if one["ci"]:
            low, high = (width * across.share(limit) for limit in one["ci"])
            lines.append(element("path", class_="c1", d=f"M{low:.1f} {y}H{high:.1f}"))
        lines.append(element("path", class_="c1 point", d=f"M{width * across.share(one['mean']):.1f} {y}h0"))
    return element(
        "g",
        element("text", metric, class_="title", y=-26),
        element("text", PARTS[part].removeprefix("equations "), y=-10),
        *lines,
        *_labels(across, width, bottom + 18),
        transform=f"translate({LEFT + place * (width + GAP):.1f} {ROWS_TOP})",
    )
