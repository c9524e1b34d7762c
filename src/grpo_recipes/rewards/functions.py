r"""The rewards a recipe names, other than ``math_verify``: pure, fast, and called in the trainer's own process.

Every one takes ``completions``, one a row as text or chat messages, and the columns it needs, one entry a row:
``answer``, the reference solutions, and ``completion_ids``, the sampled tokens without padding. TRL's own cosine,
repetition and overlong rewards are not wrapped: they would import torch into ``grpo check-rewards``.
"""

import math
import re
from typing import Any

from grpo_recipes.rewards.answers import completion_text, final_text, is_correct, solution_text

_ONE_ANSWER = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)


def pure_accuracy_math(
    completions: list[Any], answer: list[Any], *, answer_matching: str = "normalized", **_: Any
) -> list[float | None]:
    """Return 1.0 where the last answer tag holds the reference solution, else 0.0 (the guide's default reward).

    ``answer_matching: normalized`` compares numbers by value, however they are written (see ``answers``); ``strict``
    compares text, up to surrounding white space.
    """
    rows = zip(completions, answer, strict=True)
    return [
        float(is_correct(final_text(completion), solution_text(gold), answer_matching)) for completion, gold in rows
    ]


def environment(completions: list[Any], episode_reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the reward that each episode had, which its environment gave."""
    return episode_reward


def format_tags(completions: list[Any], **_: Any) -> list[float | None]:
    """Return 1.0 for free text followed by exactly one non-empty answer tag and nothing else, otherwise 0.0.

    Like all rewards that look for an answer, it reads only the text after the last ``</think>``.
    """
    return [float(_ONE_ANSWER.fullmatch(final_text(completion)) is not None) for completion in completions]


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
    """Return more for a short right answer than for a long one: the cosine reward of arXiv 2502.03373, appendix C.1.

    ``R = end + (start - end) / 2 * (1 + cos(pi * min(n, L) / L))`` with n the tokens of the completion, its end token
    included, and L = ``cosine_max_len``, or ``max_completion_length``. A right answer goes from
    ``cosine_max_value_correct`` when empty to ``cosine_min_value_correct`` at L tokens, a wrong one from
    ``cosine_min_value_wrong`` to ``cosine_max_value_wrong``. The limit has no value of its own, unlike in the paper:
    ``soft_overlong`` is for that. Answers are compared as by ``pure_accuracy_math``.
    """
    longest = cosine_max_len or max_completion_length
    rewards: list[float | None] = []
    right = pure_accuracy_math(completions, answer, answer_matching=answer_matching)
    for is_one, ids in zip(right, completion_ids, strict=True):
        start, end = cosine_min_value_wrong, cosine_max_value_wrong
        if is_one:
            start, end = cosine_max_value_correct, cosine_min_value_correct
        rewards.append(end + (start - end) / 2 * (1 + math.cos(math.pi * min(len(ids) / longest, 1.0))))
    return rewards


def repetition_penalty(
    completions: list[Any], *, repetition_n_grams: int = 3, repetition_max_penalty: float = -1.0, **_: Any
) -> list[float | None]:
    """Return the share of n-grams that were there before times the penalty: arXiv 2502.03373, appendix C.2.

    ``R = (1 - distinct n-grams / all n-grams) * repetition_max_penalty``, over words in lower case (TRL's counts token
    ids, so that the same words repeated with other spaces cost nothing). Fewer than n words get 0.
    """
    rewards: list[float | None] = []
    for completion in completions:
        words = completion_text(completion).lower().split()
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
    """Return 0 up to L - C tokens, falling to -1 at L: DAPO, arXiv 2503.14476, equation 13.

    ``R = clip((L - C - n) / C, -1, 0)`` with n the tokens of the completion, its end token included, L =
    ``max_completion_length`` and C = ``soft_punish_cache``, or a quarter of L. So a completion cut off at L gets -1.
    Equal to TRL's.
    """
    cache = soft_punish_cache or max(max_completion_length // 4, 1)
    free = max_completion_length - cache
    return [min(0.0, max(-1.0, (free - len(ids)) / cache)) for _, ids in zip(completions, completion_ids, strict=True)]
