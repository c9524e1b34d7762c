"""The commands that start runs: `grpo launch` and `grpo submit`."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_recipes.cli import Option, command, option, recipe_name, switch
from grpo_recipes.cli.nodes import NODE_OPTIONS, read_nodes, reject_other_launchers
from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.rendezvous import Meeting
from grpo_recipes.launch.resolve import Options
from grpo_recipes.launch.run import launch as launch_run
from grpo_recipes.launch.submission import (
    prepare_submissions,
    read_site_profile,
    require_environment,
    submit_run,
)
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.slurm.client import read_slurm_job, require_sbatch
from grpo_recipes.slurm.profile import KEYS, Profile

# Keys of a profile that options of the command line can replace.
OVERRIDES = ("account", "partition", "time", "nodes", "gpus", "mem", "cpus", "qos", "constraint", "exclude")


@command(
    "Run a recipe",
    option("--resume", metavar="DIR|last", help="Resume a run"),
    switch("--allow-changed-code", help="Resume even if the code changed"),
    switch("--update-rewards", help="With --resume: use the current files of your rewards"),
    switch("--dry-run", help="Print argv and environment of every process without starting them"),
    switch("--benchmark", help="Print time and memory of steps and weight transfers, and write benchmark.json"),
    *NODE_OPTIONS,
    takes_recipe=True,
    takes_several=True,
    usage="[RECIPE ...] [options] [--KEY VALUE ...]",
)
def launch(options: argparse.Namespace) -> int:
    """Run a recipe, or several in order, or resume a run; return the exit code of the last run."""
    reject_other_launchers("grpo launch RECIPE --num_processes", os.environ)
    nodes = read_nodes(options, read_slurm_job(os.environ))
    os.environ.update(nodes.variables)
    launched = launch_options(options, recipe_name(options), options.flags, nodes.meeting, nodes.keys)
    return launch_run(replace(launched, then=options.then))


def launch_options(
    options: argparse.Namespace, recipe: str | None, flags: Sequence[str], meeting: Meeting | None = None,
    keys: Mapping[str, Value] | None = None,
) -> Options:  # fmt: skip
    """Return the options of a launch for a command line, a recipe, recipe keys and flags.

    ``recipe`` and ``flags`` replace the values in ``options``. Recipes that follow (``then``) are left out. ``keys``
    are recipe keys that other flags of the command line set, and ``meeting`` is where nodes started by hand meet.
    """
    return Options(
        recipe=recipe, task=options.task, resume=options.resume, allow_changed_code=options.allow_changed_code,
        update_rewards=options.update_rewards, dry_run=options.dry_run, benchmark=options.benchmark,
        keys=dict(keys or {}), flags=tuple(flags), meeting=meeting,
    )  # fmt: skip


def site_options(required: bool) -> list[Option]:
    """Return --profile and the options that replace values of the profile; ``required`` makes it mandatory."""
    texts = {key: str(KEYS[key]["help"]).replace("`", "") for key in OVERRIDES}
    return [
        option("--profile", required=required, metavar="FILE|NAME", help="Site profile, e.g. slurm/profiles/cpu.yaml"),
        *(
            option(f"--{key}", metavar=key.upper(), help=f"Replace the profile's value: {text}")
            for key, text in texts.items()
        ),
    ]


def chosen_profile(options: argparse.Namespace) -> Profile:
    """Return the site's profile, with the values of the command line; ``options.profile`` must not be None.

    Raise ConfigError if there is no such profile, or if a value is not valid.
    """
    values = {key: text for key in OVERRIDES if (text := getattr(options, key)) is not None}
    return read_site_profile(options.profile, os.environ).with_values(values)


@command(
    "Check a recipe, freeze it and submit it to Slurm; more recipes become jobs that follow",
    *site_options(required=True),
    switch("--dry-run", help="Print the batch script without writing or submitting anything"),
    takes_recipe=True,
    takes_several=True,
    usage="[RECIPE ...] [options] [--KEY VALUE ...]",
)
def submit(options: argparse.Namespace) -> int:
    """Submit a run, or a job for each of several runs that start from the model of the run before.

    Return 0. With ``--dry-run``, print the batch scripts to stdout and all other lines to stderr.
    Raise ConfigError before anything is submitted if a check fails. With ``--dry-run``, an unsuitable Python
    environment only prints a note.
    """
    profile = chosen_profile(options)
    if not options.dry_run:
        require_environment(profile)
        require_sbatch()
    recipes = [recipe_name(options), *options.then]
    prepared = prepare_submissions(profile, recipes, options.task, options.flags, os.environ)
    kind = f" {profile.gpu_kind}" if profile.gpu_kind else ""
    devices = f"{profile.gpus}{kind} GPUs" if profile.gpus else f"{profile.cpus or 1} CPU cores"
    nodes = f"{profile.nodes} nodes" if profile.nodes > 1 else "1 node"
    for submission, estimates in prepared:
        plan = submission.plan
        lines = [
            f"{display_path(plan.recipe)} for {profile.name}: {nodes} with {devices} each, at most {profile.time}",
            f"batch {plan.batch}",
            f"vllm {plan.vllm}",
            *estimates.lines(),
            *(f"note: {note}" for note in plan.notes),
        ]
        print(*(f"grpo: {line}" for line in lines), sep="\n", file=sys.stderr if options.dry_run else sys.stdout)
    if options.dry_run:
        try:
            require_environment(profile)
        except ConfigError as error:
            print(f"grpo: note: submitting would fail: {error}", file=sys.stderr)
        print(*(submission.script(profile) for submission, _ in prepared), sep="", end="")
        return 0
    job = None
    for submission, _ in prepared:
        run, new_job = submit_run(submission, profile, job)
        waits = f", starts after the success of job {job}" if job is not None else ""
        print(f"grpo: submitted job {new_job}, run directory {display_path(run.folder)}{waits}")
        job = new_job
    # A job's number is only known in RUN_ROOT. The recipe or the profile may set another folder of runs.
    is_known = os.path.realpath(run.folder.parent) == os.path.realpath(run_root(os.environ))
    name = str(job) if is_known else shell_path(run.folder)
    print(f"grpo: follow it with grpo status {name}, or grpo logs -f {name}; stop it with grpo stop {name}")
    return 0
