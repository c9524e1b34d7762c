"""The environments of a recipe: what they are called, their arguments and shares, and how long an episode is."""

import itertools
from collections.abc import Callable
from typing import Any

from grpo_recipes.rollouts.turns import SCRIPTED


def environments_of(recipe: Callable[[str], Any]) -> list[tuple[str, dict[str, Any], float]]:
    """Return the environments of a recipe, whose keys ``recipe`` looks up.

    Of each what names it, its arguments, and its share of the episodes.
    """
    if recipe("environment") is not None:
        return [(recipe("environment"), recipe("environment_args") or {}, 1.0)]
    entries = (recipe("environment_mixture") or {}).get("environments") or []
    total = sum(entry.get("weight") or 1.0 for entry in entries)
    return [(entry.get("id", ""), entry.get("args") or {}, (entry.get("weight") or 1.0) / total) for entry in entries]


def episodes_of_each(recipe: Callable[[str], Any], count: int) -> list[int]:
    """Return how many of ``count`` episodes each environment of a recipe gets, by its share."""
    ends = [round(share * count) for share in itertools.accumulate(share for _, _, share in environments_of(recipe))]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


def model_opponents(recipe: Callable[[str], Any]) -> list[tuple[str, str]]:
    """Return the games of a recipe whose other seats a model plays, each with that model."""
    games = [(spec, args) for spec, args, _ in environments_of(recipe) if spec.startswith("textarena:")]
    found = [(spec, str(args.get("opponents", SCRIPTED[0]))) for spec, args in games]
    return [(spec, model) for spec, model in found if model not in SCRIPTED]


def turn_tokens(given: int | None, completion: int, turns: int) -> int:
    """Return the most tokens of one of the policy's turns in an episode, where several share half of the completion."""
    return given or max(1, completion // turns // (1 if turns == 1 else 2))
