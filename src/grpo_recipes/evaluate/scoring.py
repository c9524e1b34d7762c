"""Right or wrong by the recipe's own accuracy reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.evaluate.problems import BenchmarkProblem
from grpo_recipes.recipe.registry import ACCURACY, make_reward
from grpo_recipes.rewards.wrapper import RewardWrapper


@dataclass(frozen=True)
class Scorer:
    """Judges completions.

    Attributes:
        name: of the reward, for the results.
        reward: called as TRL calls it.
    """

    name: str
    reward: Any

    def scores(self, problems: Sequence[BenchmarkProblem], texts: Sequence[Sequence[str]]) -> list[list[float | None]]:
        """1 for a right completion, 0 for a wrong one, None without a verdict: (problems, samples)."""
        if isinstance(self.reward, RewardWrapper):
            self.reward.give_up_after = None
        flat = [(problem, text) for problem, row in zip(problems, texts, strict=True) for text in row]
        given = self.reward(
            completions=[[{"role": "assistant", "content": text}] for _, text in flat],
            prompts=[problem.prompt for problem, _ in flat],
            answer=[problem.gold for problem, _ in flat],
        )
        scores = iter(given)
        return [[next(scores) for _ in row] for row in texts]


# Judges ModeBench, whatever rewards the recipe has.
MODEBENCH = Scorer("modebench", make_reward("modebench", None, None))


def recipe_scorer(names: Sequence[str], rewards: Sequence[Any], script_args: Any, args: Any) -> Scorer:
    """The first of the recipe's rewards that says right or wrong; ``pure_accuracy_math`` when there is none.

    Not ``modebench``, which judges its own problems alone.

    Args:
        names: the recipe's ``reward_funcs``.
        rewards: the same, as the trainer calls them.
        script_args: the recipe's ``ScriptArguments``.
        args: the recipe's ``GRPOConfig``.
    """
    for name, reward in zip(names, rewards, strict=True):
        if name in ACCURACY and name != MODEBENCH.name:
            return Scorer(name, reward)
    return Scorer(ACCURACY[0], make_reward(ACCURACY[0], script_args, args))
