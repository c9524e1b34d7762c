"""Read the environments of a recipe: their names, arguments and fractions, and the length of an episode.

environments_of(recipe.__getitem__)  # [("textarena:Nim-v0", {}, 1.0)]
"""

import itertools
from collections.abc import Callable
from typing import Any

from grpo_recipes.rollouts.turns import SCRIPTED


def environments_of(recipe: Callable[[str], Any]) -> list[tuple[str, dict[str, Any], float]]:
    """Return (name, arguments, fraction of the episodes) of each environment; [] if the recipe has none.

    ``recipe`` looks up a key.
    """
    if recipe("environment") is not None:
        return [(recipe("environment"), recipe("environment_args") or {}, 1.0)]
    entries = (recipe("environment_mixture") or {}).get("environments") or []
    total = sum(entry.get("weight") or 1.0 for entry in entries)
    return [(entry.get("id", ""), entry.get("args") or {}, (entry.get("weight") or 1.0) / total) for entry in entries]


def split_episodes(recipe: Callable[[str], Any], count: int) -> list[int]:
    """Divide ``count`` episodes among the environments of a recipe by their fractions; return the number of each."""
    fractions = [fraction for _, _, fraction in environments_of(recipe)]
    ends = [round(total * count) for total in itertools.accumulate(fractions)]
    return [end - start for start, end in itertools.pairwise([0, *ends])]


def model_opponents(recipe: Callable[[str], Any]) -> list[tuple[str, str]]:
    """Return (environment, model) for each game of a recipe in which a model plays the other seats."""
    games = [(spec, args) for spec, args, _ in environments_of(recipe) if spec.startswith("textarena:")]
    players = [(spec, str(args.get("opponents", SCRIPTED[0]))) for spec, args in games]
    return [(spec, model) for spec, model in players if model not in SCRIPTED]


def turn_tokens(turn_length: int | None, completion: int, turns: int) -> int:
    """Return the maximum tokens of a turn: ``turn_length``, by default half of the completion divided by the turns."""
    return turn_length or max(1, completion // turns // (1 if turns == 1 else 2))
