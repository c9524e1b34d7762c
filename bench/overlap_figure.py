"""The figure of ``overlap.py``: the reward of both runs over the steps, mean over seeds.

python bench/overlap_figure.py     # writes docs/assets/overlap.svg, and prints the table of docs/overlap.md
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from tabular_figure import Line, Panel, write_figure

from grpo_recipes.paths import home

WINDOW = 10  # steps that a point of the figure and a row of the table is the mean of
LEVEL, OVER = 0.8, 5  # reward that is reached, and the steps whose mean it is
TITLES = {"smoke": "sums (smoke)", "modebench": "ModeBench countdown"}
T_95 = {2: 12.71, 3: 4.3, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36}  # Student's t by number of seeds
Runs = dict[bool, list[list[float]]]  # whether overlapped -> seed -> rewards


def runs_of(rows: list[dict[str, Any]], task: str) -> Runs:
    """Return the rewards of the seeds that were run in both ways."""
    made = {(row["overlap"], row["seed"]): row["reward"] for row in rows if row["part"] == "curves"
            and row["task"] == task}  # fmt: skip
    seeds = sorted({seed for _, seed in made if (True, seed) in made and (False, seed) in made})
    return {overlap: [made[overlap, seed] for seed in seeds] for overlap in (False, True)}


def means(runs: list[list[float]], begin: int) -> list[float]:
    """Return each seed's mean reward of ``WINDOW`` steps."""
    return [statistics.mean(run[begin : begin + WINDOW]) for run in runs]


def steps_to(run: list[float]) -> float:
    """Return the steps after which the mean of ``OVER`` rewards is ``LEVEL``, or infinity."""
    reached = (end for end in range(OVER, len(run) + 1) if statistics.mean(run[end - OVER : end]) >= LEVEL)
    return next(reached, math.inf)


def main() -> None:
    """Draw, and print the table."""
    rows = [json.loads(line) for line in (home() / "bench/results/overlap.jsonl").read_text().splitlines()]
    panels = []
    for task, title in TITLES.items():
        runs = runs_of(rows, task)
        if len(runs[True]) < 2:
            continue
        steps = len(runs[True][0])
        begins = range(0, steps, WINDOW)
        print(f"\n{title}, {len(runs[True])} seeds\n")
        print("| steps | synchronous | overlapped | difference |\n|---|---|---|---|")
        for begin in begins:
            pair = means(runs[False], begin), means(runs[True], begin)
            apart = [after - before for before, after in zip(*pair, strict=True)]
            margin = T_95[len(apart)] * statistics.stdev(apart) / math.sqrt(len(apart))
            shown = " | ".join(f"{statistics.mean(one):.3f}" for one in pair)
            print(f"| {begin + 1} to {begin + WINDOW} | {shown} | {statistics.mean(apart):+.3f} ± {margin:.3f} |")
        print(f"\nsteps to {LEVEL}:", *(sorted(map(steps_to, runs[overlap])) for overlap in (False, True)))
        lines = [
            Line(name, [*range(3, steps - 1)], smooth(runs[overlap]), colour)
            for name, overlap, colour in (("synchronous", False, 1), ("overlapped", True, 2))
        ]
        panels.append(Panel(title, "step", lines))
    write_figure(home() / "docs/assets/overlap.svg", panels, "Reward by step, synchronous and overlapped")


def smooth(runs: list[list[float]]) -> list[float]:
    """Return the mean over seeds and over 5 steps around each."""
    mean = [statistics.mean(values) for values in zip(*runs, strict=True)]
    return [statistics.mean(mean[step - 2 : step + 3]) for step in range(2, len(mean) - 2)]


if __name__ == "__main__":
    main()
