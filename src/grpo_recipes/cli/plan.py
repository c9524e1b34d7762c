"""`grpo plan`: say what a launch would start, without starting it."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace

from grpo_recipes.cli.recipes import add_recipe_arguments, recipe_name
from grpo_recipes.errors import config_error
from grpo_recipes.fetch.sources import find_sources
from grpo_recipes.launch.resolve_run import names_of
from grpo_recipes.plan.devices import find_resources
from grpo_recipes.plan.estimates import estimate, job_walltime
from grpo_recipes.plan.fit import gpu_memory
from grpo_recipes.plan.plan import choose_recipe, describe, make_plan
from grpo_recipes.recipe.check import checked_recipe
from grpo_recipes.recipe.tasks import GRPO, entry_of, requested_task
from grpo_recipes.slurm.profile import walltime_seconds

HELP = "say what a launch would start, without starting it"
TAKES_RECIPE = True
_MOST = 10_000  # GPUs of a node, nodes, and GiB of a GPU
_LEAST_GIB = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to plan for, and --json, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--gpus", type=int, help="plan for this many GPUs instead of those visible")
    parser.add_argument("--nodes", type=int, default=1, help="with --gpus: on this many nodes like that")
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU; that of the visible ones")
    parser.add_argument("--time", help="time limit as Slurm writes it, e.g. 72:00:00; that of the job")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Print what a launch would start.

    Returns:
        0.

    Raises:
        ConfigError: the recipe is wrong, or does not fit the machine planned for.
    """
    resources = find_resources(os.environ)
    _check_counts(options)
    if options.gpus is not None:
        resources = replace(resources, flavour="cuda", gpus=tuple(str(index) for index in range(options.gpus)))
        resources = resources.on_nodes(options.nodes)
    asked = requested_task(os.environ, options.task)
    path = choose_recipe(recipe_name(options), os.environ, asked.task or GRPO, resources.flavour)
    recipe = checked_recipe(path, flags, os.environ, asked)
    sources = find_sources(recipe, os.environ)
    names = names_of(recipe)
    plan = make_plan(recipe, resources, os.environ, names, entry_of(recipe, asked), sources)
    takes = estimate(plan, recipe, names, _gpu_gib(options), _walltime(options))
    plain = {**plan.as_json(), **takes.as_json()}
    print(json.dumps(plain, indent=1) if options.json else describe(plan, estimates=takes.lines()))
    return 0


def _gpu_gib(options: argparse.Namespace) -> float | None:
    """GiB of a GPU: as told, else the driver's where the plan is for the GPUs of this machine."""
    if options.gpu_memory is not None:
        if not _LEAST_GIB <= options.gpu_memory <= _MOST:
            raise config_error("--gpu-memory", f"{options.gpu_memory:g} GiB is no GPU", "write --gpu-memory 80")
        return float(options.gpu_memory)
    return gpu_memory() if options.gpus is None else None


def _walltime(options: argparse.Namespace) -> float | None:
    """Seconds of the time limit: as told, else what our job has left."""
    if options.time is None:
        return job_walltime(os.environ)
    seconds = walltime_seconds(options.time)
    if not seconds:
        raise config_error("--time", f"'{options.time}' is no time limit of Slurm's", "write --time 72:00:00")
    return seconds


def _check_counts(options: argparse.Namespace) -> None:
    least = 1 if options.nodes > 1 else 0
    if not 1 <= options.nodes <= _MOST or (options.gpus is not None and not least <= options.gpus <= _MOST):
        what = f"{options.gpus or 0} GPUs on {options.nodes} nodes is no machine"
        raise config_error("--gpus, --nodes", what, "write --gpus 8 --nodes 2")
    if options.nodes > 1 and options.gpus is None:
        raise config_error("--nodes", "says nothing about the GPUs of a node", "add --gpus 8")
