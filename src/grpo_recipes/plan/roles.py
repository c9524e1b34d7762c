"""Let extensions add to a plan: processes with their own roles, checks, notes, and a description of their data.

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
        """Return whether processes of this extension send their own sampling requests to the vLLM server."""
        return False

    def processes(self, recipe: Recipe, plan: Plan, names: Names) -> list[Process]:
        """Return the processes that the launcher must start in addition to the server and the trainers."""
        return []

    def server_variables(self, recipe: Recipe, names: Names) -> dict[str, str]:
        """Return environment variables for the vLLM server."""
        return {}

    def trainer_flags(self, recipe: Recipe, plan: Plan) -> Mapping[str, object]:
        """Return flags to pass to the trainers' entry script."""
        return {}

    def admit(self, recipe: Recipe, plan: Plan, names: Names) -> str | None:
        """Write the files with which processes that the user starts can join the run, for example environments.

        Return the shell command to start such a process, or None if no process may join the run. The launcher calls
        this before the server starts, and again if the server moves to another port.
        """
        return None

    def dismiss(self, run_dir: Path) -> None:
        """Remove the files that ``admit`` wrote, so that no other process can join the run.

        The launcher calls this at the end of an attempt, even if it did not call ``admit``.
        """


def load_roles() -> Iterator[Roles]:
    """Import and yield the ``Roles`` object of every installed extension that has one."""
    yield from parts("roles")


def describe_data(recipe: Recipe, plan: Plan) -> Data | None:
    """Return the first extension's description of the source of prompts; None if all prompts come from a dataset."""
    return next((data for part in load_roles() if (data := part.data(recipe, plan))), None)


def write_access_files(recipe: Recipe, plan: Plan, names: Names) -> str | None:
    """Call ``Roles.admit`` of the extensions until one returns a command, and return this command, otherwise None.

    The command starts a process of the user that joins the run.
    """
    return next((command for part in load_roles() if (command := part.admit(recipe, plan, names))), None)


def remove_access_files(run_dir: Path) -> None:
    """Remove the access files of every extension (``Roles.dismiss``)."""
    for part in load_roles():
        part.dismiss(run_dir)
