"""Additions of extensions to a plan: a description of their data, notes, problems, and processes with their own roles.

An extension subclasses ``Roles`` and names an object of that class as ``Extension.roles``. The plan calls every
installed extension. An extension that the recipe does not use adds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from grpo_recipes.errors import Problem
from grpo_recipes.plan.types import Data, Names, Plan, Process
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.extensions import parts


class Roles:
    """Additions to a plan; every method has a default that adds nothing."""

    def data(self, recipe: Recipe, plan: Plan) -> Data | None:
        """Describe the source of the prompts for the printed plan; None if they come from a dataset."""
        return None

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """Yield the problems that would end a run of this plan; its batch, ports and placement are decided."""
        yield from ()

    def notes(self, recipe: Recipe, plan: Plan) -> Iterator[str]:
        """Yield notes for the printed plan."""
        yield from ()

    def needs_server(self, recipe: Recipe) -> tuple[str, str] | None:
        """Return the reason for a vLLM server, e.g. ``("the judges need", "")``; None if co-located vLLM works too.

        The first text begins the error message and the second text is appended to the fix.
        """
        return None

    def samples_by_itself(self, recipe: Recipe) -> bool:
        """Return whether its processes send their own requests to the server."""
        return False

    def processes(self, recipe: Recipe, plan: Plan, names: Names) -> list[Process]:
        """Return the processes to add."""
        return []

    def server_variables(self, recipe: Recipe, names: Names) -> dict[str, str]:
        """Return environment variables for the vLLM server."""
        return {}

    def trainer_flags(self, recipe: Recipe, plan: Plan) -> Mapping[str, object]:
        """Return flags to pass to the trainers' entry script."""
        return {}

    def admit(self, recipe: Recipe, plan: Plan, names: Names) -> str | None:
        """Let the user's own processes reach the run, and return the command to start one; None if there are none.

        The launcher calls this before the server starts, and again if the server moves to another port.
        """
        return None

    def dismiss(self, run_dir: Path) -> None:
        """Undo ``admit``. The launcher calls this at the end of an attempt, even if it did not call ``admit``."""


def roles() -> Iterator[Roles]:
    """Yield the additions of every installed extension."""
    yield from parts("roles")


def data_of(recipe: Recipe, plan: Plan) -> Data | None:
    """Return the source of a plan's prompts; None if it reads datasets."""
    return next((data for part in roles() if (data := part.data(recipe, plan))), None)


def admit(recipe: Recipe, plan: Plan, names: Names) -> str | None:
    """Let the user's own processes reach the run, and return the command to start one; None if there are none."""
    return next((command for part in roles() if (command := part.admit(recipe, plan, names))), None)


def dismiss(run_dir: Path) -> None:
    """Undo ``admit`` for every extension."""
    for part in roles():
        part.dismiss(run_dir)
