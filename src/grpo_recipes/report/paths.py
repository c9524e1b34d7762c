"""The ``d`` of SVG paths, in a drawing of ``WIDTH`` by ``HEIGHT`` units."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_recipes.report.read import Column
from grpo_recipes.report.units import Axis

WIDTH, HEIGHT = 2000, 1000


def line_path(xs: Sequence[float], values: Column, across: Axis, up: Axis) -> str:
    """A line through the points, broken where a value is missing; a lone point is a dot."""
    pieces: list[list[str]] = [[]]
    for x, value in zip(xs, values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(_point(across, up, x, value))
    return "".join(f"M{'L'.join(piece)}{'h0' if len(piece) == 1 else ''}" for piece in pieces if piece)


def dots_path(xs: Sequence[float], values: Column, across: Axis, up: Axis) -> str:
    """A dot for each point: a line of no length, which round line ends make visible."""
    points = [(x, value) for x, value in zip(xs, values, strict=True) if value is not None]
    return "".join(f"M{_point(across, up, x, value)}h0" for x, value in points)


def band_path(xs: Sequence[float], low: Column, high: Column, across: Axis, up: Axis) -> str:
    """The area between two lines, in as many parts as missing values make."""
    runs: list[list[tuple[float, float, float]]] = [[]]
    for x, bottom, top in zip(xs, low, high, strict=True):
        if bottom is None or top is None:
            runs.append([])
        else:
            runs[-1].append((x, bottom, top))
    return "".join(_closed(run, across, up) for run in runs if run)


def _closed(run: list[tuple[float, float, float]], across: Axis, up: Axis) -> str:
    there = [_point(across, up, x, top) for x, _, top in run]
    back = [_point(across, up, x, bottom) for x, bottom, _ in reversed(run)]
    return f"M{'L'.join(there + back)}z"


def _point(across: Axis, up: Axis, x: float, y: float) -> str:
    return f"{round(WIDTH * across.share(x))} {round(HEIGHT * (1 - up.share(y)))}"
