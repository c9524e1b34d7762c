"""The names a recipe can give."""

from __future__ import annotations

import inspect

from grpo_recipes.keys import catalogue
from grpo_recipes.rewards.registry import REWARDS


def test_rewards_have_the_name_of_their_function_and_take_whatever_columns_come():
    assert {"pure_accuracy_math", "format_tags"} <= set(REWARDS)
    for name, reward in REWARDS.items():
        assert reward.__name__ == name
        kinds = [parameter.kind for parameter in inspect.signature(reward).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD in kinds
        assert reward.__doc__


def test_the_default_reward_is_registered():
    assert set(catalogue()["reward_funcs"]["default"]) <= set(REWARDS)
