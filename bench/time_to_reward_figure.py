"""Figure and tables of ``time_to_reward.py``."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from figure import Line, Panel, write_figure
from overlap_figure import T_95, TITLES, smooth
from pages import markdown_table

NAMES = {
    "trl": "TRL, transformers generation", "default": "ours", "overlap": "ours, `overlap_generation`",
    "replicas": "ours, two replicas",
}  # fmt: skip
Runs = dict[str, dict[int, dict[str, Any]]]  # arm -> seed -> row of the record


def read_runs(rows: list[dict[str, Any]], task: str) -> Runs:
    """Return the runs of a task, for the seeds that have all arms."""
    runs: Runs = {arm: {row["seed"]: row for row in rows if (row["task"], row["arm"]) == (task, arm)} for arm in NAMES}
    seeds = set.intersection(*(set(of_arm) for of_arm in runs.values()))
    return {arm: {seed: of_arm[seed] for seed in sorted(seeds)} for arm, of_arm in runs.items()}


def tables(rows: list[dict[str, Any]]) -> str:
    """Return a table for each task with at least two seeds."""
    parts = []
    for task, title in TITLES.items():
        runs = read_runs(rows, task)
        if len(runs["trl"]) < 2:
            continue
        lines = [
            [
                NAMES[arm],
                f"{sum(row['reached'] for row in of_arm.values())} of {len(of_arm)}",
                *(f"{statistics.median(row[name] for row in of_arm.values()):,.0f}" for name in ("steps", "tokens")),
                f"{statistics.median(row['seconds'] for row in of_arm.values()):.1f}",
                *(_ratio(of_arm, runs["trl"], per_token) for per_token in (False, True)),
            ]
            for arm, of_arm in runs.items()
        ]
        head = ["trainer", "reached", "steps", "tokens", "seconds", "seconds to TRL's", "at equal tokens"]
        parts.append(f"**{title}**, {len(runs['trl'])} seeds:\n\n{markdown_table(head, lines)}")
    return "\n\n".join(parts)


def _ratio(runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]], per_token: bool) -> str:
    """Return the geometric mean of the seconds' ratios over seeds, with its 95 % interval."""
    logs = [
        math.log(runs[seed]["seconds"] / base[seed]["seconds"])
        - per_token * math.log(runs[seed]["tokens"] / base[seed]["tokens"])
        for seed in runs
    ]
    if runs is base:
        return "1"
    mean, margin = statistics.mean(logs), T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return f"{math.exp(mean):.2f} ({math.exp(mean - margin):.2f} to {math.exp(mean + margin):.2f})"


def draw(path: Path, rows: list[dict[str, Any]]) -> None:
    """Draw the reward over seconds, a panel for each task: means over seeds, up to the shortest run of an arm."""
    panels = []
    for task, title in TITLES.items():
        runs = read_runs(rows, task)
        if len(runs["trl"]) < 2:
            continue
        lines = []
        for colour, (arm, of_arm) in enumerate(runs.items(), start=1):
            steps = min(row["steps"] for row in of_arm.values())
            columns = zip(*(row["seconds_by_step"][:steps] for row in of_arm.values()), strict=True)
            rewards = smooth([row["reward"][:steps] for row in of_arm.values()])
            lines.append(
                Line(NAMES[arm].replace("`", ""), [statistics.mean(column) for column in columns], rewards, colour)
            )
        panels.append(Panel(title, "seconds", lines))
    write_figure(path, panels, "Reward by seconds of TRL and of this project")
