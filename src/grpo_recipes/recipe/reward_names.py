"""The rewards a recipe can name. Each is imported when it is made: ``check`` only reads the names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

Reward = Callable[..., list[float | None]]

_MATCHING = ("answer_matching",)
_COSINE = (
    "cosine_min_value_wrong",
    "cosine_max_value_wrong",
    "cosine_min_value_correct",
    "cosine_max_value_correct",
    "cosine_max_len",
)

# Name of the reward and of its function -> recipe keys that the function takes by these names.
REWARDS: dict[str, tuple[str, ...]] = {
    "pure_accuracy_math": _MATCHING,
    "math_verify": (),
    "modebench": (),
    "format_tags": (),
    "cosine_length": (*_MATCHING, *_COSINE, "max_completion_length"),
    "repetition_penalty": ("repetition_n_grams", "repetition_max_penalty"),
    "soft_overlong": ("max_completion_length", "soft_punish_cache"),
}

# Rewards whose score is 1 for a right answer and 0 for a wrong one.
ACCURACY = ("pure_accuracy_math", "math_verify", "modebench")

# Rewards that compare with one reference answer; a ModeBench problem has several.
ONE_ANSWER = ("pure_accuracy_math", "math_verify", "cosine_length")

# Rewards whose work on one completion has no bound: called in child processes that can be killed.
IN_CHILDREN = frozenset({"math_verify"})


def make_reward(name: str, script_args: Any, args: Any) -> Reward:
    """The reward of that name with the recipe's keys bound.

    Args:
        name: one of ``REWARDS``.
        script_args: the recipe's ``ScriptArguments``; None does for a reward without keys.
        args: the recipe's ``GRPOConfig``; None does for a reward without keys.

    Returns:
        ``reward(completions, **columns) -> list[float | None]`` whose ``__name__`` is ``name``. A column of the dataset
        that is named like a bound key does not replace it.
    """
    module = "math_verify" if name == "math_verify" else "functions"  # importing math_verify takes a second
    function = getattr(importlib.import_module(f"grpo_recipes.rewards.{module}"), name)
    bound = {key: getattr(script_args if hasattr(script_args, key) else args, key) for key in REWARDS[name]}

    @functools.wraps(function)
    def reward(completions: list[Any], **columns: Any) -> list[float | None]:
        scores: list[float | None] = function(completions, **{**columns, **bound})
        return scores

    return reward
