"""Read, merge and type a recipe, with the origin of every value. No torch.

Precedence: flag > environment variable > YAML > default. The trainer gets the result through TrlParser alone.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import Problem, Refused
from grpo_recipes.keys import ENVIRONMENT_KEYS, OBSOLETE_KEYS, OWNED_KEYS, catalogue, nearest
from grpo_recipes.secrets import secret_value

DEFAULT_ORIGIN = "default"
# Flags of the guide's launch line that need no key: accepted where they ask for what happens anyway.
_HARMLESS_FLAGS = {"overwrite_output_dir": False}


@dataclass(frozen=True)
class Value:
    """A value and where it came from: ``file:line``, ``--flag``, a variable's name, or ``default``."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Recipe:
    """A typed recipe: every catalogue key with its value and origin.

    Attributes:
        path: the YAML file it was read from.
        values: key -> value and origin, one entry for every key of the catalogue.
        notes: things accepted that the user should be told.
    """

    path: Path
    values: dict[str, Value]
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, key: str) -> Any:
        return self.values[key].value

    def origin(self, key: str) -> str:
        """Where the value of ``key`` came from."""
        return self.values[key].origin

    def given(self, key: str) -> bool:
        """Whether the user set ``key`` anywhere."""
        return self.origin(key) != DEFAULT_ORIGIN

    def as_yaml(self) -> str:
        """The given values as YAML, each under a comment that names its origin."""
        return "".join(
            f"# {entry.origin}\n{yaml.safe_dump({key: entry.value}, allow_unicode=True, width=10**6)}"
            for key, entry in sorted(self.values.items())
            if entry.origin != DEFAULT_ORIGIN
        )


def read_frozen(path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Recipe:
    """Read what ``as_yaml`` wrote, with the origins it names, and what overrides it now.

    Raises:
        Refused: as ``read_recipe``.
    """
    recipe = read_recipe(path, flags, environment)
    lines = path.read_text().splitlines()
    values = dict(recipe.values)
    for key, entry in recipe.values.items():
        name, _, line = entry.origin.rpartition(":")
        if name == path.name:
            values[key] = Value(entry.value, lines[int(line) - 2].removeprefix("# "))
    return Recipe(path, values, recipe.notes)


def read_recipe(path: Path, flags: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> Recipe:
    """Read a recipe and what overrides it.

    Args:
        path: the YAML file.
        flags: recipe flags of the command line, e.g. ``["--learning_rate", "1e-6"]``.
        environment: variables to look in for those of ``ENVIRONMENT_KEYS``; none by default.

    Raises:
        Refused: every unknown key, duplicate, wrong type, value out of range or secret found, all at once.
    """
    problems: list[Problem] = []
    given = _read_yaml(path, problems)
    for name, key in ENVIRONMENT_KEYS.items():
        if (environment or {}).get(name):
            given[key] = Value((environment or {})[name], name)
    notes: list[str] = []
    for key, text in _read_flags(flags, problems):
        if key in _HARMLESS_FLAGS:
            _accept_harmless(key, text, problems, notes)
        else:
            given[key] = Value(text, f"--{key}")
    values = {key: Value(entry["default"], DEFAULT_ORIGIN) for key, entry in catalogue().items()}
    for key, raw in given.items():
        problem = _key_problem(key, raw.origin) or _secret_problem(key, raw)
        if problem is None:
            from_text = not raw.origin.startswith(f"{path.name}:")
            typed, problem = _typed(key, raw, from_text)
            values[key] = Value(typed, raw.origin)
        if problem is not None:
            problems.append(problem)
    if problems:
        raise Refused(*problems)
    return Recipe(path, values, notes)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader; a class of our own so that nothing is registered on the shared one."""


def _read_yaml(path: Path, problems: list[Problem]) -> dict[str, Value]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise Refused(Problem(str(path), f"cannot be read ({reason})", "name an existing recipe")) from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise Refused(
                Problem(f"{path.name}:1", "a recipe is a mapping of key: value", "write one key: value a line")
            )
        _find_duplicates(path, node, problems)
        return {
            str(loader.construct_object(key, deep=True)): Value(
                loader.construct_object(value, deep=True), f"{path.name}:{key.start_mark.line + 1}"
            )
            for key, value in node.value
        }
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.name}:{mark.line + 1}" if mark else path.name
        what = f"not valid YAML ({getattr(error, 'problem', None) or str(error).splitlines()[0]})"
        raise Refused(Problem(where, what, "mend the indentation, quote or bracket there")) from None


def _find_duplicates(path: Path, node: yaml.Node, problems: list[Problem]) -> None:
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                continue  # `{{ x }}`: told when it is constructed
            if key.value in first:
                what = f"'{key.value}' is given twice (first on line {first[key.value]}); YAML keeps the last silently"
                problems.append(Problem(f"{path.name}:{line}", what, "keep one of the two lines"))
            first.setdefault(key.value, line)
            _find_duplicates(path, value, problems)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _find_duplicates(path, item, problems)


def _read_flags(flags: Iterable[str], problems: list[Problem]) -> list[tuple[str, Any]]:
    """``--key value``, ``--key=value``, ``--key`` and ``--no_key`` (booleans), hyphens or underscores."""
    pairs: list[tuple[str, Any]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            fix = "put the recipe right after the command, and write --key value for a key"
            problems.append(Problem(f"'{flag}'", "stands alone on the command line", fix))
            continue
        name, equals, text = flag[2:].partition("=")
        name = name.replace("-", "_")
        if equals:
            pairs.append((name, text))
            continue
        values: list[str] = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        is_list = catalogue().get(name, {}).get("type", "").startswith("list")
        if not values and name.startswith("no_") and catalogue().get(name[3:], {}).get("type") == "bool":
            pairs.append((name[3:], False))
        elif not values:
            pairs.append((name, True))
        else:
            pairs.append((name, values if is_list and len(values) > 1 else values[0]))
            if not is_list and len(values) > 1:
                problems.append(Problem(f"--{name}", f"takes one value, got {values}", "quote it or drop the rest"))
    return pairs


def _accept_harmless(key: str, value: Any, problems: list[Problem], notes: list[str]) -> None:
    if _as_bool(value) is _HARMLESS_FLAGS[key]:
        notes.append(f"--{key} {str(value).lower()} has no effect: {OBSOLETE_KEYS[key]}")
    else:
        problems.append(Problem(f"--{key}", f"'{key} {value}' is not supported", OBSOLETE_KEYS[key]))


def _key_problem(key: str, origin: str) -> Problem | None:
    if key in catalogue():
        return None
    if key in OWNED_KEYS:
        return Problem(origin, f"'{key}' is not a recipe's to set", OWNED_KEYS[key])
    if key in OBSOLETE_KEYS:
        return Problem(origin, f"'{key}' is obsolete", OBSOLETE_KEYS[key])
    close = nearest(key)
    return Problem(origin, f"unknown key '{key}'", f"write '{close}'" if close else "remove it")


def _secret_problem(key: str, raw: Value) -> Problem | None:
    if not secret_value(raw.value):
        return None
    return Problem(raw.origin, f"'{key}' holds what looks like a secret", "remove it and export it as a variable")


def _typed(key: str, raw: Value, from_text: bool) -> tuple[Any, Problem | None]:
    """``raw`` as the catalogue's type, or the problem with it."""
    entry = catalogue()[key]
    value = raw.value
    if value is None or (from_text and value == "null"):
        if entry["optional"]:
            return None, None
        return None, Problem(raw.origin, f"'{key}' is empty", f"write a {entry['type']} or remove the line")
    try:
        typed = _convert(entry["type"], value, from_text)
    except ValueError as error:
        return None, Problem(raw.origin, f"'{key}' is {error}", f"write {_example(entry)}")
    return typed, _limit_problem(key, entry, typed, raw.origin)


def _convert(kind: str, value: Any, from_text: bool) -> Any:
    if kind.startswith("list["):
        items = value
        if isinstance(value, str):
            items = [] if value == "none" else [part.strip() for part in value.split(",")] if from_text else [value]
        if not isinstance(items, list):
            raise ValueError(f"{value!r}, a {type(value).__name__} where a list belongs")
        return [_convert(kind[5:-1], item, from_text) for item in items]
    if kind == "dict":
        if isinstance(value, str):
            with contextlib.suppress(yaml.YAMLError):
                value = yaml.safe_load(value)
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} where a mapping belongs")
        return value
    if kind == "bool":
        return _bool_or_fail(value, from_text)
    if isinstance(value, bool):
        hint = " (YAML reads no, yes, on and off as booleans: quote the word)" if kind == "str" else ""
        raise ValueError(f"the boolean {value} where {_article(kind)} belongs{hint}")
    if kind in ("int", "float"):
        return _number(kind, value)
    if kind == "str" and not isinstance(value, str):
        if from_text or isinstance(value, int | float):
            return str(value)
        raise ValueError(f"{value!r} where a text belongs")
    return value


def _bool_or_fail(value: Any, from_text: bool) -> bool:
    truth = _as_bool(value) if from_text else value
    if not isinstance(truth, bool):
        raise ValueError(f"{value!r} where true or false belongs")
    return truth


def _as_bool(value: Any) -> Any:
    if isinstance(value, str):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(value.lower(), value)
    return value


def _number(kind: str, value: Any) -> int | float:
    # YAML 1.1 reads 1e-6 as a text, so a text that is a number is taken as one.
    if not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} where {_article(kind)} belongs")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{value!r} where {_article(kind)} belongs") from None
    if math.isnan(number):
        raise ValueError("not a number (nan)")
    if kind == "float":
        return number
    if math.isinf(number) or number != int(number):
        raise ValueError(f"{value!r} where a whole number belongs")
    return value if isinstance(value, int) else int(number)


def _limit_problem(key: str, entry: dict[str, Any], value: Any, origin: str) -> Problem | None:
    low, high, choices = entry.get("min"), entry.get("max"), entry.get("choices")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if low is not None and value < low:
            return Problem(origin, f"'{key}' is {value}, below {low}", f"write {low} or more")
        if high is not None and value > high:
            return Problem(origin, f"'{key}' is {value}, above {high}", f"write {high} or less")
    if choices and isinstance(value, str) and value not in choices:
        return Problem(origin, f"'{key}' is '{value}'", f"write one of {', '.join(choices)}")
    return None


def _article(kind: str) -> str:
    return {"int": "a whole number", "float": "a number", "str": "a text"}[kind]


def _example(entry: dict[str, Any]) -> str:
    if entry.get("choices"):
        return "one of " + ", ".join(entry["choices"])
    examples = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "str": "a text",
        "dict": "a mapping",
    }
    return examples.get(entry["type"], "a list, e.g. [a, b]")
