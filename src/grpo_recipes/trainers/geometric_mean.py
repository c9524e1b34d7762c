"""Compute the loss of GMPO with TRL's loss for whole completions (GSPO), the geometric mean of the tokens' ratios.

GMPO (https://arxiv.org/abs/2507.20673) clips the log-ratio of each token before the mean. TRL subtracts the old
log-probs from the new log-probs. For a clipped token, this module passes the new log-prob minus the limit as the old
log-prob. TRL's log-ratio is then the limit and has no gradient. All other terms of TRL's loss stay.

    loss = compute_geometric_mean_loss(trainer, logps, compute, model, rows)
"""

import math
from typing import Any

import torch
from trl.trainer.utils import nanmax, nanmin

from grpo_recipes.algorithms.objectives import clip_log_ratios
from grpo_recipes.trainers.callbacks import Compute
from grpo_recipes.trainers.loss_inputs import trained_mask
from grpo_recipes.trainers.passes import SharedComputation
from grpo_recipes.trainers.protocol import InnerTrainer


def compute_geometric_mean_loss(
    trainer: InnerTrainer, logps: SharedComputation, compute: Compute, model: Any, rows: dict[str, Any]
) -> torch.Tensor:
    """Return GMPO's loss of a micro-batch. ``compute`` is TRL's loss, and ``logps`` computes its log-probs.

    The result includes the other terms of TRL's loss, such as the KL penalty. A log-ratio is at most ``epsilon_high``
    (by default ``epsilon``) with a positive advantage, and at least ``-epsilon`` with a negative advantage. The metrics
    ``clip_ratio/*`` become the fractions of clipped tokens.
    """
    args, rows = trainer.args, dict(rows)
    advantages = rows["advantages"].unsqueeze(1) if rows["advantages"].dim() == 1 else rows["advantages"]
    old_logps_BT: torch.Tensor | None = rows.get("old_per_token_logps")
    limits = args.epsilon, args.epsilon if args.epsilon_high is None else args.epsilon_high
    clipped: list[torch.Tensor] = []

    def clip(logps_BT: torch.Tensor) -> None:
        """Set the old log-probs in ``rows`` so that clipped tokens have no gradient, and store masks in ``clipped``."""
        old_BT = logps_BT.detach() if old_logps_BT is None else old_logps_BT
        log_ratios_BT, *clipped[:] = clip_log_ratios(logps_BT - old_BT, advantages, *limits)
        is_clipped_BT = clipped[0] | clipped[1]
        rows["old_per_token_logps"] = torch.where(is_clipped_BT, logps_BT - log_ratios_BT, old_BT)
        rows.setdefault("sampling_per_token_logps", old_BT)  # TRL would use the changed log-probs instead

    unclipped = {"epsilon_low": math.inf, "epsilon_high": math.inf}  # the tokens are clipped before
    settings = trainer.with_settings(loss_type="grpo", importance_sampling_level="sequence", **unclipped)
    with settings, logps.reading(clip):
        loss = compute(model, rows)
    at_low_BT, at_high_BT = clipped
    _log_clipped_tokens(trainer, at_low_BT, at_high_BT, trained_mask(rows))
    return loss


def _log_clipped_tokens(
    trainer: InnerTrainer, at_low_BT: torch.Tensor, at_high_BT: torch.Tensor, mask_BT: torch.Tensor
) -> None:
    """Replace TRL's last ``clip_ratio`` metrics by the fractions of clipped tokens of all ranks."""
    counts = torch.stack([(at_low_BT * mask_BT).sum(1), (at_high_BT * mask_BT).sum(1), mask_BT.sum(1)], dim=1)
    low_B, high_B, tokens_B = trainer.accelerator.gather(counts).float().unbind(dim=1)
    tokens = tokens_B.sum().clamp(min=1.0)
    values = {
        "low_mean": low_B.sum() / tokens,
        "high_mean": high_B.sum() / tokens,
        "region_mean": (low_B + high_B).sum() / tokens,
        "low_min": nanmin(low_B / tokens_B),
        "high_max": nanmax(high_B / tokens_B),
    }
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in values.items():
        metrics[f"clip_ratio/{name}"][-1] = value.item()
