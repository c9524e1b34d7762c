"""The command `grpo plan`: the processes of a launch, with estimates of memory, disk and speed."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict, replace

from grpo_recipes.cli import chosen_recipe, command, option, switch
from grpo_recipes.cli.display import print_labelled
from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch.resolve import choose_names
from grpo_recipes.plan.devices import find_resources
from grpo_recipes.plan.estimates import estimate
from grpo_recipes.plan.plan import format_plan, make_plan
from grpo_recipes.slurm.client import parse_walltime, read_job_end_time

_MOST = 10_000  # upper limit of GPUs of a node, nodes, and GiB of a GPU


@command(
    "Show the processes that a launch would start",
    option("--gpus", type=int, help="Plan for this number of GPUs (default: the visible GPUs)"),
    option("--nodes", type=int, default=1, help="With --gpus: plan for this number of nodes with so many GPUs each"),
    option("--gpu-memory", type=float, metavar="GIB", help="Memory of one GPU (default: of the visible GPUs)"),
    option("--time", help="Time limit in Slurm's format, e.g. 72:00:00 (default: time limit of the job)"),
    switch("-v", "--verbose", help="Print argv and environment of every process"),
    switch("--json", help="Print the plan as JSON"),
    takes_recipe=True,
)
def plan(options: argparse.Namespace) -> int:
    """Print the plan of a launch on this machine or another one, with estimates of memory, disk and speed.

    Return 0. Raise ConfigError if an option is out of its range, or if the recipe can't run on these resources.
    """
    resources, gpus, gib = find_resources(os.environ), options.gpus, options.gpu_memory
    if options.nodes > 1 and gpus is None:
        raise config_error("--nodes", "needs --gpus, the number of GPUs of a node", "add --gpus 8")
    fewest = 1 if options.nodes > 1 else 0
    if not 1 <= options.nodes <= _MOST or not fewest <= (gpus or 0) <= _MOST:
        problem = f"can't plan for {gpus or 0} GPUs on {options.nodes} nodes"
        raise config_error("--gpus, --nodes", problem, "use --gpus 8 --nodes 2")
    if gib is not None and not 1 <= gib <= _MOST:
        raise config_error("--gpu-memory", f"no GPU has {gib:g} GiB", "use --gpu-memory 80")
    if options.time is not None and not parse_walltime(options.time):
        problem = f"'{options.time}' is not a time limit in Slurm's format"
        raise config_error("--time", problem, "use --time 72:00:00")
    if gpus is not None:
        resources = replace(resources, device="cuda", gpus=tuple(str(index) for index in range(gpus)))
        resources = resources.on_nodes(options.nodes)
    if gib is not None or gpus is not None:
        resources = replace(resources, gpu_gib=gib)
    recipe = chosen_recipe(options, resources.device)
    names = choose_names(recipe)
    assets = find_assets(recipe, os.environ)
    run_plan = make_plan(recipe, resources, os.environ, names, assets)
    walltime: float | None
    if options.time is not None:
        walltime = parse_walltime(options.time)
    else:
        job_end = read_job_end_time(os.environ)
        walltime = None if job_end is None else max(0.0, job_end - time.time())
    estimates = estimate(run_plan, recipe, names, resources.gpu_gib, walltime)
    if options.json:
        print(json.dumps({**run_plan.as_json(), **asdict(estimates)}, indent=1))
    else:
        lines = format_plan(run_plan, estimates=estimates.lines(), argv=options.verbose).splitlines()
        print_labelled(lines, 10)
    return 0
