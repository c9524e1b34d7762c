"""Log-probs of rows that were sampled at temperatures of their own; TRL builds a single one into the model's head."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import is_peft_model
from trl.trainer.utils import add_fused_lm_head

from grpo_recipes.attributes import replaced
from grpo_recipes.trainers.passes import Computed


@contextmanager
def head_at(trainer: Any, model: Any, temperature: float) -> Iterator[None]:
    """Let the log-probs that ``model``, as TRL patched it, gives inside be those at this temperature."""
    inner = trainer.accelerator.unwrap_model(model)
    inner = inner.get_base_model() if is_peft_model(inner) else inner
    outputs = ("log_probs", "entropy")
    with replaced(inner, forward=inner.forward):
        add_fused_lm_head(inner, temperature, trainer.args.cast_lm_head_to_fp32, outputs)
        yield


def at_own_temperatures(
    trainer: Any, temperature_B: torch.Tensor, compute: Callable[..., Computed], model: Any, input_ids: torch.Tensor,
    attention_mask: torch.Tensor, logits_to_keep: int, batch_size: int | None = None, *args: Any, **kwargs: Any,
) -> Computed:  # fmt: skip
    """Return what TRL's ``compute`` does, each row at its own temperature. Called by every rank.

    Each temperature that any rank has takes a forward pass of every rank, which sharded models need: with a row that
    is not kept where a rank has none of it.
    """
    temperatures, size = trainer.accelerator.gather(temperature_B).unique().tolist(), batch_size or len(input_ids)
    order: list[torch.Tensor] = []
    parts: list[Computed] = []
    for start in range(0, len(input_ids), size):
        for temperature in temperatures:
            rows = start + (temperature_B[start : start + size] == temperature).nonzero().flatten()
            passed = rows if len(rows) else torch.tensor([start], device=input_ids.device)
            with head_at(trainer, model, temperature):
                logps, entropies, of_routers = compute(
                    model, input_ids[passed], attention_mask[passed], logits_to_keep, None, *args, **kwargs
                )
            order.append(rows)
            weighed = None if of_routers is None else of_routers * (len(rows) / len(input_ids))
            parts.append((logps[: len(rows)], None if entropies is None else entropies[: len(rows)], weighed))
    back = torch.cat(order).argsort()
    logps, entropies, losses = zip(*parts, strict=True)
    return (
        torch.cat(logps)[back],
        None if entropies[0] is None else torch.cat(entropies)[back],
        None if losses[0] is None else torch.stack(losses).sum(),
    )
