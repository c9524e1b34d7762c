"""`grpo doctor`: look at this machine, at a recipe on it, or at how a run ended, and say what to do."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from grpo_recipes.cli.recipes import add_recipe_arguments, chosen_recipe, recipe_name
from grpo_recipes.doctor.examine import DEEP, MACHINE, RECIPE, RUN, Result, as_text, examine
from grpo_recipes.doctor.machine import Machine
from grpo_recipes.doctor.recipes import Case
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error
from grpo_recipes.paths import shown
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.find import read_run
from grpo_recipes.runs.finding import PROBLEM, WARNING, Finding, problem

HELP = "look at this machine, a recipe on it, or how a run ended, and say what to do"
TAKES_RECIPE = True
# All checks together, and one program they ask; with --deep also imports.
_SECONDS, _PATIENCE = 4.0, 3.0
_DEEP_SECONDS, _DEEP_PATIENCE = 150.0, 120.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--run, --deep and --json, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--run", metavar="RUN_DIR|last", dest="run_dir", help="explain how this run ended instead")
    parser.add_argument("--deep", action="store_true", help="also import torch, TRL and vLLM (a minute)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Print what was found of the machine, a recipe on it, or a run.

    Returns:
        0, or 2 when there is a problem.

    Raises:
        ConfigError: the options contradict each other, or the run is none.
    """
    if options.run_dir is not None:
        results = _of_run(options, flags)
    else:
        results = _of_machine(options, flags)
    problems = sum(result.status == PROBLEM for result in results)
    if options.json:
        warnings = sum(result.status == WARNING for result in results)
        content = {"problems": problems, "warnings": warnings, "checks": [asdict(result) for result in results]}
        print(json.dumps(content, indent=1))
    else:
        print(as_text(results))
    return EXIT_CONFIG_ERROR if problems else 0


def _of_run(options: argparse.Namespace, flags: list[str]) -> list[Result]:
    if recipe_name(options) or flags:
        raise config_error("--run", "a run has its own recipe", "leave out the recipe and its flags")
    files = read_run(options.run_dir, Machine(os.environ).run_root)
    return examine([(check, files) for check in RUN], _SECONDS)


def _of_machine(options: argparse.Namespace, flags: list[str]) -> list[Result]:
    named = recipe_name(options) is not None
    if flags and not named:
        raise config_error(flags[0], "is no option of grpo doctor", "name the recipe it belongs to, right after doctor")
    recipe, wrong = _recipe(options, flags) if named else (None, None)
    seconds, patience = (_DEEP_SECONDS, _DEEP_PATIENCE) if options.deep else (_SECONDS, _PATIENCE)
    machine = Machine(os.environ, recipe, patience)
    looks: list[tuple[Callable[[Any], Finding], Any]] = [(wrong, machine)] if wrong else []
    looks += [(check, machine) for check in (*MACHINE, *(DEEP if options.deep else ()))]
    if recipe is not None:
        case = Case(machine, recipe, options.task)
        looks += [(check, case) for check in RECIPE]
    return examine(looks, seconds)


def _recipe(options: argparse.Namespace, flags: list[str]) -> tuple[Recipe | None, Callable[[Machine], Finding] | None]:
    """The recipe, or a check that tells what is wrong in it: the machine is looked at all the same."""
    try:
        return chosen_recipe(options, flags), None
    except ConfigError as refused:
        count, first = len(refused.problems), str(refused.problems[0])

    def recipe(_: Machine) -> Finding:
        """Whether the recipe is right."""
        return problem(
            first, f"grpo check tells all {count}" if count > 1 else f"see {shown(recipe_name(options) or '')}"
        )

    return None, recipe
