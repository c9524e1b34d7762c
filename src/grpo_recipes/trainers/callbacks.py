"""Callbacks that also see the loss of a training step."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback

Compute = Callable[[Any, dict[str, Any]], torch.Tensor]  # TRL's loss of a model on the rows of a micro-batch


class LossCallback(TrainerCallback):
    """A trainer callback that is called in the place of the loss of each micro-batch."""

    def loss(self, trainer: Any, compute: Compute, model: Any, rows: dict[str, Any]) -> torch.Tensor:
        """Return the loss to minimize, by default that of ``compute``."""
        return compute(model, rows)
