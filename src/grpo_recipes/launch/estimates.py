"""A plan with what it will take: memory, disk and time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from grpo_recipes.launch.disk import estimate_disk
from grpo_recipes.launch.fit import estimate_memory
from grpo_recipes.launch.history import find_speed
from grpo_recipes.launch.plan import Names, Plan
from grpo_recipes.launch.walltime import job_end_time
from grpo_recipes.recipe import Recipe


def with_estimates(
    plan: Plan, recipe: Recipe, names: Names, gpu_gib: float | None = None, walltime: float | None = None
) -> Plan:
    """The plan with its estimates; about a tenth of a second.

    Args:
        plan: a plan.
        recipe: the recipe it is of.
        names: those it was made with.
        gpu_gib: memory of one GPU in GiB, if known.
        walltime: seconds the job may take, if known.
    """
    return replace(
        plan,
        memory=estimate_memory(recipe, plan, gpu_gib),
        disk=estimate_disk(recipe, plan, names.run_dir),
        speed=find_speed(plan, names, walltime),
    )


def job_walltime(environment: Mapping[str, str]) -> float | None:
    """Seconds our Slurm job has left; None outside a job, and where it has no end."""
    end = job_end_time(environment)
    return None if end is None else max(0.0, end - time.time())
