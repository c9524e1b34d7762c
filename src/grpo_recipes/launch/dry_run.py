"""`grpo launch --dry-run`: print the plan of a launch, and the environment of each process."""

import os
import tempfile
from pathlib import Path

from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch import resolve
from grpo_recipes.plan.commands import base_environment, run_environment, tracker_environment
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import format_plan, make_plan
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.secrets import mask_environment


def print_dry_run(options: resolve.Options, resources: Resources) -> int:
    """Print the plan and the environment of each process, without creating anything. Return 0."""
    run, recipe = resolve.resolve_run(options, resources)
    names = resolve.choose_names(recipe, run)
    sources = find_assets(recipe, os.environ, run.identity.get("sources") if run else None)
    plan = make_plan(recipe, resources, os.environ, names, sources)
    placeholder = Path(tempfile.gettempdir()) / "grpo-dry-run"  # is never created
    run_variables = run_environment(os.environ, Scratch(placeholder, placeholder), names.run_dir, names.served)
    shared = {**base_environment(os.environ), **run_variables, **tracker_environment(recipe, os.environ)}
    differences = {}
    for process in plan.processes:
        environment = process.full_environment(shared)
        changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        removed = {name: "(removed)" for name in os.environ if name not in environment}
        differences[process.name] = mask_environment({**changed, **removed})
    print(format_plan(plan, differences))
    return 0
