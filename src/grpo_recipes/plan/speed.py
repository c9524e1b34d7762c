"""Predict the seconds per step of a planned run, and its steps within a time limit.

The prediction is a median of earlier runs with the same name, model, batch, and numbers of trainers and replicas.
Without such a run, it is None.
"""

from __future__ import annotations

import contextlib
import glob
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.runs.health import drop_missing, finite_number
from grpo_recipes.runs.progress import RowReader
from grpo_recipes.runs.rundir import Run, format_duration

Rows = list[dict[str, Any]]
_TAIL_BYTES = 1 << 18  # read from the end of metrics.jsonl: a few hundred steps are enough for a median
_MOST_RUNS = 200  # newest runs with the same name to read
_MOST_ALIKE = 5  # newest comparable runs to use
_WARM_UP_STEPS = 1  # the first step of a run compiles and fills caches
# Values of the plan that runs of the same experiment have equal. Runs of equal speed also have equal _DEVICES.
EXPERIMENT = ("task", "flavour", "mode", "completions", "tokens")
_DEVICES = ("model", "world_size", "replicas")


@dataclass(frozen=True)
class Speed:
    """The speed of comparable earlier runs, without their start and without saving checkpoints."""

    seconds: float | None  # median seconds of an optimizer step, None without an earlier run
    runs: int  # number of earlier runs
    walltime: float | None  # seconds of the time limit, None without a limit
    steps: int | None  # optimizer steps within the time limit

    def __str__(self) -> str:
        """Return the pace in words, with the number of steps within the time limit if there is one."""
        if self.seconds is None:
            return "no earlier run in run_root with this name, model, batch, and numbers of trainers and replicas"
        pace = f"{self.seconds:.3g} s per step in {self.runs} earlier run{'s' if self.runs > 1 else ''}"
        if self.walltime is None:
            return f"{pace}: {3600 / self.seconds:,.0f} steps per hour"
        return f"{pace}: about {self.steps:,} steps in {format_duration(self.walltime)}"


def find_speed(plan: Plan, names: Names, walltime: float | None = None) -> Speed:
    """Return the median step time of comparable earlier runs, and the number of steps within ``walltime`` seconds.

    Comparable runs are in the same run_root and have the same name, model, batch, and numbers of trainers and replicas
    (``EXPERIMENT``, ``_DEVICES``). The newest ``_MOST_ALIKE`` of them count, without their first step. ``seconds`` is
    None if there is no such run. ``steps`` is None without such a run or without ``walltime``.
    """
    names_of_facts, medians = (*EXPERIMENT, *_DEVICES), list[float]()
    facts = list_facts(plan.as_json(), names_of_facts)

    def is_alike(run: Run) -> bool:
        """Return whether a run is comparable, and not the planned run itself."""
        return run.folder != names.run_dir and list_facts(run.plan, names_of_facts) == facts

    for _, rows in read_runs(names.run_dir.parent, names.run, is_alike):
        if any(seconds := list_seconds(rows, "step")):
            medians.append(statistics.median(seconds))
        if len(medians) == _MOST_ALIKE:
            break
    median = statistics.median(medians) if medians else None
    steps = None if median is None or walltime is None else int(walltime / median)
    return Speed(median, len(medians), walltime, steps)


def read_runs(run_root: Path, name: str, is_alike: Callable[[Run], bool]) -> Iterator[tuple[Run, Rows]]:
    """Yield the newest comparable runs with a name, newest first, with their last rows except of the first step.

    Only the 200 newest folders of this name are tried, with ``is_alike``. Runs that can't be read are skipped. A run
    may have no rows.
    """
    pattern = f"{glob.escape(name)}-[0-9]*"  # for "fine", skip "fine-more"
    folders = run_root.glob(pattern) if os.path.isdir(run_root) else ()
    for folder in sorted(folders, reverse=True)[:_MOST_RUNS]:  # newest timestamp first
        with contextlib.suppress(ConfigError, OSError, ValueError):  # users may have edited the files of a run
            run = Run(folder)
            if run.identity.get("run_name") == name and is_alike(run):
                rows = RowReader(folder / "metrics.jsonl", _TAIL_BYTES).read_new()
                yield run, [row for row in rows if row["step"] > _WARM_UP_STEPS]


def list_seconds(rows: Rows, phase: str) -> list[float]:
    """Return the seconds of a phase in each row that has them."""
    return drop_missing(finite_number(row.get(f"seconds/{phase}")) for row in rows)


def list_facts(plan: Mapping[str, Any], names: Iterable[str]) -> list[Any]:
    """Return values of a plan and its batch by their names; None for a missing value, but 1 for ``replicas``."""
    facts = {"replicas": 1, **plan.get("batch", {}), **plan}  # earlier plans have no replicas
    return [facts.get(name) for name in names]
