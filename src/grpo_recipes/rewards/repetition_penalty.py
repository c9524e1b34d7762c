"""A penalty for saying the same again: arXiv 2502.03373, appendix C.2."""

from __future__ import annotations

from typing import Any

from grpo_recipes.rewards.text import completion_text


def repetition_penalty(
    completions: list[Any], *, repetition_n_grams: int = 3, repetition_max_penalty: float = -1.0, **_: Any
) -> list[float | None]:
    """The share of n-grams that were there before, times the largest penalty.

    ``R = (1 - distinct n-grams / all n-grams) * repetition_max_penalty``, over words in lower case. A completion of
    fewer than n words gets 0.

    Args:
        completions: one completion a row, as text or chat messages.
        repetition_n_grams: n, in words.
        repetition_max_penalty: 0 or less.
    """
    return [
        _repeated(completion_text(completion).lower().split(), repetition_n_grams) * repetition_max_penalty
        for completion in completions
    ]


def _repeated(words: list[str], n: int) -> float:
    """The share of n-grams that are repetitions, from 0 to below 1."""
    n_grams = list(zip(*(words[start:] for start in range(n)), strict=False))
    return 1 - len(set(n_grams)) / len(n_grams) if n_grams else 0.0
