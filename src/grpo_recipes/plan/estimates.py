"""What a planned run will take: memory, disk and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_recipes.plan.disk import Disk, estimate_disk
from grpo_recipes.plan.fit import Memory, estimate_memory
from grpo_recipes.plan.history import Speed, find_speed
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.slurm.walltime import job_end_time


@dataclass(frozen=True)
class Estimates:
    """What the processes of a plan hold at their peak, what the run writes, and how fast earlier runs were."""

    memory: Memory
    disk: Disk
    speed: Speed

    def lines(self) -> list[str]:
        """Return the estimates for a person, a line a fact."""
        return [*self.memory.lines(), *self.disk.lines(), f"speed      {self.speed}"]

    def as_json(self) -> dict[str, Any]:
        """Return the estimates as plain data."""
        return {"memory": self.memory.as_json(), "disk": self.disk.as_json(), "speed": self.speed.as_json()}


def estimate(
    plan: Plan, recipe: Recipe, names: Names, gpu_gib: float | None = None, walltime: float | None = None
) -> Estimates:
    """Estimate what a plan will take; about a tenth of a second.

    Args:
        plan: a plan.
        recipe: the recipe it is of.
        names: those it was made with.
        gpu_gib: memory of one GPU in GiB, if known.
        walltime: seconds the job may take, if known.
    """
    return Estimates(
        memory=estimate_memory(recipe, plan, gpu_gib),
        disk=estimate_disk(recipe, plan, names.run_dir),
        speed=find_speed(plan, names, walltime),
    )


def job_walltime(environment: Mapping[str, str]) -> float | None:
    """Return the seconds our Slurm job has left; None outside a job, and where it has no end."""
    end = job_end_time(environment)
    return None if end is None else max(0.0, end - time.time())
