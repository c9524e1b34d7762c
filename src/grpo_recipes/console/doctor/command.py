"""`grpo doctor`: check this machine, a recipe on it, or the end of a run, and print fixes."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict

from grpo_recipes.cli import chosen_recipe, command, option, recipe_name, switch
from grpo_recipes.cli.display import print_labelled
from grpo_recipes.console.doctor import DEEP, MACHINE, RECIPE, RUN
from grpo_recipes.console.doctor.examine import MARK_WIDTH, Check, Machine, examine, format_findings, make_error_finding
from grpo_recipes.console.doctor.recipes import Case
from grpo_recipes.errors import EXIT_CONFIG_ERROR, ConfigError, config_error
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding
from grpo_recipes.runs.rundir import Run, find_run

# Time limits of all checks together, and of each program that a check runs; --deep includes imports.
_SECONDS, _PROGRAM_SECONDS = 8.0, 3.0
_DEEP_SECONDS, _DEEP_PROGRAM_SECONDS = 150.0, 120.0


@command(
    "Check this machine, a recipe on it, or the end of a run, and print fixes",
    option("--run", metavar="RUN_DIR|last", dest="run_dir", help="Explain how this run ended instead"),
    switch("--deep", help="Also import torch, TRL and vLLM (takes a minute)"),
    switch("-v", "--verbose", help="Also print the checks without a finding"),
    switch("--json", help="Print the results as JSON"),
    takes_recipe=True,
)
def doctor(options: argparse.Namespace) -> int:
    """Run the checks and print a finding for each, as text or with --json; return 2 if there is a problem, otherwise 0.

    The checks examine the machine and, if a recipe is given, the recipe on it. With --run, they examine only the end of
    that run. Raise ConfigError for options that can't be combined.
    """
    deep = options.deep and options.run_dir is None
    results: dict[str, Finding] = {}
    if options.run_dir is not None:
        if recipe_name(options) or options.flags:
            raise config_error("--run", "a run has its own recipe", "leave out the recipe and its flags")
        checks: Sequence[Check] = RUN
        subject: Run | Machine = find_run(Machine(os.environ).run_root, options.run_dir, "--run")
    elif recipe_name(options) is None and options.flags:
        fix = "put the recipe of this flag right after doctor"
        raise config_error(options.flags[0], "not an option of grpo doctor", fix)
    else:
        recipe: Recipe | None = None
        try:
            recipe = chosen_recipe(options) if recipe_name(options) is not None else None
        except ConfigError as error:  # check the machine anyway
            results["recipe"] = make_error_finding(error)
        timeout = _DEEP_PROGRAM_SECONDS if deep else _PROGRAM_SECONDS
        subject = Case(os.environ, recipe, timeout) if recipe else Machine(os.environ, None, timeout)
        checks = [*MACHINE, *(DEEP if deep else ()), *(RECIPE if recipe else ())]
    results |= examine(checks, subject, _DEEP_SECONDS if deep else _SECONDS)
    statuses = [finding.status for finding in results.values()]
    problems = statuses.count(PROBLEM)
    if options.json:
        rows = [{"name": name, **asdict(finding)} for name, finding in results.items()]
        print(json.dumps({"problems": problems, "warnings": statuses.count(WARNING), "checks": rows}, indent=1))
    else:
        print_labelled(format_findings(results, options.verbose), MARK_WIDTH)
    return EXIT_CONFIG_ERROR if problems else 0
