"""What a command of `grpo` is made of, and what the commands that take a recipe share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import resolve_recipe
from grpo_recipes.recipe.tasks import GRPO, MAXENT

USAGE = "[RECIPE] [options] [--KEY VALUE ...]"
EPILOG = "Any recipe key is a flag too, e.g. --learning_rate 1e-6: flag > environment variable > YAML > default."


Option = tuple[tuple[str, ...], dict[str, Any]]  # names and settings of an ``add_argument`` of argparse


@dataclass(frozen=True)
class Command:
    """A command of `grpo`; ``run`` gets its options, with the recipe flags in ``options.flags``."""

    help: str
    run: Callable[[argparse.Namespace], int]
    options: tuple[Option, ...]
    exclusive: tuple[Option, ...]  # of which only one may be given
    takes_recipe: bool
    usage: str
    epilog: str

    @property
    def name(self) -> str:
        """The name on the command line: that of the function."""
        return self.run.__name__.replace("_", "-")

    def add_to(self, commands: Any) -> None:
        """Add the command to argparse's subparsers."""
        about = {"help": self.help, "description": self.help}
        if self.takes_recipe:
            about |= {"usage": f"grpo {self.name} {self.usage}", "epilog": self.epilog}
        parser = commands.add_parser(self.name, allow_abbrev=False, **about)
        for names, settings in (*(_RECIPE_OPTIONS if self.takes_recipe else ()), *self.options):
            parser.add_argument(*names, **settings)
        if self.exclusive:  # argparse refuses to print the usage of an empty group
            group = parser.add_mutually_exclusive_group()
            for names, settings in self.exclusive:
                group.add_argument(*names, **settings)
        parser.set_defaults(command=self)


def option(*names: str, **settings: Any) -> Option:
    """Return an option or argument of a command, in the words of argparse."""
    return names, settings


def switch(*names: str, help: str) -> Option:
    """Return an option without a value."""
    return option(*names, action="store_true", help=help)


_RECIPE_OPTIONS = (
    option("--config", metavar="RECIPE", help="the recipe; by default CONFIG, or the default of the device"),
    option("--task", choices=[GRPO, MAXENT], help="the trainer (MAXENT=1 selects maxent, and so does a MaxEnt recipe)"),
)


def command(
    help: str,
    *options: Option,
    exclusive: tuple[Option, ...] = (),
    takes_recipe: bool = False,
    usage: str = USAGE,
    epilog: str = EPILOG,
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make a function a command of `grpo`; every ``ConfigError`` it raises ends in exit code 2."""
    return lambda run: Command(help, run, options, exclusive, takes_recipe, usage, epilog)


def recipe_name(options: argparse.Namespace) -> str | None:
    """Return the recipe named on the command line, or None; two names or an empty one are a ``ConfigError``."""
    if "" in (options.recipe, options.config):  # as of a variable that is not set
        raise config_error("RECIPE", "an empty text names no recipe", "name a .yaml file, or leave it out")
    if options.recipe and options.config:
        raise config_error("--config", "two recipes are named", "name one")
    return options.recipe or options.config


def chosen_recipe(options: argparse.Namespace, device: str | None = None) -> Recipe:
    """Return the recipe of this command line and environment: merged, typed and checked."""
    name, device = recipe_name(options), device or environment_device()
    return resolve_recipe(name, options.task, options.flags, os.environ, device)
