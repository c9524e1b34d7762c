"""A value of a recipe with its source, typed by the catalogue."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.keys import nearest_of, nested_catalogue

Entry = Mapping[str, Any]
Path = tuple[str | int, ...]

# No file, log or process takes these: NUL and other control characters but tab and line ends, and half characters.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "dict": "a mapping",
    "list[dict]": "a list of mappings",
}


@dataclass(frozen=True)
class Raw:
    """What the user wrote for a key."""

    value: Any  # as YAML or the command line gives it
    source: str  # file:line, --flag or a variable's name
    from_text: bool = False  # of the command line or the environment, which have no types
    lines: Mapping[Path, str] = field(
        default_factory=dict
    )  # of the parts of a nested value, by their path below the key
    shadowed: str = ""  # file:line of what this overrides in the recipe


def typed(key: str, entry: Entry, raw: Raw) -> tuple[Any, list[Problem]]:
    """Return ``raw`` as the catalogue's type, and every problem with it and its parts."""
    value, problems = _typed_whole(key, entry, raw)
    if isinstance(value, dict | list) and not problems:
        problems = list(_nested_problems((key,), value, raw))
    return value, problems


def _typed_whole(key: str, entry: Entry, raw: Raw) -> tuple[Any, list[Problem]]:
    value = raw.value
    if value is None or (raw.from_text and value == "null"):
        if entry["optional"]:
            return None, []
        return None, [Problem(raw.source, f"'{key}' is empty", f"write {_example(entry)}, or remove it")]
    if entry.get("infinite") and str(value).lower().removeprefix("+") in (".inf", "inf", "infinity"):
        return math.inf, []  # as YAML, Python and JSON write it
    try:
        converted = _convert(entry["type"], value, raw.from_text)
    except ValueError as error:
        return None, [Problem(raw.source, f"'{key}' is {error}", f"write {_example(entry)}")]
    problem = _limit_problem(key, entry, converted, raw.source)
    return converted, [problem] if problem else []


def _nested_problems(path: Path, value: Any, raw: Raw) -> Iterator[Problem]:
    """Type the parts of a mapping whose keys are known, in place, and yield what is wrong at its own line."""
    names = [part for part in path if isinstance(part, str)]
    known = nested_catalogue().get(".".join(names))
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield from _nested_problems((*path, index), item, raw)
        return
    if known is None:
        return
    for name, part in value.items():
        where = raw.lines.get((*path[1:], name), raw.source)
        if name not in known:
            close = nearest_of(str(name), known)
            fix = f"write '{close}'" if close else f"write one of {', '.join(known)}"
            yield Problem(where, f"unknown key '{name}' in {'.'.join(names)}", fix)
            continue
        converted, problems = _typed_whole(f"{'.'.join(names)}.{name}", known[name], Raw(part, where, raw.from_text))
        value[name] = converted if not problems else part
        yield from problems
        if isinstance(converted, dict | list) and not problems:
            yield from _nested_problems((*path, name), converted, raw)


def _convert(kind: str, value: Any, from_text: bool) -> Any:
    if kind.startswith("list["):
        return _list(kind[5:-1], value, from_text)
    if kind == "dict":
        return _mapping(value)
    if kind == "bool":
        truth = as_bool(value) if from_text else value
        if not isinstance(truth, bool):
            raise ValueError(f"{value!r} where true or false belongs")
        return truth
    if isinstance(value, bool):
        hint = " (YAML reads no, yes, on and off as booleans: quote the word)" if kind == "str" else ""
        raise ValueError(f"the boolean {value} where {_WORDS[kind]} belongs{hint}")
    if kind in ("int", "float"):
        return _number(kind, value)
    if kind == "str" and not isinstance(value, str):
        if from_text or isinstance(value, int | float):
            return str(value)
        raise ValueError(f"{value!r} where a text belongs")
    if isinstance(value, str) and (found := _CONTROL.search(value)):
        raise ValueError(f"a text with the control character {found[0]!r}")
    return value


def _list(kind: str, value: Any, from_text: bool) -> list[Any]:
    items = value
    if isinstance(value, str):
        items = [] if value == "none" else [part.strip() for part in value.split(",")] if from_text else [value]
    if not isinstance(items, list):
        raise ValueError(f"{value!r}, a {type(value).__name__} where a list belongs")
    return [_convert(kind, item, from_text) for item in items]


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        # The last two are what PyYAML raises on `!!bool x`, and on a thousand brackets.
        with contextlib.suppress(yaml.YAMLError, KeyError, RecursionError):
            value = yaml.safe_load(value)
    if not isinstance(value, dict):
        raise ValueError(f"{_short(value)} where a mapping belongs")
    return value


def as_bool(value: Any) -> Any:
    """Return a text of the command line as the boolean it names, anything else as it is."""
    if isinstance(value, str):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(value.lower(), value)
    return value


def _number(kind: str, value: Any) -> int | float:
    # YAML 1.1 reads 1e-6 as a text, so a text that is a number is taken as one.
    if not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} where {_WORDS[kind]} belongs")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{_short(value)} where {_WORDS[kind]} belongs") from None
    except OverflowError:  # a whole number above 1e308
        number = math.inf
    if math.isnan(number):
        raise ValueError("not a number (nan)")
    if kind == "float" and math.isinf(number):
        raise ValueError(f"{_short(value)}, which is not finite")
    if kind == "float":
        return number
    if math.isinf(number) or number != int(number):
        raise ValueError(f"{_short(value)} where a whole number belongs")
    return value if isinstance(value, int) else int(number)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _limit_problem(key: str, entry: Entry, value: Any, source: str) -> Problem | None:
    low, high, choices = entry.get("min"), entry.get("max"), entry.get("choices")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if low is not None and value < low:
            return Problem(source, f"'{key}' is {value}, below {low}", f"write {low} or more")
        if high is not None and value > high:
            return Problem(source, f"'{key}' is {value}, above {high}", f"write {high} or less")
    if choices and isinstance(value, str) and value not in choices:
        close = nearest_of(value, choices) if len(choices) > 12 else None
        return Problem(source, f"'{key}' is '{value}'", f"write '{close}'" if close else f"write {_example(entry)}")
    return None


def _example(entry: Entry) -> str:
    if entry.get("choices"):
        return "one of " + ", ".join(entry["choices"])
    return _WORDS.get(entry["type"], "a list, e.g. [a, b]")
