"""The command that compares the ways for new weights to reach vLLM: compare."""

import argparse
import os

from grpo_recipes.cli import command, option, recipe_name
from grpo_recipes.sweep.compare import MODES, Contest
from grpo_recipes.sweep.compare import compare as compare_modes


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
