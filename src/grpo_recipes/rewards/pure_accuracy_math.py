"""Exact match of the answer inside ``<answer>…</answer>`` (the training guide's default reward)."""

from __future__ import annotations

from typing import Any

from grpo_recipes.rewards.answers import is_right
from grpo_recipes.rewards.text import completion_text


def pure_accuracy_math(
    completions: list[Any], answer: list[Any], *, answer_matching: str = "normalized", **_: Any
) -> list[float | None]:
    """1.0 where the last answer tag holds the reference solution, else 0.0.

    Args:
        completions: one completion a row, as text or chat messages.
        answer: reference solutions, one a row.
        answer_matching: ``normalized`` compares numbers by value, in whatever way they are written (see ``answers``);
            ``strict`` compares text, up to surrounding white space.
    """
    return [
        float(is_right(completion_text(completion), str(gold), answer_matching))
        for completion, gold in zip(completions, answer, strict=True)
    ]
