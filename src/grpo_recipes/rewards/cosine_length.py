"""Right answers are worth more when short: the cosine reward of arXiv 2502.03373, appendix C.1."""

from __future__ import annotations

import math
from typing import Any

from grpo_recipes.rewards.answers import is_right
from grpo_recipes.rewards.text import completion_text


def cosine_length(
    completions: list[Any],
    answer: list[Any],
    completion_ids: list[list[int]],
    *,
    max_completion_length: int,
    cosine_max_len: int | None = None,
    cosine_min_value_wrong: float = 0.0,
    cosine_max_value_wrong: float = -0.5,
    cosine_min_value_correct: float = 0.5,
    cosine_max_value_correct: float = 1.0,
    answer_matching: str = "normalized",
    **_: Any,
) -> list[float | None]:
    """From one value for an empty completion to another for one of L tokens, along half a cosine.

    ``R = end + (start - end) / 2 * (1 + cos(pi * min(n, L) / L))`` with n the tokens of the completion, its end token
    included, and L = ``cosine_max_len``. A right answer goes from ``cosine_max_value_correct`` to
    ``cosine_min_value_correct``, a wrong one from ``cosine_min_value_wrong`` to ``cosine_max_value_wrong``. The paper's
    separate value for a completion that reaches the limit is left out: ``soft_overlong`` is for that.

    Args:
        completions: one completion a row, as text or chat messages.
        answer: reference solutions, compared as by ``pure_accuracy_math``.
        completion_ids: the sampled tokens of each completion, without padding.
        max_completion_length: L where ``cosine_max_len`` is None.
        cosine_max_len: L, in tokens.
        cosine_min_value_wrong: a wrong completion of length 0.
        cosine_max_value_wrong: a wrong completion of length L or more.
        cosine_min_value_correct: a right completion of length L or more.
        cosine_max_value_correct: a right completion of length 0.
        answer_matching: ``normalized`` or ``strict``.
    """
    longest = cosine_max_len or max_completion_length
    ends = {
        True: (cosine_max_value_correct, cosine_min_value_correct),
        False: (cosine_min_value_wrong, cosine_max_value_wrong),
    }
    rewards: list[float | None] = []
    for completion, gold, ids in zip(completions, answer, completion_ids, strict=True):
        start, end = ends[is_right(completion_text(completion), str(gold), answer_matching)]
        share = min(len(ids) / longest, 1.0)
        rewards.append(end + (start - end) / 2 * (1 + math.cos(math.pi * share)))
    return rewards
