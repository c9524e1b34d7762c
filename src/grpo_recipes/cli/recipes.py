"""What the commands that take a recipe share."""

from __future__ import annotations

import argparse
import os

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.plan.devices import environment_flavour
from grpo_recipes.plan.plan import choose_recipe
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import checked_recipe
from grpo_recipes.recipe.tasks import GRPO, MAXENT, requested_task

USAGE = "[RECIPE] [options] [--KEY VALUE ...]"
EPILOG = "Any recipe key is a flag too, e.g. --learning_rate 1e-6: flag > environment variable > YAML > default."


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name the recipe and its trainer."""
    parser.add_argument("--config", metavar="RECIPE", help="the recipe; by default CONFIG, or the flavour's own")
    parser.add_argument(
        "--task", choices=[GRPO, MAXENT], help="the trainer (MAXENT=1 selects maxent, and so does a MaxEnt recipe)"
    )


def recipe_name(options: argparse.Namespace) -> str | None:
    """The recipe named on the command line, or None.

    Raises:
        ConfigError: two are named, or an empty name, as of a variable that is not set.
    """
    if "" in (options.recipe, options.config):
        raise ConfigError(Problem("RECIPE", "an empty text names no recipe", "name a .yaml file, or leave it out"))
    if options.recipe and options.config:
        raise ConfigError(Problem("--config", "two recipes are named", "name one"))
    return options.recipe or options.config


def chosen_recipe(options: argparse.Namespace, flags: list[str]) -> Recipe:
    """The recipe of this command line and environment, merged, typed and checked.

    Raises:
        ConfigError: it does not exist, or is wrong.
    """
    asked = requested_task(os.environ, options.task)
    path = choose_recipe(recipe_name(options), os.environ, asked.task or GRPO, environment_flavour())
    return checked_recipe(path, flags, os.environ, asked)
