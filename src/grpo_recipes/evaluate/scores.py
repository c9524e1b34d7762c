"""Score completions in evaluations and in `grpo eval`: rewards, correctness, and scores of k samples.

rewards_BR, reasons = call_rewards(rewards, rows, ids, completions)
score_groups(rewards_BR, names, weights_R, answers, repeats)  # {"pass@1": (0.5, (0.4, 0.6)), ...}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from grpo_recipes.recipe.registry import rewards
from grpo_recipes.rewards.answers import extract_final_text, extract_last_answer, extract_last_boxed, is_same_answer
from grpo_recipes.rewards.score import Reward, RewardWrapper
from grpo_recipes.stats import Interval, scores_at_k

RIGHT = 1.0 - 1e-6  # lowest accuracy reward of a right answer
_TRL_COLUMNS = ("prompt", "completion", "completion_ids")  # TRL passes these columns to rewards under other names


def sum_weighted_rewards(rewards_BR: torch.Tensor, weights_R: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each completion's rewards as TRL does, (B,). NaN if no reward scored it."""
    sums_B = (rewards_BR * weights_R.to(rewards_BR.device)).nansum(dim=1)
    return sums_B.masked_fill(rewards_BR.isnan().all(dim=1), torch.nan)


def accuracy(rewards_BR: torch.Tensor, names: list[str]) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return masks of the completions that an accuracy reward judged and of those that are right, both (B,).

    Return None if no reward in ``names`` is an accuracy reward.
    """
    known = rewards()
    columns = [index for index, name in enumerate(names) if name in known and known[name].accuracy]
    if not columns:
        return None
    accuracies_BR = rewards_BR[:, columns]
    return ~accuracies_BR.isnan().all(dim=1), (accuracies_BR >= RIGHT).any(dim=1)


def judge_completions(rewards_BR: torch.Tensor, names: list[str], weights_R: torch.Tensor) -> list[bool | None]:
    """Return for each completion whether it is right, or None if that is unknown, (B,).

    An accuracy reward decides. In a recipe without one, completions with a weighted reward of at least 1 are right. If
    such rewards are graded and none reaches 1, the right completions are unknown.
    """
    totals_B = sum_weighted_rewards(rewards_BR, weights_R)
    are_graded = ((totals_B > 1 - RIGHT) & (totals_B < RIGHT)).any() and not (totals_B >= RIGHT).any()
    known_B = torch.zeros_like(totals_B, dtype=torch.bool) if are_graded else ~totals_B.isnan()
    judged_B, right_B = accuracy(rewards_BR, names) or (known_B, totals_B >= RIGHT)
    return [right if judged else None for judged, right in zip(judged_B.tolist(), right_B.tolist(), strict=True)]


def extract_answer(completion: str | list[dict[str, Any]]) -> str | None:
    """Return the text in the last ``<answer>…</answer>`` of a completion, or in its last box if it has no such tag.

    Only the text after the last ``</think>`` counts (``extract_final_text``). Return None if there is no answer, if the
    answer is empty, or if a think block is not closed.
    """
    text = extract_final_text(completion)
    answer = extract_last_boxed(text) if (tagged := extract_last_answer(text)) is None else tagged
    return (answer or "").strip() or None


def label_answers(answers: list[str | None]) -> list[int | None]:
    """Return for each answer to a prompt the index of the first equal answer, to count votes. None for no answer."""
    firsts: list[int] = []
    labels: list[int | None] = []
    for index, answer in enumerate(answers):
        if answer is None:
            labels.append(None)
            continue
        label = next((first for first in firsts if is_same_answer(answer, str(answers[first]))), index)
        if label == index:
            firsts.append(index)
        labels.append(label)
    return labels


def average_rewards(rewards_BR: torch.Tensor, names: list[str], weights_R: torch.Tensor) -> dict[str, float]:
    """Return mean and standard deviation of the weighted reward and of each reward, by the names of TRL's metrics.

    Unscored values (NaN) in ``rewards_BR`` are left out. The mean of no values is NaN. The deviation of fewer than two
    values is 0.
    """
    weighted_B = sum_weighted_rewards(rewards_BR, weights_R)
    means = {"reward": weighted_B.nanmean(), "reward_std": _compute_nanstd(weighted_B)}
    for name, column_B in zip(names, rewards_BR.T, strict=True):
        means |= {f"rewards/{name}/mean": column_B.nanmean(), f"rewards/{name}/std": _compute_nanstd(column_B)}
    return {name: value.item() for name, value in means.items()}


def _compute_nanstd(values: torch.Tensor) -> torch.Tensor:
    """Return the standard deviation of the values that are not NaN. 0 for fewer than two."""
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros(())


def score_groups(
    rewards_BR: torch.Tensor, names: list[str], weights_R: torch.Tensor, answers: Sequence[str | None], repeats: int,
    ks: Sequence[int] | None = None,
) -> dict[str, tuple[float, Interval | None]]:  # fmt: skip
    """Return pass@k and the other scores of ``stats.scores_at_k`` by name, each with its confidence interval.

    A group is ``repeats`` consecutive rows with the same prompt. ``answers``, (B,), are the texts to vote on. ``ks``
    are the numbers k. None means the default of ``scores_at_k``.
    """

    def groups(values: Sequence[Any]) -> list[list[Any]]:
        """Split values into lists of ``repeats``, one for each group."""
        return [list(values[start : start + repeats]) for start in range(0, len(rewards_BR), repeats)]

    totals = [None if math.isnan(total) else total for total in sum_weighted_rewards(rewards_BR, weights_R).tolist()]
    right = judge_completions(rewards_BR, names, weights_R)
    return scores_at_k(groups(totals), groups(right), [label_answers(group) for group in groups(answers)], ks)


def call_rewards(
    rewards: Sequence[Reward], rows: Sequence[Mapping[str, Any]], ids: Sequence[list[int]],
    completions: Sequence[str | list[dict[str, str]]],
) -> tuple[torch.Tensor, list[str | None]]:  # fmt: skip
    """Call rewards as the trainer does. Return rewards, (B, R), and for each unscored completion the reason, (B,).

    ``rows`` contains the problem of each completion, ``ids`` its tokens, ``completions`` its text or messages. All
    rewards of a completion are NaN if one of them should have scored it and could not. Raise RewardFailed if a reward
    cannot be called.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0] if name not in _TRL_COLUMNS}
    messages = [
        [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        for completion in completions
    ]
    arguments = {"prompts": [row["prompt"] for row in rows], "completions": messages, "completion_ids": list(ids)}
    returned = [reward(**arguments, **columns) for reward in rewards]
    scores_RB = [[math.nan if score is None else score for score in scores] for scores in returned]
    rewards_BR = torch.tensor(scores_RB, dtype=torch.float32).T.contiguous()
    by_reward = [reward.scores for reward in rewards if isinstance(reward, RewardWrapper)]
    by_row = zip(*by_reward, strict=True) if by_reward else ([] for _ in rows)
    reasons = [next((score.reason for score in scores if score.unscored), None) for scores in by_row]
    rewards_BR[torch.tensor([reason is not None for reason in reasons])] = math.nan
    return rewards_BR, reasons
