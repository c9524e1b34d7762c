"""Compute log-probs of rows that were sampled at different temperatures.

TRL builds a single temperature into the model's head. So a batch makes one forward pass for each temperature in it,
with TRL's head rebuilt for that temperature.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.trainer.utils import add_fused_lm_head

from grpo_recipes.trainers.protocol import Computed, InnerTrainer


@contextmanager
def changing_head_temperature(trainer: InnerTrainer, model: Any, temperature: float) -> Iterator[None]:
    """Rebuild TRL's head of ``model`` for this temperature in the block, and restore it afterwards."""
    inner = trainer.accelerator.unwrap_model(model)
    inner = inner.get_base_model() if is_peft_model(inner) else inner
    forward = inner.forward  # TRL's own patch of the method
    add_fused_lm_head(inner, temperature, trainer.args.cast_lm_head_to_fp32, ("log_probs", "entropy"))
    try:
        yield
    finally:
        inner.forward = forward


def compute_at_own_temperatures(
    trainer: InnerTrainer, temperature_B: torch.Tensor, compute: Callable[..., Computed], model: Any,
    input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int, batch_size: int | None = None,
    *args: Any, **kwargs: Any,
) -> Computed:  # fmt: skip
    """Call TRL's ``compute`` once for each temperature, and return its results with each row at its own temperature.

    Called by every rank. Sharded models need the same forward passes on every rank. So each rank makes a pass for every
    temperature of any rank. A rank without rows of a temperature feeds another row and drops the result.
    """
    temperatures, size = trainer.accelerator.gather(temperature_B).unique().tolist(), batch_size or len(input_ids)
    order: list[torch.Tensor] = []
    parts: list[Computed] = []
    for start in range(0, len(input_ids), size):
        for temperature in temperatures:
            rows = start + (temperature_B[start : start + size] == temperature).nonzero().flatten()
            fed_rows = rows if len(rows) else torch.tensor([start], device=input_ids.device)
            with changing_head_temperature(trainer, model, temperature):
                logps, entropies, router_loss = compute(
                    model, input_ids[fed_rows], attention_mask[fed_rows], logits_to_keep, None, *args, **kwargs
                )
            order.append(rows)
            weighted_loss = None if router_loss is None else router_loss * (len(rows) / len(input_ids))
            parts.append((logps[: len(rows)], None if entropies is None else entropies[: len(rows)], weighted_loss))
    to_input_order = torch.cat(order).argsort()
    all_logps = torch.cat([logps for logps, _, _ in parts])[to_input_order]
    all_entropies = [entropies for _, entropies, _ in parts if entropies is not None]
    losses = [loss for _, _, loss in parts if loss is not None]
    return (
        all_logps,
        torch.cat(all_entropies)[to_input_order] if all_entropies else None,
        torch.stack(losses).sum() if losses else None,
    )
