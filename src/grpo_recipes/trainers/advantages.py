"""Replace TRL's advantages of a generation by other advantages, in the inputs of the loss and in TRL's table."""

from typing import Any

import torch

from grpo_recipes.trainers.protocol import InnerTrainer


def replace_advantages(trainer: InnerTrainer, output: dict[str, Any], advantages_PG: torch.Tensor) -> None:
    """Set the advantages in this rank's loss inputs ``output`` to its part of the advantages of all ranks."""
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
