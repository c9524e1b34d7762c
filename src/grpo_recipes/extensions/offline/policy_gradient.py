"""The policy-gradient term of TRL's loss, as ``loss_pg`` of each step, for the files of the offline trainer.

TRL's own loss computes the term: once more with the same log-probs, without the KL divergence and the entropy bonus.
"""

from collections import defaultdict
from typing import Any

import torch

from grpo_recipes.attributes import replaced
from grpo_recipes.trainers.callbacks import Compute


def loss_with_term(trainer: Any, compute: Compute, model: Any, rows: dict[str, Any]) -> torch.Tensor:
    """Return the loss that ``compute`` returns, and add its policy-gradient term to the metrics of the step."""
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
