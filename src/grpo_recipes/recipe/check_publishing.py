"""What a recipe can get wrong about push_to_hub, and the repository it names. Pure."""

from __future__ import annotations

import re

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe

_PART = r"[A-Za-z0-9](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?:{_PART}/)?{_PART}")
_BRANCH = re.compile(r"[\w][\w./-]{0,200}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def publishing(recipe: Recipe) -> list[Problem]:
    """Names that the hub would refuse when the model is trained."""
    if not recipe["push_to_hub"]:
        return []
    problems = []
    name, branch = recipe["hub_model_id"], recipe["hub_revision"]
    if name is not None and not _is_repository(name):
        what = f"'{name}' is no name of a repository"
        fix = "write user/name: letters, digits, '-', '_' and '.', at most 96 each, without '--' and '..'"
        problems.append(Problem(recipe.origin("hub_model_id"), what, fix))
    if branch is not None and (_COMMIT.fullmatch(branch) or not _BRANCH.fullmatch(branch)):
        what = f"a push goes to a branch, '{branch}' is none"
        problems.append(Problem(recipe.origin("hub_revision"), what, "write the name of a branch, or remove it"))
    return problems


def repository(recipe: Recipe, run_name: str) -> str:
    """The repository's name, with or without a user before it: ``hub_model_id``, or the run's name."""
    return str(recipe["hub_model_id"] or re.sub(r"[^\w.-]+|--+|\.\.+", "-", run_name).strip("-."))


def _is_repository(name: str) -> bool:
    return bool(_REPOSITORY.fullmatch(name)) and "--" not in name and ".." not in name and not name.endswith(".git")
