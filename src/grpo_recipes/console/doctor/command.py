"""`grpo doctor`: check this machine, a recipe on it, or how a run ended, and print what to do."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from grpo_recipes.cli import chosen_recipe, command, option, recipe_name, switch
from grpo_recipes.console.doctor import DEEP, MACHINE, RECIPE, RUN
from grpo_recipes.console.doctor.examine import Check, Machine, as_text, examine, finding_of
from grpo_recipes.console.doctor.recipes import Case
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding
from grpo_recipes.runs.rundir import Run, find_run

# All checks together, and one program they ask; with --deep also imports.
_SECONDS, _PATIENCE = 8.0, 3.0
_DEEP_SECONDS, _DEEP_PATIENCE = 150.0, 120.0


@command(
    "look at this machine, a recipe on it, or how a run ended, and show what to do",
    option("--run", metavar="RUN_DIR|last", dest="run_dir", help="explain how this run ended instead"),
    switch("--deep", help="also import torch, TRL and vLLM (a minute)"),
    switch("--json", help="print the results as JSON"),
    takes_recipe=True,
)
def doctor(options: argparse.Namespace) -> int:
    """Print what was found of the machine, a recipe on it, or a run; return 2 when there is a problem."""
    deep = options.deep and options.run_dir is None
    results: dict[str, Finding] = {}
    if options.run_dir is not None:
        if recipe_name(options) or options.flags:
            raise config_error("--run", "a run has its own recipe", "leave out the recipe and its flags")
        checks: Sequence[Check] = RUN
        subject: Run | Machine = find_run(Machine(os.environ).run_root, options.run_dir, "--run")
    elif recipe_name(options) is None and options.flags:
        fix = "name the recipe it belongs to, right after doctor"
        raise config_error(options.flags[0], "is not an option of grpo doctor", fix)
    else:
        recipe: Recipe | None = None
        try:
            recipe = chosen_recipe(options) if recipe_name(options) is not None else None
        except ConfigError as error:  # the machine is looked at all the same
            results["recipe"] = finding_of(error)
        patience = _DEEP_PATIENCE if deep else _PATIENCE
        subject = Case(os.environ, recipe, patience) if recipe else Machine(os.environ, None, patience)
        checks = [*MACHINE, *(DEEP if deep else ()), *(RECIPE if recipe else ())]
    results |= examine(checks, subject, _DEEP_SECONDS if deep else _SECONDS)
    statuses = [found.status for found in results.values()]
    problems = statuses.count(PROBLEM)
    if options.json:
        rows = [{"name": name, **asdict(found)} for name, found in results.items()]
        print(json.dumps({"problems": problems, "warnings": statuses.count(WARNING), "checks": rows}, indent=1))
    else:
        print(as_text(results))
    return EXIT_CONFIG_ERROR if problems else 0
