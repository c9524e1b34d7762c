"""What an extension adds to a plan: a description of its data, notes, problems, and processes with their own roles.

An extension subclasses ``Roles`` and names one object as ``Extension.roles``. The plan asks every installed extension,
and an extension that the recipe does not use adds nothing.
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
        """Return where prompts come from if it is not a dataset, for people."""
        return None

    def problems(self, recipe: Recipe, plan: Plan) -> Iterator[Problem]:
        """Yield what keeps this plan from working, with batch, ports and placement decided."""
        yield from ()

    def notes(self, recipe: Recipe, plan: Plan) -> Iterator[str]:
        """Yield what is worth knowing about this plan."""
        yield from ()

    def needs_server(self, recipe: Recipe) -> tuple[str, str] | None:
        """Return who needs a vLLM server, e.g. ``("the judges need", "")``; None if vLLM may run inside the trainers.

        The second text is appended to the fix.
        """
        return None

    def samples_by_itself(self, recipe: Recipe) -> bool:
        """Return whether its processes send requests to the server beside those of the trainers."""
        return False

    def processes(self, recipe: Recipe, plan: Plan, names: Names) -> list[Process]:
        """Return its processes."""
        return []

    def server_variables(self, recipe: Recipe, names: Names) -> dict[str, str]:
        """Return environment variables for the vLLM server."""
        return {}

    def trainer_flags(self, recipe: Recipe, plan: Plan) -> Mapping[str, object]:
        """Return flags of the trainers' entry script that the launcher decides."""
        return {}

    def admit(self, recipe: Recipe, plan: Plan, names: Names) -> str | None:
        """Let processes that the user starts reach the run, and return the command that starts one; None if none may.

        It is called before the server starts, and again if the server moves to another port.
        """
        return None

    def dismiss(self, run_dir: Path) -> None:
        """Undo ``admit``; called when the attempt ends, also if ``admit`` was not called."""


def roles() -> Iterator[Roles]:
    """Yield the additions of every installed extension."""
    yield from parts("roles")


def data_of(recipe: Recipe, plan: Plan) -> Data | None:
    """Return where the prompts of a plan come from; None if it reads datasets."""
    return next((data for part in roles() if (data := part.data(recipe, plan))), None)


def admit(recipe: Recipe, plan: Plan, names: Names) -> str | None:
    """Let the user's processes reach the run, and return the command that starts one; None if none may."""
    return next((command for part in roles() if (command := part.admit(recipe, plan, names))), None)


def dismiss(run_dir: Path) -> None:
    """Take back what ``admit`` gave."""
    for part in roles():
        part.dismiss(run_dir)
