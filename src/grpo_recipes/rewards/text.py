"""The text of a completion, whichever of TRL's two shapes it has."""

from __future__ import annotations

from typing import Any


def completion_text(completion: str | list[dict[str, Any]]) -> str:
    """The text of a completion given as text, or as a list of chat messages (the last one counts)."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""
