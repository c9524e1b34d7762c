"""The commands that start runs and report on them: launch, submit, sweep, compare, report."""

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_recipes.cli import Option, command, option, recipe_name, switch
from grpo_recipes.cli.follow import named_run
from grpo_recipes.cli.nodes import NODE_OPTIONS, read_nodes, reject_other_launchers
from grpo_recipes.console.report.pages import write_comparison, write_report
from grpo_recipes.console.sweep.compare import MODES, Contest
from grpo_recipes.console.sweep.compare import compare as compare_modes
from grpo_recipes.console.sweep.folder import (
    COMPARISON,
    FOLDER,
    RECORD,
    REWARD,
    find_sweep,
    read_comparison,
    read_sweep,
    text_table,
    write_sweep,
)
from grpo_recipes.console.sweep.run import Backend, run_task, start, start_again
from grpo_recipes.console.sweep.spec import MOST_TRIALS, Search, SweepSpec, is_axis, read_axes, read_space
from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.launch.resolve import Options
from grpo_recipes.launch.run import launch as launch_run
from grpo_recipes.launch.submission import need_environment, prepare, send, site_profile
from grpo_recipes.paths import shown
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import catalogue, run_root
from grpo_recipes.slurm.client import slurm_job
from grpo_recipes.slurm.profile import KEYS, Profile

# Keys of a profile that the command line may give instead.
OVERRIDES = ("account", "partition", "time", "nodes", "gpus", "mem", "cpus", "qos", "constraint", "exclude")


@command(
    "run a recipe",
    option("--resume", metavar="DIR|last", help="continue a run"),
    switch("--allow-changed-code", help="resume though the code changed"),
    switch("--update-rewards", help="with --resume: use the files of your rewards as they are now"),
    switch("--dry-run", help="print argv and environment of every process"),
    switch("--benchmark", help="end with seconds and memory of steps and weight transfers; benchmark.json has them"),
    *NODE_OPTIONS,
    takes_recipe=True,
)
def launch(options: argparse.Namespace) -> int:
    """Run a recipe, or continue a run; return the run's exit code."""
    reject_other_launchers("grpo launch RECIPE --num_processes", os.environ)
    nodes = read_nodes(options, slurm_job(os.environ))
    os.environ.update(nodes.variables)
    return launch_run(launch_options(options, recipe_name(options), options.flags, nodes.meeting, nodes.keys))


def launch_options(
    options: argparse.Namespace, recipe: str | None, flags: Sequence[str], meeting: Meeting | None = None,
    keys: Mapping[str, Value] | None = None,
) -> Options:  # fmt: skip
    """Return the options of `grpo launch` for a command line, with a recipe, recipe keys and flags."""
    return Options(
        recipe=recipe, task=options.task, resume=options.resume, allow_changed_code=options.allow_changed_code,
        update_rewards=options.update_rewards, dry_run=options.dry_run, benchmark=options.benchmark,
        keys=dict(keys or {}), flags=tuple(flags), meeting=meeting,
    )  # fmt: skip


def _site_options(required: bool) -> list[Option]:
    """Return --profile and the options that replace values of the profile."""
    about = "the site, e.g. slurm/profiles/cpu.yaml"
    texts = {key: str(KEYS[key]["help"]).replace("`", "") for key in OVERRIDES}
    instead = [(key, f"instead of the profile's: {text}") for key, text in texts.items()]
    return [
        option("--profile", required=required, metavar="FILE|NAME", help=about),
        *(option(f"--{key}", metavar=key.upper(), help=text) for key, text in instead),
    ]


def _chosen_profile(options: argparse.Namespace) -> Profile:
    """Return the site's profile with what the command line gives in place of its values."""
    given = {key: text for key in OVERRIDES if (text := getattr(options, key)) is not None}
    return site_profile(options.profile, os.environ).with_values(given)


@command(
    "check a recipe, freeze it and give it to Slurm",
    *_site_options(required=True),
    switch("--dry-run", help="print the batch script; write and submit nothing"),
    takes_recipe=True,
)
def submit(options: argparse.Namespace) -> int:
    """Submit a run, or with ``--dry-run`` print its batch script alone to stdout, so that a file can keep it."""
    profile = _chosen_profile(options)
    if not options.dry_run:
        need_environment(profile)
    submission, estimates = prepare(profile, recipe_name(options), options.task, options.flags, os.environ)
    plan, kind = submission.plan, f" {profile.gpu_kind}" if profile.gpu_kind else ""
    devices = f"{profile.gpus}{kind} GPUs" if profile.gpus else f"{profile.cpus or 1} CPU cores"
    nodes = f"{profile.nodes} nodes" if profile.nodes > 1 else "1 node"
    lines = [
        f"{shown(plan.recipe)} for {profile.name}: {nodes} with {devices} each, at most {profile.time}",
        f"batch {plan.batch}",
        f"vllm {plan.vllm}",
        *estimates.lines(),
        *(f"note: {note}" for note in plan.notes),
    ]
    print(*(f"grpo: {line}" for line in lines), sep="\n", file=sys.stderr if options.dry_run else sys.stdout)
    if options.dry_run:
        try:
            need_environment(profile)
        except ConfigError as error:
            print(f"grpo: note: submitting would end here: {error}", file=sys.stderr)
        print(submission.script(profile), end="")
        return 0
    made, job = send(submission, profile)
    print(f"grpo: job {job} is submitted, run directory {shown(made.folder)}")
    print(f"grpo: follow it with grpo status {job}, or grpo logs -f {job}; end it with grpo stop {job}")
    return 0


@command(
    "run a recipe at several values of some keys, and compare",
    option("--max-parallel", type=int, metavar="N", help="with --slurm: tasks that run at the same time"),
    *_site_options(required=False),
    option("--name", help="name of the sweep; the run name or the recipe's by default"),
    option("--resume", metavar="DIR|last", help="run what is not completed in a sweep"),
    switch("--new", help="begin anew though the same sweep is not completed"),
    option("--search", choices=["optuna"], help="have Optuna choose the values, one run after the other"),
    option("--trials", type=int, metavar="N", help="with --search: runs in all"),
    option("--metric", metavar="NAME", help=f"with --search: what is to be high, e.g. eval_reward ({REWARD})"),
    switch("--dry-run", help="check and list the runs; write and start nothing"),
    option("--cell", type=Path, help=argparse.SUPPRESS),  # a task of the array job
    exclusive=(
        switch("--local", help="run one after the other on this machine (the default)"),
        switch("--slurm", help="submit one array job, a task for each run"),
    ),
    takes_recipe=True,
    usage="[RECIPE] KEY=V1,V2 [KEY=1..3 ...] [options] [--KEY VALUE ...]",
    epilog="KEY=V1,V2 varies a recipe key, KEY=1..3 over whole numbers; with --search, KEY=1e-6..1e-4 and "
    "KEY=log:1e-6..1e-4 are ranges. --KEY VALUE sets a key for all runs.",
)
def sweep(options: argparse.Namespace) -> int:
    """Run a sweep, or submit it, or continue one.

    Return 0, or the exit code of the first run that did not complete; 75 where a signal left runs over.
    """
    if options.cell:
        return run_task(options.cell, os.environ)
    backend = sweep_backend(options)
    words, flags = _split(options)
    if options.resume is not None:
        if words or flags or options.recipe or options.config or options.name or options.new or options.search:
            fix = "leave out recipe, keys, --name, --new and --search"
            raise config_error("--resume", "a sweep goes on as it began", fix)
        if options.dry_run:
            raise config_error("--dry-run", "changes nothing with --resume", "ask grpo status for the runs of a sweep")
        return start_again(find_sweep(run_root(os.environ) / FOLDER, options.resume), backend, os.environ)
    if options.name is not None:
        flags = ["--run_name", options.name, *flags]
    axes, search = read_search(options, words, flags)
    spec = SweepSpec(recipe_name(options), axes, flags, options.task, search)
    return start(spec, backend, os.environ, options.new, options.dry_run)


def read_search(
    options: argparse.Namespace, words: Sequence[str], flags: Sequence[str]
) -> tuple[dict[str, list[str]], Search | None]:
    """Read the words that say what is varied, in every combination or by a search."""
    if not options.search:
        return read_axes(words, flags), None
    axes, spans = read_space(words, flags)
    count = math.prod(map(len, axes.values()))
    if not spans and options.trials > count:
        fix = f"write --trials {count}, or run them all without --search"
        raise config_error("--trials", f"is {options.trials}, and there are {count} combinations", fix)
    return axes, Search(options.trials, options.metric or REWARD, spans)


def sweep_backend(options: argparse.Namespace) -> Backend:
    """Return where a sweep runs; refuse options that need others which are missing."""
    given = [name for name in ("profile", *OVERRIDES, "max_parallel") if getattr(options, name) is not None]
    problems = []
    if options.slurm and options.profile is None:
        problems.append(Problem("--slurm", "no site is named", "add --profile slurm/profiles/SITE.yaml"))
    if not options.slurm:
        what, fix = "changes nothing without --slurm", "add --slurm, or remove it"
        problems += [Problem(f"--{name.replace('_', '-')}", what, fix) for name in given]
    if options.max_parallel is not None and options.max_parallel < 1:
        problems.append(Problem("--max-parallel", f"is {options.max_parallel}", "write 1 or more"))
    if options.search and options.trials is None:
        problems.append(Problem("--search", "does not say how many runs", "add --trials N"))
    if options.search and options.slurm:
        what, fix = "chooses each run by those before it, so no array job can run them", "remove --slurm; in a job of"
        problems.append(Problem("--search", what, f"{fix} yours (salloc, sbatch) the runs have its devices"))
    if not options.search:
        what, fix = "changes nothing without --search", "add --search optuna, or remove it"
        given = [name for name in ("trials", "metric") if getattr(options, name) is not None]
        problems += [Problem(f"--{name}", what, fix) for name in given]
    elif options.trials is not None and not 1 <= options.trials <= MOST_TRIALS:
        problems.append(Problem("--trials", f"is {options.trials}", f"write 1 to {MOST_TRIALS:,}"))
    if problems:
        raise ConfigError(*problems)
    return Backend(_chosen_profile(options) if options.slurm else None, options.max_parallel)


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
    "run a recipe with several weight bridges side by side, and end in one table",
    option("--modes", required=True, metavar="M1,M2", help=f"two or more of {', '.join(MODES)}"),
    option("--steps", type=int, metavar="N", help="steps of each mode; by default as the recipe says"),
    option("--jobs", type=int, metavar="N", help="modes that run at the same time, each on GPUs of its own (all)"),
    takes_recipe=True,
)
def compare(options: argparse.Namespace) -> int:
    """Compare; return 0, 1 where a mode failed, 75 where a signal ended it."""
    flags = tuple(options.flags)
    contest = Contest(recipe_name(options), options.task, flags, options.modes, options.steps, options.jobs)
    return compare_modes(contest, os.environ)


@command(
    "write report.html of a run, or a page that compares several, a sweep or a comparison",
    option("runs", nargs="+", metavar="RUN", help="directory of a run, sweep or comparison, or last, the newest run"),
    option("--out", type=Path, metavar="FILE", help="the page; by default report.html in the run, or here"),
)
def report(options: argparse.Namespace) -> int:
    """Write the page of a run, of several compared, of a sweep, or of the modes of a comparison."""
    folders = [named_run(which).folder if which == "last" else Path(which) for which in options.runs]
    if len(folders) == 1 and os.path.isfile(folders[0] / COMPARISON):
        comparison, options.out = read_comparison(folders[0]), options.out or folders[0] / "report.html"
        folders = [comparison.trial_dir(index) for index in range(len(comparison.names))]
    fix = "name a file you may write"
    with translate(OSError, lambda error: config_error("--out", f"cannot write the page ({error.strerror})", fix)):
        if len(folders) == 1 and os.path.isfile(folders[0] / RECORD):
            found = read_sweep(folders[0])
            page, results = write_sweep(found, options.out)
            print(text_table(found, results))
        elif len(folders) == 1:
            page = write_report(folders[0], options.out)
        else:
            page = write_comparison(folders, options.out or Path("report.html"))
    print(f"grpo: {shown(page)}")
    return 0
