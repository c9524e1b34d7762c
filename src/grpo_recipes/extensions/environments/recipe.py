"""Read a recipe's environments: names, arguments, fractions, model opponents, and the maximum tokens of a turn.

list_episode_environments(recipe.__getitem__)  # [("textarena:Nim-v0", {}, 1.0)]
"""

import itertools
from collections.abc import Callable
from typing import Any

from grpo_recipes.extensions.environments.libraries import LIBRARIES
from grpo_recipes.recipe.user_code import class_methods, find_run_copy
from grpo_recipes.rollouts.turns import SCRIPTED


def list_episode_environments(recipe: Callable[[str], Any]) -> list[tuple[str, dict[str, Any], float]]:
    """Return (name, arguments, fraction of the episodes) of each environment of a recipe; [] if it has none.

    ``recipe`` looks up a key.
    """
    if recipe("environment") is not None:
        return [(recipe("environment"), recipe("environment_args") or {}, 1.0)]
    entries = (recipe("environment_mixture") or {}).get("environments") or []
    total = sum(entry.get("weight") or 1.0 for entry in entries)
    return [(entry.get("id", ""), entry.get("args") or {}, (entry.get("weight") or 1.0) / total) for entry in entries]


def uses_trl_environment(recipe: Callable[[str], Any]) -> bool:
    """Return whether ``environment`` is a class for TRL's ``environment_factory``: it has no step, but a dataset.

    ``recipe`` looks up a key. A run's copy of the class decides: for ``Recipe.__getitem__`` in the folder of the
    recipe, else in the run of this process. If the source does not show all methods, the class counts if the recipe
    has a dataset.
    """
    spec = recipe("environment")
    if not spec or spec.partition(":")[0] in LIBRARIES or not (recipe("dataset_name") or recipe("dataset_mixture")):
        return False
    return "step" not in (class_methods(spec, find_run_copy(spec, recipe)) or {})


def split_episodes(recipe: Callable[[str], Any], count: int) -> list[int]:
    """Divide ``count`` episodes among the environments of a recipe by their fractions; return the number of each."""
    fractions = [fraction for _, _, fraction in list_episode_environments(recipe)]
    ends = [round(total * count) for total in itertools.accumulate(fractions)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def list_model_opponents(recipe: Callable[[str], Any]) -> list[tuple[str, str]]:
    """Return (environment, model) for each textarena game of a recipe with "policy" or "base" as the opponents."""
    games = [(spec, args) for spec, args, _ in list_episode_environments(recipe) if spec.startswith("textarena:")]
    players = [(spec, str(args.get("opponents", SCRIPTED[0]))) for spec, args in games]
    return [(spec, model) for spec, model in players if model not in SCRIPTED]


def compute_turn_tokens(turn_length: int | None, completion: int, turns: int) -> int:
    """Return the maximum tokens of a turn: ``turn_length`` if set, else half of ``completion`` divided by ``turns``.

    With one turn, the default is the whole ``completion``.
    """
    return turn_length or max(1, completion // turns // (1 if turns == 1 else 2))


def compute_tool_turn_tokens(turn_length: int | None, completion: int) -> int:
    """Return the maximum tokens of a turn of an episode with tools: ``turn_length``, or half of ``completion``.

    An episode ends if fewer tokens are left.
    """
    return turn_length or max(1, completion // 2)
