"""The rewards a recipe can name. No torch: ``check`` reads the names."""

from __future__ import annotations

from collections.abc import Callable

from grpo_recipes.rewards.format_tags import format_tags
from grpo_recipes.rewards.pure_accuracy_math import pure_accuracy_math

Reward = Callable[..., list[float | None]]

REWARDS: dict[str, Reward] = {reward.__name__: reward for reward in (pure_accuracy_math, format_tags)}
