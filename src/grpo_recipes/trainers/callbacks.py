"""Define trainer callbacks that may replace the loss of a micro-batch, for example to log a term of it."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

from grpo_recipes.trainers.protocol import InnerTrainer

Compute = Callable[[Any, dict[str, Any]], torch.Tensor]  # TRL's loss: model, rows of a micro-batch -> loss


class LossCallback(TrainerCallback):
    """A trainer callback that computes the loss of each micro-batch in training."""

    def loss(self, trainer: InnerTrainer, compute: Compute, model: Any, rows: dict[str, Any]) -> torch.Tensor:
        """Return the loss of the micro-batch ``rows`` to minimize. By default it is TRL's, ``compute(model, rows)``."""
        return compute(model, rows)
