"""`grpo submit`: check a recipe, freeze it and give it to Slurm."""

from __future__ import annotations

import argparse
import os
import sys

from grpo_recipes.cli.recipes import add_recipe_arguments, recipe_name
from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.submission import Submission, need_environment, prepare, send, site_profile
from grpo_recipes.paths import shown
from grpo_recipes.slurm.profile import KEYS, Profile

HELP = "check a recipe, freeze it and give it to Slurm"
TAKES_RECIPE = True
# Keys of a profile that the command line may give instead.
OVERRIDES = ("account", "partition", "time", "nodes", "gpus", "mem", "cpus", "qos", "constraint", "exclude")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--profile, what stands over it, and --dry-run, beside the recipe's."""
    add_recipe_arguments(parser)
    add_site_arguments(parser, required=True)
    parser.add_argument("--dry-run", action="store_true", help="print the batch script; write and submit nothing")


def add_site_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """--profile, and what stands over it."""
    about = "the site, e.g. slurm/profiles/cpu.yaml"
    parser.add_argument("--profile", required=required, metavar="FILE|NAME", help=about)
    for key in OVERRIDES:
        about = str(KEYS[key]["help"]).replace("`", "")
        parser.add_argument(f"--{key}", metavar=key.upper(), help=f"instead of the profile's: {about}")


def overrides(options: argparse.Namespace) -> dict[str, str]:
    """What the command line gives in place of the profile's values."""
    return {key: text for key in OVERRIDES if (text := getattr(options, key)) is not None}


def chosen_profile(options: argparse.Namespace) -> Profile:
    """The site's profile with what the command line gives in place of its values.

    Raises:
        ConfigError: there is none, or something in either is wrong.
    """
    return site_profile(options.profile, os.environ).with_values(overrides(options))


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Submit a run, or with ``--dry-run`` print its batch script.

    Returns:
        0.

    Raises:
        ConfigError: recipe, profile or environment is wrong, something is missing here, or sbatch refuses.
    """
    profile = chosen_profile(options)
    if not options.dry_run:
        need_environment(profile)
    submission = prepare(profile, recipe_name(options), options.task, flags, os.environ)
    # A script alone goes to stdout, so that it can be kept in a file.
    for line in _plan_lines(submission):
        print(f"grpo: {line}", file=sys.stderr if options.dry_run else sys.stdout)
    if options.dry_run:
        _say_other_environment(submission)
        print(submission.script(), end="")
        return 0
    made, job = send(submission)
    print(f"grpo: job {job} is submitted, run directory {shown(made.folder)}")
    print(f"grpo: follow it with grpo status {job}, or grpo logs -f {job}; end it with grpo stop {job}")
    return 0


def _plan_lines(submission: Submission) -> list[str]:
    plan, profile = submission.plan, submission.profile
    kind = f" {profile.gpu_kind}" if profile.gpu_kind else ""
    devices = f"{profile.gpus}{kind} GPUs" if profile.gpus else f"{profile.cpus or 1} CPU cores"
    nodes = f"{profile.nodes} nodes" if profile.nodes > 1 else "1 node"
    return [
        f"{shown(plan.recipe)} for {profile.name}: {nodes} with {devices} each, at most {profile.time}",
        f"batch {plan.batch}",
        f"vllm {plan.mode}, weights by {plan.bridge or 'none'} ({plan.why_bridge})",
        *submission.estimates.lines(),
        *(f"note: {note}" for note in plan.notes),
    ]


def _say_other_environment(submission: Submission) -> None:
    """What a submission would be refused for though the script is right."""
    try:
        need_environment(submission.profile)
    except ConfigError as refused:
        print(f"grpo: note: submitting would end here: {refused}", file=sys.stderr)
