r"""The built-in rewards except ``math_verify``: pure, fast, and called in the trainer's process.

Each reward gets ``completions``, one text or list of chat messages per row, and the columns it needs with an entry per
row: ``answer`` (the reference solutions) and ``completion_ids`` (the sampled tokens without padding). TRL's cosine,
repetition and overlong rewards are not wrapped, because they would import torch into ``grpo check-rewards``.
"""

import math
import re
from typing import Any

from grpo_recipes.rewards.answers import extract_final_text, format_solution, get_completion_text, is_correct

_ONE_ANSWER = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)


def pure_accuracy_math(
    completions: list[Any], answer: list[Any], *, answer_matching: str = "normalized", **_: Any
) -> list[float | None]:
    """Return 1.0 if the last answer tag contains the reference solution, else 0.0 (the guide's default reward).

    ``answer_matching: normalized`` compares numbers by value in any notation (see ``answers``). ``strict`` compares
    texts up to surrounding white space. Only the text after the last ``</think>`` counts.
    """
    rows = zip(completions, answer, strict=True)
    return [
        float(is_correct(extract_final_text(completion), format_solution(gold), answer_matching))
        for completion, gold in rows
    ]


def environment(completions: list[Any], episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the column ``episode_reward``: the rewards that the environment gave; None for a failed episode."""
    return episode_reward


def format_tags(completions: list[Any], **_: Any) -> list[float | None]:
    """Return 1.0 for exactly one answer tag that is not empty, after any or no text and at the end, otherwise 0.0.

    Like all rewards that read an answer, it reads only the text after the last ``</think>``.
    """
    return [float(_ONE_ANSWER.fullmatch(extract_final_text(completion)) is not None) for completion in completions]


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
    """Reward short right answers more than long right answers: the cosine reward of arXiv 2502.03373, appendix C.1.

    ``R = end + (start - end) / 2 * (1 + cos(pi * min(n, L) / L))``, where n is the number of tokens including the end
    token and L is ``cosine_max_len`` or ``max_completion_length``. The reward of a right answer goes from
    ``cosine_max_value_correct`` at 0 tokens to ``cosine_min_value_correct`` at L tokens, and the reward of a wrong
    answer from ``cosine_min_value_wrong`` to ``cosine_max_value_wrong``. Unlike in the paper, the limit has no special
    value; use ``soft_overlong`` for it. Answers are compared as in ``pure_accuracy_math``.
    """
    longest = cosine_max_len or max_completion_length
    rewards: list[float | None] = []
    right = pure_accuracy_math(completions, answer, answer_matching=answer_matching)
    for is_right, ids in zip(right, completion_ids, strict=True):
        start, end = cosine_min_value_wrong, cosine_max_value_wrong
        if is_right:
            start, end = cosine_max_value_correct, cosine_min_value_correct
        rewards.append(end + (start - end) / 2 * (1 + math.cos(math.pi * min(len(ids) / longest, 1.0))))
    return rewards


def repetition_penalty(
    completions: list[Any], *, repetition_n_grams: int = 3, repetition_max_penalty: float = -1.0, **_: Any
) -> list[float | None]:
    """Return the penalty times the share of repeated n-grams: arXiv 2502.03373, appendix C.2.

    ``R = (1 - distinct n-grams / all n-grams) * repetition_max_penalty``, over words in lower case. TRL counts token
    ids, so words that repeat with other spaces cost nothing there. Fewer than n words get 0.
    """
    rewards: list[float | None] = []
    for completion in completions:
        words = get_completion_text(completion).lower().split()
        n_grams = list(zip(*(words[start:] for start in range(repetition_n_grams)), strict=False))
        repeated = 1 - len(set(n_grams)) / len(n_grams) if n_grams else 0.0
        rewards.append(repeated * repetition_max_penalty)
    return rewards


def soft_overlong(
    completions: list[Any],
    completion_ids: list[list[int]],
    *,
    max_completion_length: int,
    soft_punish_cache: int | None = None,
    **_: Any,
) -> list[float | None]:
    """Return 0 up to L - C tokens, falling linearly to -1 at L tokens: DAPO, arXiv 2503.14476, equation 13.

    ``R = clip((L - C - n) / C, -1, 0)``, where n is the number of tokens including the end token, L is
    ``max_completion_length`` and C is ``soft_punish_cache`` or a quarter of L. A completion cut off at L gets -1. Equal
    to TRL's reward.
    """
    cache = soft_punish_cache or max(max_completion_length // 4, 1)
    free = max_completion_length - cache
    return [min(0.0, max(-1.0, (free - len(ids)) / cache)) for _, ids in zip(completions, completion_ids, strict=True)]
