"""Whether a completion gives any of the right answers of a ModeBench problem."""

from __future__ import annotations

from typing import Any

from grpo_recipes.modebench.verify import is_problem, mode_of
from grpo_recipes.rewards.text import completion_text


def modebench(completions: list[Any], answer: list[Any], **_: Any) -> list[float | None]:
    r"""1.0 where the last ``\boxed{...}`` solves the problem, else 0.0; None where the row is no ModeBench problem.

    Args:
        completions: one completion a row, as text or chat messages.
        answer: the problems as JSON, the column ``answer`` of a modebench dataset.
    """
    return [
        float(mode_of(completion_text(completion), problem) is not None) if is_problem(problem) else None
        for completion, problem in zip(completions, map(str, answer), strict=True)
    ]
