"""Advantage estimators of RLOO and REINFORCE++, advantages from a teacher, and the token-level clipping of GMPO.

Rewards are prompts by completions, (P, G), of all ranks. NaN marks an unscored completion: it is left out of means and
deviations, and its advantage is NaN. ``recipe.objectives`` lists all objectives with their papers.

    ESTIMATORS["rloo"](rewards_PG)  # advantages, (P, G)
"""

from collections.abc import Callable

import torch

EPSILON = 1e-8  # added to standard deviations


def leave_one_out(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return rewards minus the mean of the group's other completions: RLOO (https://arxiv.org/abs/2402.14740, eq. 4).

    Unscored completions (NaN) do not count in the mean and stay NaN. The only scored completion of a group gets
    NaN, because there is nothing to compare it with.
    """
    others_P1 = (~rewards_PG.isnan()).sum(dim=1, keepdim=True) - 1
    sum_of_others_PG = rewards_PG.nansum(dim=1, keepdim=True) - rewards_PG
    return rewards_PG - sum_of_others_PG / others_P1


def normalize_over_batch(values_PG: torch.Tensor) -> torch.Tensor:
    """Return values minus the batch's mean, divided by its standard deviation: REINFORCE++.

    https://arxiv.org/abs/2501.03262, with completions as samples. The deviation has Bessel's correction.
    """
    known = values_PG[~values_PG.isnan()]
    deviation = known.std() if len(known) > 1 else values_PG.new_zeros(())
    return (values_PG - known.mean()) / (deviation + EPSILON)


def normalize_group_centered(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return rewards minus their group's mean, normalized over the batch: REINFORCE++-baseline, in the same paper."""
    return normalize_over_batch(rewards_PG - rewards_PG.nanmean(dim=1, keepdim=True))


ESTIMATORS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rloo": leave_one_out,
    "reinforce_plus_plus": normalize_over_batch,
    "reinforce_plus_plus_baseline": normalize_group_centered,
}


def compare_with_teacher(teacher_BT: torch.Tensor, sampled_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Return the teacher's log-probs of sampled tokens minus those at sampling, in nats; 0 for masked tokens.

    With these advantages, the loss reduces the reverse KL divergence of each token in expectation
    (https://thinkingmachines.ai/blog/on-policy-distillation).
    """
    return (teacher_BT - sampled_BT).masked_fill(~mask_BT, 0.0)


def clip_log_ratios(
    log_ratios_BT: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Clip log-ratios of tokens as GMPO does (https://arxiv.org/abs/2507.20673): only in the direction of the update.

    A log-ratio is at most ``high`` if the advantage is positive, and at least ``-low`` if it is negative.
    ``advantages`` broadcast against (B, T). Return the clipped log-ratios, and masks of the tokens at each limit.
    """
    at_low_BT = (advantages < 0) & (log_ratios_BT < -low)
    at_high_BT = (advantages > 0) & (log_ratios_BT > high)
    clipped_BT = log_ratios_BT.masked_fill(at_low_BT, -low).masked_fill(at_high_BT, high)
    return clipped_BT, at_low_BT, at_high_BT
