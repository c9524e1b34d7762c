"""Whether a completion ends in exactly one well-formed ``<answer>…</answer>``."""

from __future__ import annotations

import re
from typing import Any

from grpo_recipes.rewards.text import completion_text

_ONE_ANSWER = re.compile(r"(?:(?!</?answer>).)*<answer>(?:(?!</?answer>).)+</answer>\s*", re.DOTALL)


def format_tags(completions: list[Any], **_: Any) -> list[float | None]:
    """1.0 where the completion is free text followed by one non-empty answer tag and nothing else, otherwise 0.0.

    Args:
        completions: one completion a row, as text or chat messages.
    """
    return [float(_ONE_ANSWER.fullmatch(completion_text(completion)) is not None) for completion in completions]
