"""`grpo sweep`: run a recipe at several values of some of its keys, and compare."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from grpo_recipes.cli.recipes import add_recipe_arguments, recipe_name
from grpo_recipes.cli.runs import run_root
from grpo_recipes.cli.submit import add_site_arguments, chosen_profile, overrides
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.plan.plan import choose_recipe
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.tasks import GRPO, requested_task
from grpo_recipes.sweep.folder import FOLDER, Sweep, find_sweep
from grpo_recipes.sweep.run import Way, run_task, start, start_again
from grpo_recipes.sweep.spec import is_axis, read_axes
from grpo_recipes.sweep.trials import Question

HELP = "run a recipe at several values of some keys, and compare"
TAKES_RECIPE = True
_USAGE = "grpo sweep [RECIPE] KEY=V1,V2 [KEY=1..3 ...] [options] [--KEY VALUE ...]"
_EPILOG = "KEY=V1,V2 varies a recipe key, KEY=1..3 over whole numbers; --KEY VALUE sets one for all runs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the runs run, what the sweep is called, and how it goes on; beside the recipe's."""
    parser.usage, parser.epilog = _USAGE, _EPILOG
    add_recipe_arguments(parser)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="run one after the other on this machine (the default)")
    where.add_argument("--slurm", action="store_true", help="submit one array job, a task for each run")
    parser.add_argument("--max-parallel", type=int, metavar="N", help="with --slurm: tasks that run at the same time")
    add_site_arguments(parser, required=False)
    parser.add_argument("--name", help="name of the sweep; the run name or the recipe's by default")
    parser.add_argument("--resume", metavar="DIR|last", help="run what is not completed in a sweep")
    parser.add_argument("--new", action="store_true", help="begin anew though the same sweep is not completed")
    parser.add_argument("--cell", type=Path, help=argparse.SUPPRESS)  # a task of the array job


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Run a sweep, or submit it, or go on with one.

    Returns:
        0, or the exit code of the first run that did not complete; 75 where a signal left runs over.

    Raises:
        ConfigError: the command line, or the recipe of any run; nothing was written or started.
    """
    if options.cell:
        return run_task(options.cell, os.environ)
    _check(options)
    way = Way(chosen_profile(options) if options.slurm else None, options.max_parallel)
    words, flags = _split(options, flags)
    if options.resume is not None:
        if words or flags or options.recipe or options.config or options.name or options.new:
            raise config_error("--resume", "a sweep goes on as it began", "leave out recipe, keys, --name and --new")
        return start_again(_named(options.resume), way, os.environ)
    if options.name is not None:
        flags = ["--run_name", options.name, *flags]
    asked = requested_task(os.environ, options.task)
    path = choose_recipe(recipe_name(options), os.environ, asked.task or GRPO, way.resources(os.environ).flavour)
    return start(Question(path, read_axes(words, flags), flags, asked), way, os.environ, options.new)


def _check(options: argparse.Namespace) -> None:
    """Options that need one another."""
    problems = []
    given = ["profile", *overrides(options)] if options.profile is not None else [*overrides(options)]
    given += ["max-parallel"] if options.max_parallel is not None else []
    if options.slurm and options.profile is None:
        problems.append(Problem("--slurm", "no site is named", "add --profile slurm/profiles/SITE.yaml"))
    if not options.slurm:
        fix = "add --slurm, or remove it"
        problems += [Problem(f"--{name}", "changes nothing without --slurm", fix) for name in given]
    if options.max_parallel is not None and options.max_parallel < 1:
        problems.append(Problem("--max-parallel", f"is {options.max_parallel}", "write 1 or more"))
    if problems:
        raise ConfigError(*problems)


def _split(options: argparse.Namespace, flags: list[str]) -> tuple[list[str], list[str]]:
    """The words before the first flag, and the flags; the first word may stand in the recipe's place."""
    first = next((place for place, word in enumerate(flags) if word.startswith("-")), len(flags))
    words = flags[:first]
    if options.recipe and is_axis(options.recipe) and not os.path.isfile(options.recipe):
        words.insert(0, options.recipe)
        options.recipe = None
    late = next((word for word in flags[first:] if is_axis(word) and word.partition("=")[0] in catalogue()), None)
    if late:
        raise config_error(late, "stands behind a flag", f"write {late} before the flags")
    return words, flags[first:]


def _named(which: str) -> Sweep:
    return find_sweep(run_root() / FOLDER, which)
