"""The policy-gradient term of TRL's loss, logged as ``loss_pg`` of each step for the files of the offline trainer."""

from typing import Any

import torch

from grpo_recipes.trainers.callbacks import Compute
from grpo_recipes.trainers.protocol import InnerTrainer


def loss_with_term(trainer: InnerTrainer, compute: Compute, model: Any, rows: dict[str, Any]) -> torch.Tensor:
    """Return the loss of ``compute``, and add its policy-gradient term to the metrics of the step."""
    loss, term = trainer.loss_and_policy_gradient_term(compute, model, rows)
    # TRL averages metrics over the micro-batches of a step and sums their losses.
    scaled = trainer.accelerator.gather(term.detach() * trainer.current_gradient_accumulation_steps)
    trainer.add_metric("loss_pg", scaled.mean().item())
    return loss
