"""The policy-gradient term of TRL's loss, as ``loss_pg`` of each step, for the files of the offline trainer.

TRL's own loss computes the term: once more with the same log-probs, without the KL divergence and the entropy bonus.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from grpo_recipes.attributes import replaced
from grpo_recipes.extensions.offline.iterations import Iterations


class PolicyGradient:
    """Add ``loss_pg`` to the metrics of each micro-batch of a training whose callbacks include ``Iterations``."""

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._on = any(isinstance(callback, Iterations) for callback in trainer.callback_handler.callbacks)

    def loss(self, compute: Callable[[Any, dict[str, Any]], torch.Tensor], model: Any, rows: dict[str, Any]) -> Any:
        """Return the loss that ``compute`` returns, and keep the policy-gradient term of it."""
        trainer = self._trainer
        if not self._on or not trainer.model.training:
            return compute(model, rows)
        computed: list[tuple[torch.Tensor, ...]] = []
        forward = trainer._get_per_token_logps_and_entropies

        def keep(*args: Any, **kwargs: Any) -> Any:
            computed.append(forward(*args, **kwargs))
            return computed[-1]

        with replaced(trainer, _get_per_token_logps_and_entropies=keep):
            loss = compute(model, rows)
        terms_off = {"beta": 0.0, "_entropy_bonus_enabled": False, "aux_loss_enabled": False}
        unread: dict[str, Any] = {"train": defaultdict(list)}
        own_rank = {"gather": lambda value: value, "reduce": lambda value, *_, **__: value}
        with (
            torch.no_grad(),
            replaced(trainer, _get_per_token_logps_and_entropies=lambda *_, **__: computed[-1], **terms_off),
            replaced(trainer, _metrics=unread),
            replaced(trainer.accelerator, **own_rank),
        ):
            term = compute(model, rows)
        # TRL averages metrics over the micro-batches of a step, and adds their losses up.
        scaled = trainer.accelerator.gather(term.detach() * trainer.current_gradient_accumulation_steps)
        trainer._metrics["train"]["loss_pg"].append(scaled.mean().item())
        return loss
