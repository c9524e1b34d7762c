"""Sort the rows of an optimizer step by length, in TRL's number of micro-batches with equal numbers of rows.

TRL shuffles the rows of a generation, so most micro-batches have rows of every length. After sorting, the rows of a
micro-batch have about one length, and ``passes`` feeds them with little padding. A row stays in its optimizer step and
on its rank. All ranks have the same number of micro-batches.

The gradient does not change, because TRL's loss gives each row of a step the same weight in every micro-batch. If an
option breaks this, TRL's order is kept.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from accelerate import Accelerator

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.loss_inputs import trained_mask

Rows = dict[str, Any]  # input of TRL's loss: tensors with a row per completion, scalars, lists
TOKENS = "relative_tokens"  # tokens of a micro-batch over the mean of its step, on all ranks
# TRL logs these as a mean over the tokens of a micro-batch; the second group only at the token level.
_TOKEN_MEANS = ("kl", "entropy")
_TOKEN_LEVEL = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "cispo_clip_ratio")


class _Settings(Protocol):
    """The members of the trainer that decide the order."""

    args: GRPOConfig
    accelerator: Accelerator
    aux_loss_enabled: bool


class MicroBatches:
    """Sort the micro-batches of a trainer by length, and weight the token means that TRL logs for each of them."""

    def __init__(self, trainer: _Settings):
        self._accelerator, args = trainer.accelerator, trainer.args
        self._sorts = args.trim_padding and not (needs_trl_order(args) or trainer.aux_loss_enabled)
        # Micro-batches that are always in one optimizer step: an epoch may end with a shorter step.
        self._window = math.gcd(args.steps_per_generation, args.gradient_accumulation_steps)
        self._token_means = _TOKEN_MEANS + (_TOKEN_LEVEL if args.importance_sampling_level == "token" else ())

    def sort(self, parts: list[Rows]) -> list[Rows]:
        """Return the micro-batches of a generation with the rows of each step sorted, and ``TOKENS`` added to each.

        Called by every rank. The longest rows come first: a run that does not fit in memory fails in its first pass.
        Return ``parts`` unchanged without ``trim_padding``, if the order matters, with images, or if a step has one
        micro-batch.
        """
        if not self._sorts or self._window == 1 or "num_images" in parts[0]:
            return parts
        batches: list[Rows] = []
        for start in range(0, len(parts), self._window):
            step_parts = parts[start : start + self._window]
            step = dict(step_parts[0])  # scalars and lists are equal in all micro-batches
            for name, value in step_parts[0].items():
                if torch.is_tensor(value) and value.ndim:
                    step[name] = torch.cat([part[name] for part in step_parts])
            lengths_B = step["prompt_mask"].sum(dim=1) + step["completion_mask"].sum(dim=1)
            order_B = lengths_B.argsort(descending=True, stable=True)
            groups = [
                {
                    name: value[rows_b] if torch.is_tensor(value) and value.ndim else value
                    for name, value in step.items()
                }
                for rows_b in order_B.chunk(len(step_parts))
            ]
            counts = [trained_mask(rows).sum() for rows in groups]
            counts_M = self._accelerator.reduce(torch.stack(counts).float(), reduction="sum")
            relative_M = counts_M / counts_M.mean().clamp(min=1.0)
            batches += [rows | {TOKENS: relative} for rows, relative in zip(groups, relative_M.tolist(), strict=True)]
        return batches

    def weight_token_means(self, metrics: dict[str, list[float]], rows: Rows) -> None:
        """Multiply TRL's last logged means over tokens by the micro-batch's relative number of tokens.

        The last values in ``metrics`` are changed in place. The mean over the micro-batches that TRL logs is then the
        mean over the step's tokens. Do nothing for rows that were not sorted.
        """
        for name in self._token_means if TOKENS in rows else ():
            if metrics.get(name):
                metrics[name][-1] *= rows[TOKENS]


def needs_trl_order(args: GRPOConfig) -> bool:
    """Return whether the gradient depends on which rows are in a micro-batch.

    ``bnpo`` and the entropy bonus divide by the tokens of a micro-batch. The quantile is over a micro-batch. LOMO steps
    in each backward pass.
    """
    return bool(
        args.loss_type == "bnpo"
        or args.entropy_coef != 0.0
        or args.use_adaptive_entropy
        or args.top_entropy_quantile < 1.0
        or "lomo" in args.optim
    )
