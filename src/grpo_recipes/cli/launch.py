"""`grpo launch`: run a recipe."""

from __future__ import annotations

import argparse

from grpo_recipes.cli.recipes import add_recipe_arguments, recipe_name
from grpo_recipes.launch.resolve_run import Options
from grpo_recipes.launch.run import launch

HELP = "run a recipe"
TAKES_RECIPE = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--resume, --allow-changed-code and --dry-run, beside the recipe's."""
    add_recipe_arguments(parser)
    parser.add_argument("--resume", metavar="DIR|last", help="continue a run")
    parser.add_argument("--allow-changed-code", action="store_true", help="resume though the code changed")
    parser.add_argument("--dry-run", action="store_true", help="print argv and environment of every process")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Run a recipe, or continue a run.

    Returns:
        The exit code of the run.

    Raises:
        ConfigError: before anything was started.
    """
    return launch(
        Options(
            recipe=recipe_name(options),
            task=options.task,
            resume=options.resume,
            allow_changed_code=options.allow_changed_code,
            dry_run=options.dry_run,
            flags=tuple(flags),
        )
    )
