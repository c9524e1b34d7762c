"""Figure and tables of ``overlap.py``: the reward of both runs over the steps, mean over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figure import Line, Panel, write_figure

WINDOW = 10  # steps that a point of the figure and a row of the table is the mean of
LEVEL, OVER = 0.8, 5  # the reward to reach, as a mean over this number of steps
TITLES = {"smoke": "Sums (the smoke task)", "modebench": "ModeBench countdown"}
T_95 = {2: 12.71, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # Student's t by number of seeds
Runs = dict[bool, list[list[float]]]  # whether overlapped -> seed -> rewards


def runs_of(rows: list[dict[str, Any]], task: str) -> Runs:
    """Return the rewards of the seeds that were run in both ways."""
    rewards = {(row["overlap"], row["seed"]): row["reward"] for row in rows if row["part"] == "curves"
            and row["task"] == task}  # fmt: skip
    seeds = sorted({seed for _, seed in rewards if (True, seed) in rewards and (False, seed) in rewards})
    return {overlap: [rewards[overlap, seed] for seed in seeds] for overlap in (False, True)}


def means(runs: list[list[float]], begin: int) -> list[float]:
    """Return each seed's mean reward of ``WINDOW`` steps."""
    return [statistics.mean(run[begin : begin + WINDOW]) for run in runs]


def steps_to(run: list[float]) -> float:
    """Return the first step with a mean of ``LEVEL`` over the last ``OVER`` rewards, or infinity."""
    reached = (end for end in range(OVER, len(run) + 1) if statistics.mean(run[end - OVER : end]) >= LEVEL)
    return next(reached, math.inf)


def tables(rows: list[dict[str, Any]]) -> str:
    """Return the tables of docs/measurements.md."""
    return "".join(f"\n{_table(title, runs)}" for title, runs in _tasks(rows)) + "\n"


def _tasks(rows: list[dict[str, Any]]) -> Iterator[tuple[str, Runs]]:
    """Yield title and runs of each task with at least two seeds."""
    for task, title in TITLES.items():
        if len((runs := runs_of(rows, task))[True]) > 1:
            yield title, runs


def _table(title: str, runs: Runs) -> str:
    seeds, lines = len(runs[True]), ["| steps | synchronous | overlapped | difference |", "|---|---|---|---|"]
    for begin in range(0, len(runs[True][0]), WINDOW):
        pair = means(runs[False], begin), means(runs[True], begin)
        apart = [after - before for before, after in zip(*pair, strict=True)]
        margin = T_95[seeds] * statistics.stdev(apart) / math.sqrt(seeds)
        shown = " | ".join(f"{statistics.mean(values):.3f}" for values in pair)
        lines.append(f"| {begin + 1} to {begin + WINDOW} | {shown} | {statistics.mean(apart):+.3f} ± {margin:.3f} |")
    reached = [_reached([steps_to(run) for run in runs[overlap]]) for overlap in (False, True)]
    text = f"Steps until the mean reward of {OVER} steps was {LEVEL}: {reached[0]}; with overlap {reached[1]}."
    return f"**{title}**, {seeds} seeds:\n\n{chr(10).join(lines)}\n\n{text}\n"


def _reached(steps: list[float]) -> str:
    reached = [count for count in steps if count < math.inf]
    if not reached:
        return "never"
    note = f" (in {len(reached)} of {len(steps)} seeds)" if len(reached) < len(steps) else ""
    return f"{min(reached)} to {max(reached)}, median {statistics.median(reached):g}{note}"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw a panel for each task."""
    panels = []
    for title, runs in _tasks(rows):
        steps = [*range(1, len(runs[True][0]) + 1)]
        lines = [
            Line(name, steps, smooth(runs[overlap]), colour)
            for name, overlap, colour in (("synchronous", False, 1), ("overlapped", True, 2))
        ]
        panels.append(Panel(title, "step", lines))
    write_figure(path, panels, "Reward by step, synchronous and overlapped")


def smooth(runs: list[list[float]]) -> list[float]:
    """Return the mean over seeds and over the 5 steps around each step, or fewer at both ends."""
    mean = [statistics.mean(values) for values in zip(*runs, strict=True)]
    return [statistics.mean(mean[max(0, step - 2) : step + 3]) for step in range(len(mean))]
