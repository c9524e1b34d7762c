"""The commands for several runs at once: sweep, report."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from grpo_recipes.cli import command, option, recipe_name, switch
from grpo_recipes.cli.runs import chosen_profile, named_run, overrides, run_root, site_options
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import shown
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.report.compare import write_comparison
from grpo_recipes.report.single import write_report
from grpo_recipes.sweep.folder import FOLDER, find_sweep, is_sweep, read_sweep
from grpo_recipes.sweep.results import text_table, write_sweep
from grpo_recipes.sweep.run import Backend, run_task, start, start_again
from grpo_recipes.sweep.spec import SweepSpec, is_axis, read_axes


@command(
    "run a recipe at several values of some keys, and compare",
    option("--max-parallel", type=int, metavar="N", help="with --slurm: tasks that run at the same time"),
    *site_options(required=False),
    option("--name", help="name of the sweep; the run name or the recipe's by default"),
    option("--resume", metavar="DIR|last", help="run what is not completed in a sweep"),
    switch("--new", help="begin anew though the same sweep is not completed"),
    option("--cell", type=Path, help=argparse.SUPPRESS),  # a task of the array job
    exclusive=(
        switch("--local", help="run one after the other on this machine (the default)"),
        switch("--slurm", help="submit one array job, a task for each run"),
    ),
    takes_recipe=True,
    usage="[RECIPE] KEY=V1,V2 [KEY=1..3 ...] [options] [--KEY VALUE ...]",
    epilog="KEY=V1,V2 varies a recipe key, KEY=1..3 over whole numbers; --KEY VALUE sets one for all runs.",
)
def sweep(options: argparse.Namespace) -> int:
    """Run a sweep, or submit it, or continue one.

    Return 0, or the exit code of the first run that did not complete; 75 where a signal left runs over.
    """
    if options.cell:
        return run_task(options.cell, os.environ)
    _check(options)
    backend = Backend(chosen_profile(options) if options.slurm else None, options.max_parallel)
    words, flags = _split(options)
    if options.resume is not None:
        if words or flags or options.recipe or options.config or options.name or options.new:
            raise config_error("--resume", "a sweep goes on as it began", "leave out recipe, keys, --name and --new")
        return start_again(find_sweep(run_root() / FOLDER, options.resume), backend, os.environ)
    if options.name is not None:
        flags = ["--run_name", options.name, *flags]
    spec = SweepSpec(recipe_name(options), read_axes(words, flags), flags, options.task)
    return start(spec, backend, os.environ, options.new)


def _check(options: argparse.Namespace) -> None:
    """Refuse options that need others which are missing."""
    given = [*(["profile"] if options.profile is not None else []), *overrides(options)]
    given += ["max-parallel"] if options.max_parallel is not None else []
    problems = []
    if options.slurm and options.profile is None:
        problems.append(Problem("--slurm", "no site is named", "add --profile slurm/profiles/SITE.yaml"))
    if not options.slurm:
        what, fix = "changes nothing without --slurm", "add --slurm, or remove it"
        problems += [Problem(f"--{name}", what, fix) for name in given]
    if options.max_parallel is not None and options.max_parallel < 1:
        problems.append(Problem("--max-parallel", f"is {options.max_parallel}", "write 1 or more"))
    if problems:
        raise ConfigError(*problems)


def _split(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the words before the first flag, and the flags; the first word may be in the recipe's place."""
    first = next((place for place, word in enumerate(options.flags) if word.startswith("-")), len(options.flags))
    words, flags = options.flags[:first], options.flags[first:]
    if options.recipe and is_axis(options.recipe) and not os.path.isfile(options.recipe):
        words.insert(0, options.recipe)
        options.recipe = None
    late = next((word for word in flags if is_axis(word) and word.partition("=")[0] in catalogue()), None)
    if late:
        raise config_error(late, "follows a flag", f"write {late} before the flags")
    return words, flags


@command(
    "write report.html of a run, or a page that compares several or a sweep",
    option("runs", nargs="+", metavar="RUN", help="run or sweep directory, or last for RUN_ROOT's newest run"),
    option("--out", type=Path, metavar="FILE", help="the page; by default report.html in the run, or here"),
)
def report(options: argparse.Namespace) -> int:
    """Write the page of a run, of several compared, or of a sweep."""
    folders = [named_run(which).folder if which == "last" else Path(which) for which in options.runs]
    try:
        if len(folders) == 1 and is_sweep(folders[0]):
            found = read_sweep(folders[0])
            page, results = write_sweep(found, options.out)
            print(text_table(found, results))
        elif len(folders) == 1:
            page = write_report(folders[0], options.out)
        else:
            page = write_comparison(folders, options.out or Path("report.html"))
    except OSError as error:
        raise config_error("--out", f"cannot write the page ({error.strerror})", "name a file you may write") from None
    print(f"grpo: {shown(page)}")
    return 0
