"""Shape a row of a dataset into a chat and a solution, and say how to name a nested value. No torch, no datasets.

A column is a name, or a path into lists and dictionaries: ``reward_model.ground_truth``, ``conversations.0.value``.
A prompt is a text or a list of messages. A solution is a text, a number or a boolean.
"""

import ast
import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from grpo_recipes.errors import ConfigError, config_error

Message = dict[str, str]
COLUMN_KEYS = ("dataset_prompt_column", "dataset_solution_column")
DEFAULT_SOLUTION = "answer"  # value of dataset_solution_column, unless the recipe sets it
_DEPTH = 4  # parts of a path that a message offers
_OFFERED = 8  # columns that a message lists
# Last parts of paths that are likely a solution or a prompt, for the order in a message.
_LIKELY = ("ground_truth", "answer", "solution", "target", "value", "content", "text")


@dataclass(frozen=True)
class DataSource:
    """One dataset of a recipe, and the columns that the recipe reads."""

    id: str  # hub id, file or folder
    config: str | None
    split: str
    prompt: str  # column of the problem
    solution: str  # column of the reference solution
    keys: tuple[str, str] = COLUMN_KEYS  # recipe keys that name the two columns, for messages
    others: tuple[str, ...] | None = None  # other columns that rewards get; None passes all but media

    def naming(self, path: str, for_solution: bool = False) -> str:
        """Return the fix, as text for the user, that selects the column ``path`` for the prompt or the solution."""
        key = self.keys[for_solution]
        pair = f"[{self.prompt}, {path}]" if for_solution else f"[{path}, {self.solution}]"
        return f"set columns: {pair} in {key}" if key == "dataset_mixture" else f"set {key}: {path}"


def root_of(column: str, names: Sequence[str]) -> str:
    """Return the column of a dataset that contains ``column``: itself, or the first part of a path."""
    return column if column in names else column.partition(".")[0]


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column or of a path into one; None if the row has no such value.

    A path has names and list indexes between dots, for example ``messages.-1.content``. Negative indexes count from the
    end.
    """
    if column in row:
        return row[column]
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping):
            value = value.get(part)
        elif isinstance(value, list) and part.removeprefix("-").isdigit():
            value = value[int(part)] if -len(value) <= int(part) < len(value) else None
        else:
            return None
    return value


def chat_of(value: Any, source: DataSource, system: str | None, completed: bool = False) -> list[Message]:
    """Return a prompt, a text or messages ``{role, content}``, as a chat.

    ``system`` comes before a chat without a system message. Return [] for an empty prompt, or if the last message is
    empty. With ``completed``, an empty prompt is a chat whose last message is empty. A ConfigError rejects anything
    else, and a chat that ends with the assistant's turn.
    """
    if not isinstance(value, list):
        text = _to_text(value, source, for_solution=False)
        if text.lstrip().startswith("[{") and _is_chat_as_text(text):
            fault = f"column '{source.prompt}' of '{source.id}' holds a chat written as text"
            raise config_error(source.keys[0], fault, "save the column as a list of messages, in .jsonl or .parquet")
        value = [{"role": "user", "content": text}]
    messages = [_read_message(value, index, source) for index in range(len(value))]
    if messages and messages[-1]["role"] == "assistant":
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        fix = "remove the last message: a prompt ends with the user's"
        if len(messages) == 2 and users == [0]:
            fix = source.naming(f"{source.prompt}.0.content")
        raise config_error(source.keys[0], f"{_name_chat(source)} ends with an assistant's turn", fix)
    if not messages or not (completed or messages[-1]["content"].strip()):
        return []
    has_system = messages[0]["role"] in ("system", "developer")
    return messages if has_system or not system else [{"role": "system", "content": system}, *messages]


def _is_chat_as_text(text: str) -> bool:
    """Return whether a text is a list of messages with role and content, as Python or JSON writes it."""
    messages: Any = None
    with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        messages = ast.literal_eval(text.strip())
    with contextlib.suppress(ValueError, RecursionError):
        messages = messages or json.loads(text)
    return isinstance(messages, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in messages
    )


def _read_message(messages: list[Any], index: int, source: DataSource) -> Message:
    """Return the message at ``index`` with its role and content, "" without content.

    Raise ConfigError if they are not two texts, or the message has other parts. The fix depends on what it is instead.
    """
    message, column = messages[index], source.prompt
    parts = {name: part for name, part in message.items() if part is not None} if isinstance(message, dict) else {}
    filled = {"content": "", **parts}
    if parts and filled.keys() == {"role", "content"} and all(isinstance(part, str) for part in filled.values()):
        return {"role": str(filled["role"]), "content": str(filled["content"])}
    fault = f"{_name_chat(source)} holds {_shorten(message)}, expected {{role, content}} with two texts"
    fix = "save messages {role, content} with two texts and nothing else"
    if {"from", "value"} <= parts.keys():
        people = [turn for turn in messages if isinstance(turn, dict) and turn.get("from") in ("human", "user")]
        fix = "save messages {role, content} instead of {from, value}"
        if people:
            fix = source.naming(f"{column}.{messages.index(people[0])}.value")
    elif isinstance(message, int) and not isinstance(message, bool):
        fault = f"column '{column}' of '{source.id}' holds token ids ({_shorten(messages)}), expected text or messages"
        fix = f"{source.naming('COLUMN')} with a column of texts, or save the text of the prompts"
    elif isinstance(message, str):
        fault = f"column '{column}' of '{source.id}' holds a list of texts, expected a text or messages"
        fix = source.naming(f"{column}.0") if len(messages) == 1 else "save each prompt as one text"
    elif isinstance(filled.get("content"), list):
        fault = f"{_name_chat(source)} holds content in parts ({_shorten(filled['content'])}), expected a text"
        fix = "save each content as one text"
        part = filled["content"][0] if len(messages) == len(filled["content"]) == 1 else None
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            fix = source.naming(f"{column}.0.content.0.text")
    elif {"role", "content"} < filled.keys():
        extra = ", ".join(name for name in filled if name not in ("role", "content"))
        fix = f"remove {extra} from the messages: only role and content are rendered"
    raise config_error(source.keys[0], fault, fix)


def _name_chat(source: DataSource) -> str:
    """Return the subject of a message about a chat in the prompt column."""
    return f"a chat in column '{source.prompt}' of '{source.id}'"


def answer_of(value: Any, marker: str | None, source: DataSource) -> tuple[str, bool]:
    """Return a solution as text, and whether it lacks the marker (False if it is empty, or without ``marker``).

    Only the stripped text after the marker's last occurrence is returned, or all of it if the marker is missing.
    None and NaN are an empty solution. Raise ConfigError for a list or a mapping.
    """
    text = _to_text(value, source, for_solution=True)
    _, separator, answer = text.rpartition(marker) if marker else ("", "no marker", text)
    return answer.strip(), bool(answer.strip()) and not separator


def _to_text(value: Any, source: DataSource, for_solution: bool) -> str:
    """Return a scalar as text, as JSON writes it, or "" for None and NaN; raise ConfigError for lists and mappings.

    A whole number that JSON made a float has no ".0". The error proposes paths to scalars inside the value.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, str | bool | int | float):
        return value if isinstance(value, str) else json.dumps(value)
    if isinstance(value, Decimal):
        return str(value)
    column = source.solution if for_solution else source.prompt
    fault = f"column '{column}' of '{source.id}' holds {_shorten(value)}, expected a text"
    paths = nested_paths(column, value)
    if isinstance(value, list) and len(value) != 1:  # one of several would be compared with, or asked
        paths = []
    fix = " or ".join(source.naming(path, for_solution) for path in paths[:2])
    raise config_error(source.keys[for_solution], fault, fix or "name a column of texts, or save it as texts")


def nested_paths(column: str, value: Any) -> list[str]:
    """Return paths to the texts and numbers inside a value of ``column``, the likely prompts and answers first."""
    paths = [path for path, leaf in _iterate_leaves(column, value, _DEPTH) if _is_filled(leaf)]

    def order(path: str) -> tuple[int, int]:
        """Return a sort key: the rank of the path's last part in ``_LIKELY``, then its place in the value."""
        name = path.rpartition(".")[2]
        return _LIKELY.index(name) if name in _LIKELY else len(_LIKELY), paths.index(path)

    return sorted(paths, key=order)


def _iterate_leaves(path: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield path and value of each leaf inside ``value``, at most ``depth`` levels deep and 8 items of each list."""
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside = [(str(name), part) for name, part in value.items()]
    elif isinstance(value, list):
        inside = [(str(index), part) for index, part in enumerate(value[:_OFFERED])]
    else:
        yield path, value
    for name, part in inside if depth else ():
        yield from _iterate_leaves(f"{path}.{name}", part, depth - 1)


def _is_filled(value: Any) -> bool:
    """Return whether a value is a number, a boolean, or a text that is not blank."""
    return isinstance(value, bool | int | float | Decimal) or (isinstance(value, str) and bool(value.strip()))


def usable_columns(rows: Sequence[Mapping[str, Any]], source: DataSource, for_solution: bool) -> list[str]:
    """Return the columns of these rows that can be the solution, or the prompt if ``for_solution`` is false.

    If no column fits, return the first 8 paths into columns that fit, [] if there are none.
    """

    def fits(column: str) -> bool:
        """Return whether all rows have a valid value or none in this column, and at least one has a value."""
        read: Callable[[Any], Any] = lambda value: chat_of(value, source, None)  # noqa: E731
        if for_solution:
            read = lambda value: answer_of(value, None, source)[0]  # noqa: E731
        with contextlib.suppress(ConfigError):
            return any([read(value_at(row, column)) for row in rows])
        return False

    columns = list(dict.fromkeys(name for row in rows for name in row))
    nested = [path for name in columns for path in nested_paths(name, rows[0].get(name)) if path != name]
    return [name for name in columns if fits(name)] or [path for path in nested if fits(path)][:_OFFERED]


def _shorten(value: Any) -> str:
    """Return the first 80 characters of a value as Python writes it."""
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + " ..."
