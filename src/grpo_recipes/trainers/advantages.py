"""Replace TRL's advantages of a generation by other advantages, in the inputs of the loss and in TRL's table."""

from typing import Any

import torch

from grpo_recipes.algorithms.objectives import ESTIMATORS
from grpo_recipes.errors import config_error
from grpo_recipes.evaluate.scores import sum_weighted_rewards
from grpo_recipes.trainers.protocol import InnerTrainer


def estimate_advantages(trainer: InnerTrainer) -> torch.Tensor:
    """Return the advantages of the recipe's ``advantage_estimator``, (P, G), of all ranks. 0 without a score.

    Raise ConfigError if the source of the completions has its own advantages.
    """
    name = trainer.args.advantage_estimator
    if trainer.source is not None and trainer.source.brings_advantages:
        problem = f"a group has its own advantages, but {name} computes advantages from scores"
        raise config_error("advantage_estimator", problem, "remove advantage_estimator")
    rewards_B = sum_weighted_rewards(trainer.rewards_BR, trainer.reward_weights).double()
    return ESTIMATORS[name](rewards_B.view(-1, trainer.num_generations)).nan_to_num(nan=0.0)


def replace_advantages(trainer: InnerTrainer, output: dict[str, Any], advantages_PG: torch.Tensor) -> None:
    """Set ``output["advantages"]`` to this rank's part of the advantages of all ranks, and replace TRL's table too."""
    trl_advantages_B = output["advantages"]
    advantages_B = advantages_PG.flatten().to(trl_advantages_B)
    start = trainer.accelerator.process_index * len(trl_advantages_B)
    output["advantages"] = advantages_B[start : start + len(trl_advantages_B)]
    replace_logged_advantages(trainer, advantages_B)


def replace_logged_advantages(trainer: InnerTrainer, advantages_B: torch.Tensor) -> None:
    """Replace the last advantages in TRL's table of completions by these of all ranks. Samples are written from it."""
    logged: Any = trainer._logs["advantages"]
    for _ in range(min(len(advantages_B), len(logged))):  # TRL has just appended the generation's own
        logged.pop()
    logged.extend(advantages_B.tolist())
