"""How fast earlier runs like a planned one were."""

from __future__ import annotations

import contextlib
import glob
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.runs.health import finite_number
from grpo_recipes.runs.progress import RowReader
from grpo_recipes.runs.rundir import Run, format_duration

_TAIL_BYTES = 1 << 18  # of metrics.jsonl: some hundred steps are enough for a median
_MOST_RUNS = 200  # newest earlier runs of a name that are looked at
_MOST_ALIKE = 5  # newest of those that are like this one
_WARM_UP_STEPS = 1  # the first step of a run compiles and fills caches
_ALIKE = ("task", "model", "flavour", "mode", "completions", "world_size", "tokens")  # of a plan and its batch


@dataclass(frozen=True)
class Speed:
    """How fast earlier runs like this one were; start and saves are not counted."""

    seconds: float | None  # median of an optimizer step, None without an earlier run
    runs: int  # how many were counted
    walltime: float | None  # seconds of the time limit, None where there is none
    steps: int | None  # optimizer steps within it

    def __str__(self) -> str:
        if self.seconds is None:
            return "no earlier run in run_root with this name, model, batch and number of trainers"
        pace = f"{self.seconds:.3g} s a step in {self.runs} earlier run{'s' if self.runs > 1 else ''}"
        if self.walltime is None:
            return f"{pace}: {3600 / self.seconds:,.0f} steps an hour"
        return f"{pace}: about {self.steps:,} steps in {format_duration(self.walltime)}"


def find_speed(plan: Plan, names: Names, walltime: float | None = None) -> Speed:
    """Return the speed of the newest earlier runs of this name, beside the run directory, on as many devices."""
    now, medians = _kind(plan.as_json()), list[float]()
    folders = names.run_dir.parent.glob(f"{glob.escape(names.run)}-[0-9]*")  # "fine", not "fine-more"
    for folder in sorted(folders, reverse=True)[:_MOST_RUNS]:  # by their timestamps
        with contextlib.suppress(ConfigError, OSError, ValueError):  # files of a run are the user's to edit
            run = Run(folder)
            alike = run.identity.get("run_name") == names.run and _kind(run.plan) == now
            rows = RowReader(folder / "metrics.jsonl", _TAIL_BYTES).new() if alike and folder != names.run_dir else []
            seconds = [finite_number(row.get("seconds/step")) for row in rows if row["step"] > _WARM_UP_STEPS]
            if known := [one for one in seconds if one]:
                medians.append(statistics.median(known))
        if len(medians) == _MOST_ALIKE:
            break
    median = statistics.median(medians) if medians else None
    steps = None if median is None or walltime is None else int(walltime / median)
    return Speed(median, len(medians), walltime, steps)


def _kind(plan: Mapping[str, Any]) -> list[Any]:
    """Return what runs of the same speed have in common."""
    facts = {**plan.get("batch", {}), **plan}
    return [facts.get(key) for key in _ALIKE]
