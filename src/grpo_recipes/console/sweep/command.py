"""The command `grpo sweep`: check its options, and start or resume a sweep.

``TranslatedSweep`` is the entry point for extensions that start a sweep from the options of another tool.
"""

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from grpo_recipes.cli import command, option, recipe_name, switch
from grpo_recipes.cli.runs import OVERRIDES, chosen_profile, site_options
from grpo_recipes.cli.sweeps import FlagsOf, Sweeper
from grpo_recipes.console.sweep.folder import FOLDER, REWARD, find_sweep
from grpo_recipes.console.sweep.run import Backend, resume_sweep, run_array_task, start_sweep
from grpo_recipes.console.sweep.spec import MAX_TRIALS, Search, SweepSpec, is_axis, read_axes, read_search_space
from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.plan.devices import Resources
from grpo_recipes.recipe.keys import catalogue, run_root
from grpo_recipes.slurm.client import require_sbatch


@command(
    "Run a recipe at several values of some keys, and compare",
    option("--max-parallel", type=int, metavar="N", help="With --slurm: limit of tasks that run at the same time"),
    *site_options(required=False),
    option("--name", help="Name of the sweep (default: run_name or the name of the recipe)"),
    option("--resume", metavar="DIR|last", help="Run the unfinished trials of a sweep"),
    switch("--new", help="Start a new sweep even if the same sweep is unfinished"),
    option("--search", choices=["optuna"], help="Let Optuna choose the values, one run after the other"),
    option("--trials", type=int, metavar="N", help="With --search: total number of runs"),
    option("--metric", metavar="NAME", help=f"With --search: metric to maximize, e.g. eval_reward (default: {REWARD})"),
    switch("--dry-run", help="Check and list the runs; write and start nothing"),
    option("--cell", type=Path, help=argparse.SUPPRESS),  # folder of the sweep, in a task of the array job
    exclusive=(
        switch("--local", help="Run one after the other on this machine (the default)"),
        switch("--slurm", help="Submit one array job with a task per run"),
    ),
    takes_recipe=True,
    usage="[RECIPE] KEY=V1,V2 [KEY=1..3 ...] [options] [--KEY VALUE ...]",
    epilog="KEY=V1,V2 varies a recipe key, and KEY=1..3 varies it over whole numbers. With --search, KEY=1e-6..1e-4 "
    "and KEY=log:1e-6..1e-4 are ranges. --KEY VALUE sets a key for all runs.",
)
def sweep(options: argparse.Namespace) -> int:
    """Start a sweep or continue an unfinished one; as a task of an array job, run one trial.

    Return 0, the exit code of the first run that did not complete, or 75 if a signal ended the sweep before all runs.
    Raise ConfigError for wrong options, keys or recipes.
    """
    if options.cell:
        return run_array_task(options.cell, os.environ)
    backend = choose_backend(options)
    # The words of the command line are axes (``KEY=VALUES``), and flags after them.
    first = next((index for index, word in enumerate(options.flags) if word.startswith("-")), len(options.flags))
    words, flags = options.flags[:first], options.flags[first:]
    if options.recipe and is_axis(options.recipe) and not os.path.isfile(options.recipe):
        words.insert(0, options.recipe)  # argparse has stored the first axis as the recipe
        options.recipe = None
    if late := next((word for word in flags if is_axis(word) and word.partition("=")[0] in catalogue()), None):
        raise config_error(late, "comes after a flag", f"put {late} before the flags")
    if options.resume is not None:
        if words or flags or options.recipe or options.config or options.name or options.new or options.search:
            fix = "leave out recipe, keys, --name, --new and --search"
            raise config_error("--resume", "a sweep continues with its recipe and keys", fix)
        if options.dry_run:
            fix = "leave it out; grpo status lists the runs of a sweep"
            raise config_error("--dry-run", "does nothing with --resume", fix)
        return resume_sweep(find_sweep(run_root(os.environ) / FOLDER, options.resume), backend, os.environ)
    if options.name is not None:
        flags = ["--run_name", options.name, *flags]
    axes, search = read_search(options, words, flags)
    spec = SweepSpec(recipe_name(options), axes, flags, options.task, search)
    return start_sweep(spec, backend, os.environ, options.new, options.dry_run)


def read_search(
    options: argparse.Namespace, words: Sequence[str], flags: Sequence[str]
) -> tuple[dict[str, list[str]], Search | None]:
    """Parse the words ``KEY=VALUES``; return the values of each key, and the settings of --search or else None.

    ``flags`` are the recipe flags of all runs. Raise ConfigError if a word is wrong, or if a search has more trials
    than there are combinations.
    """
    if not options.search:
        return read_axes(words, flags), None
    axes, spans = read_search_space(words, flags)
    count = math.prod(map(len, axes.values()))
    if not spans and options.trials > count:
        fix = f"use --trials {count}, or run them all without --search"
        raise config_error("--trials", f"{options.trials} is more than the {count} combinations", fix)
    return axes, Search(options.trials, options.metric or REWARD, spans)


def choose_backend(options: argparse.Namespace) -> Backend:
    """Check the options of `grpo sweep`, and return the place for its runs: this machine, or Slurm with --slurm.

    Raise ConfigError if options need other options, contradict them, or have wrong numbers.
    """
    problems = []
    if options.slurm and options.profile is None:
        problems.append(Problem("--slurm", "needs a site profile", "add --profile slurm/profiles/SITE.yaml"))
    if not options.slurm:
        names = [name for name in ("profile", *OVERRIDES, "max_parallel") if getattr(options, name) is not None]
        message, fix = "does nothing without --slurm", "add --slurm, or remove it"
        problems += [Problem(f"--{name.replace('_', '-')}", message, fix) for name in names]
    if options.max_parallel is not None and options.max_parallel < 1:
        problems.append(Problem("--max-parallel", f"expected 1 or more, got {options.max_parallel}", "use 1 or more"))
    if options.search and options.trials is None:
        problems.append(Problem("--search", "needs the number of runs", "add --trials N"))
    if options.search and options.slurm:
        message = (
            "can't be combined with --slurm: each run depends on the previous runs, which an array job can't wait for"
        )
        fix = "remove --slurm; inside your own job (salloc, sbatch), the runs use the job's devices"
        problems.append(Problem("--search", message, fix))
    if not options.search:
        names = [name for name in ("trials", "metric") if getattr(options, name) is not None]
        message, fix = "does nothing without --search", "add --search optuna, or remove it"
        problems += [Problem(f"--{name}", message, fix) for name in names]
    elif options.trials is not None and not 1 <= options.trials <= MAX_TRIALS:
        message = f"expected 1 to {MAX_TRIALS:,}, got {options.trials}"
        problems.append(Problem("--trials", message, f"use 1 to {MAX_TRIALS:,}"))
    if problems:
        raise ConfigError(*problems)
    profile = chosen_profile(options) if options.slurm else None
    if profile and not options.dry_run:
        require_sbatch()
    return Backend(profile, options.max_parallel)


class TranslatedSweep(Sweeper):
    """The sweeper that an extension uses to start a sweep from the options of another tool."""

    folder: ClassVar[str] = FOLDER

    def __init__(self, options: argparse.Namespace) -> None:
        """Check the options of a sweep; raise ConfigError if they are wrong or need others."""
        self._options, self._backend = options, choose_backend(options)
        self._search: Search | None = None

    @property
    def is_submitted(self) -> bool:
        """Whether the trials are Slurm jobs."""
        return self._backend.profile is not None

    def resources(self, environment: Mapping[str, str]) -> Resources:
        """Return the devices of a trial: the site's for an array job, else this machine's."""
        return self._backend.resources(environment)

    def axes(self, axes: Mapping[str, list[str]], flags: Sequence[str]) -> Mapping[str, list[str]]:
        """Return the values of each recipe key. In a search, a range such as ``1..5`` becomes the list of its two ends.

        ``axes`` maps recipe keys to texts. ``flags`` are the flags of all trials. The settings of a search are stored
        for ``start``. Raise ConfigError if a value or a setting is wrong.
        """
        if not self._options.search:
            return axes
        words = [f"{key}={','.join(texts)}" for key, texts in axes.items()]
        axes, self._search = read_search(self._options, words, flags)
        return axes

    def start(
        self,
        recipe: str,
        axes: Mapping[str, list[str]],
        flags: Sequence[str],
        flags_of: FlagsOf,
        elsewhere: Sequence[Path] = (),
    ) -> int:
        """Run or submit the trials, or continue the same unfinished sweep; return the exit code.

        ``flags_of`` translates the values of a trial to recipe flags. ``elsewhere`` are more folders in which to look
        for an unfinished sweep. Raise ConfigError if a recipe or plan is wrong.
        """
        options = self._options
        spec = SweepSpec(recipe, axes, flags, options.task, self._search, flags_of)
        return start_sweep(spec, self._backend, os.environ, options.new, options.dry_run, elsewhere)
