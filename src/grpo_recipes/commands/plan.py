"""`grpo plan`: say what a launch would start, without starting it."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, replace

from grpo_recipes.check import checked_recipe
from grpo_recipes.commands.recipes import add_recipe_arguments, recipe_name
from grpo_recipes.errors import refuse
from grpo_recipes.fetch.sources import find_sources
from grpo_recipes.launch.batch import derive_batch
from grpo_recipes.launch.plan import choose_recipe, describe, make_plan
from grpo_recipes.launch.resources import Resources, find_resources
from grpo_recipes.launch.settle import planned_names
from grpo_recipes.paths import shown
from grpo_recipes.recipe import Recipe
from grpo_recipes.tasks import GRPO, asked_task, entry_of, task_of

HELP = "say what a launch would start, without starting it"
TAKES_RECIPE = True
_MOST = 10_000  # GPUs of a node, and nodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--gpus, --nodes and --json, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--gpus", type=int, help="plan for this many GPUs instead of those visible")
    parser.add_argument("--nodes", type=int, default=1, help="with --gpus: the batch on this many nodes")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Print what a launch would start.

    Returns:
        0.

    Raises:
        Refused: the recipe is wrong, or does not fit the machine planned for.
    """
    resources = find_resources(os.environ)
    _check_counts(options)
    if options.gpus is not None:
        resources = replace(resources, flavour="cuda", gpus=tuple(str(index) for index in range(options.gpus)))
    asked = asked_task(os.environ, options.task)
    path = choose_recipe(recipe_name(options), os.environ, asked.task or GRPO, resources.flavour)
    recipe = checked_recipe(path, flags, os.environ, asked)
    if options.nodes > 1:
        return _several_nodes(options, recipe, resources)
    sources = find_sources(recipe, os.environ)
    entry = entry_of(recipe, asked)
    plan = make_plan(recipe, resources, os.environ, planned_names(recipe), entry, sources=sources)
    print(json.dumps(plan.as_json(), indent=1) if options.json else describe(plan))
    return 0


def _check_counts(options: argparse.Namespace) -> None:
    least = 1 if options.nodes > 1 else 0
    if not 1 <= options.nodes <= _MOST or (options.gpus is not None and not least <= options.gpus <= _MOST):
        what = f"{options.gpus or 0} GPUs on {options.nodes} nodes is no machine"
        raise refuse("--gpus, --nodes", what, "write --gpus 8 --nodes 2")
    if options.nodes > 1 and options.gpus is None:
        raise refuse("--nodes", "says nothing about the GPUs of a node", "add --gpus 8")


def _several_nodes(options: argparse.Namespace, recipe: Recipe, resources: Resources) -> int:
    """The arithmetic alone: this version launches on one node."""
    trainers = options.nodes * len(resources.gpus) - recipe["vllm_tensor_parallel_size"]
    batch = derive_batch(recipe, trainers)
    if options.json:
        told = {"task": task_of(recipe), "batch": asdict(batch), "nodes": options.nodes, "trainers": trainers}
        print(json.dumps(told, indent=1))
        return 0
    print(f"recipe     {shown(recipe.path)} ({task_of(recipe)})")
    print(f"batch      {batch}")
    print(
        f"note       {batch.world_size} of {trainers} trainers on {options.nodes} nodes; launch runs on one node so far"
    )
    return 0
