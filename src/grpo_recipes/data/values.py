"""One value of a dataset as what training takes: chat messages, or an answer's text."""

from __future__ import annotations

import math
from typing import Any

from grpo_recipes.data.sources import Source
from grpo_recipes.errors import config_error

Message = dict[str, str]


def chat_of(value: Any, source: Source) -> list[Message]:
    """A prompt as chat messages; none when it is empty.

    Args:
        value: a text, or a list of messages ``{role, content}``.
        source: for what the message says.

    Raises:
        ConfigError: it is neither, or a chat that ends with the assistant's turn.
    """
    if not isinstance(value, list):
        text = _text(value, source.prompt, source.keys[0], source)
        return [{"role": "user", "content": text}] if text.strip() else []
    messages = [_message(message, source) for message in value]
    if messages and messages[-1]["role"] == "assistant":
        what = f"a chat in column '{source.prompt}' of '{source.id}' ends with an assistant's turn"
        raise config_error(source.keys[0], what, "leave out the last message: a prompt ends with the user's")
    return messages if messages and messages[-1]["content"].strip() else []


def answer_of(value: Any, marker: str | None, source: Source) -> tuple[str, bool]:
    """A solution as text, and whether it is one in which the marker is missing.

    Raises:
        ConfigError: it is no scalar.
    """
    text = _text(value, source.solution, source.keys[1], source)
    if not marker:
        return text.strip(), False
    _, found, text = text.rpartition(marker)
    return text.strip(), bool(text.strip()) and not found


def _message(message: Any, source: Source) -> Message:
    given = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    role, content = given.get("role"), given.get("content", "")
    if not isinstance(role, str) or not isinstance(content, str) or given.keys() - {"role", "content"}:
        what = f"a chat in column '{source.prompt}' of '{source.id}' holds {_short(message)}"
        raise config_error(source.keys[0], what, "write messages {role, content} with two texts and nothing else")
    return {"role": role, "content": content}


def _text(value: Any, column: str, key: str, source: Source) -> str:
    """A scalar as text; '' when it is missing. A whole number that JSON made a float is written without '.0'."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str | bool | int | float):
        return str(value)
    what = f"column '{column}' of '{source.id}' holds {_short(value)}, where a text belongs"
    raise config_error(key, what, "name a column of texts, or save it as texts")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
