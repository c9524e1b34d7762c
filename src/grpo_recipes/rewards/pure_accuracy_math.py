"""Exact match of the answer inside ``<answer>…</answer>`` (the training guide's default reward)."""

from __future__ import annotations

import re
from typing import Any

from grpo_recipes.rewards.text import completion_text

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def pure_accuracy_math(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    """1.0 where the last answer tag holds the reference solution, up to surrounding white space, else 0.0.

    Args:
        completions: one completion a row, as text or chat messages.
        answer: reference solutions, one a row.
    """
    return [_score(completion_text(text), str(gold)) for text, gold in zip(completions, answer, strict=True)]


def _score(text: str, gold: str) -> float:
    answers = _ANSWER.findall(text)
    return float(bool(answers) and answers[-1].strip() == gold.strip())
