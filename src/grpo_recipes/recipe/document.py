"""What the user wrote: recipe files with lines and bases, what YAML reads otherwise than people write it, and flags."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import ConfigError, Problem, config_error
from grpo_recipes.paths import home
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.values import Raw

BASE_KEY = "base"
_MOST_BASES = 8
_MOST_BYTES = 1 << 20
_MOST_PARTS = 100_000
_INT, _FLOAT, _STR, _BOOL, _MERGE, _DATE = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "str", "bool", "merge", "timestamp")
)
Place = tuple[str | int, ...]
Visit = tuple[Place, yaml.Node | None, yaml.Node]
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, for which a date is the text it is written as: no key is one."""

    yaml_implicit_resolvers = {
        first: [resolver for resolver in resolvers if resolver[0] != _DATE]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:  # PyYAML's own constructors, on `!!bool maybe`
            what = f"'{str(node.value)[:40]}' cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from error


def read_document(path: Path, problems: list[Problem]) -> list[dict[str, Raw]]:
    """Return the keys of a recipe file and of its bases, the file's own last; ``problems`` gets what is wrong in them.

    Raises ConfigError where a file cannot be read, is not YAML, or the bases form a circle.
    """
    chain = [path]
    layers: list[dict[str, Raw]] = []
    while True:
        own = _read_file(chain[-1], problems)
        base = own.pop(BASE_KEY, None)
        layers.insert(0, own)
        if base is None:
            return layers
        chain.append(_base_file(chain, base))


def _base_file(chain: list[Path], base: Raw) -> Path:
    """Return the file a recipe builds on: beside it, or in the repository, so that a copied recipe still finds it."""
    if not isinstance(base.value, str):
        raise config_error(base.source, f"'{BASE_KEY}' is {base.value!r}", "name one recipe file")
    places = [chain[-1].parent / base.value, home() / base.value]
    found = next((place for place in places if os.path.isfile(place)), None)  # False too for a name that is too long
    if found is None:
        what = f"there is no recipe '{base.value}' beside this one or in the repository"
        raise config_error(base.source, what, "name an existing recipe")
    if found.resolve() in [path.resolve() for path in chain]:
        raise config_error(base.source, f"'{base.value}' builds on this recipe again", f"remove one {BASE_KEY}")
    if len(chain) > _MOST_BASES:
        what = f"more than {_MOST_BASES} recipes build on one another"
        raise config_error(base.source, what, "join some of them")
    return found


def _read_file(path: Path, problems: list[Problem]) -> dict[str, Raw]:
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise config_error(str(path), f"has {size // 10**6} MB, no recipe is so large", "name a recipe")
        return _parsed(path, path.read_text(encoding="utf-8"), problems)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise config_error(str(path), f"cannot be read ({reason})", "name an existing recipe") from None
    except RecursionError:
        raise config_error(path.name, "values are nested too deeply", "write them flatter") from None
    except yaml.YAMLError as error:
        raise ConfigError(_yaml_problem(path, error)) from None


def _parsed(path: Path, text: str, problems: list[Problem]) -> dict[str, Raw]:
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return {}
    if not isinstance(node, yaml.MappingNode):
        what = "a recipe is a mapping of key: value"
        raise config_error(f"{path.name}:{_line(node)}", what, "write one key: value a line")
    if _parts(node, {}) > _MOST_PARTS:
        what = f"its anchors and aliases stand for more than {_MOST_PARTS:,} values"
        raise config_error(path.name, what, "write out what is meant")
    merges = [key for key, _ in node.value if key.tag == _MERGE]
    if merges:
        where = f"{path.name}:{_line(merges[0])}"
        raise config_error(where, "'<<' is not a key of a recipe", f"use {BASE_KEY}: FILE")
    found: dict[str, Raw] = {}
    problems += _duplicates(path, node)
    for key, value in node.value:
        lines: dict[Place, str] = {}
        for place, name, part in _walk((), value):
            if name is not None:
                lines[place] = f"{path.name}:{_line(name)}"
            if isinstance(part, yaml.MappingNode):
                problems += _duplicates(path, part)
            elif isinstance(part, yaml.ScalarNode) and part.style is None:
                nested = any(isinstance(step, str) for step in place)
                trap = _number_trap(part) or (_nested_trap(part) if nested else None)
                problems += [Problem(f"{path.name}:{_line(part)}", *trap)] if trap else []
        source = f"{path.name}:{_line(key)}"
        found[str(loader.construct_object(key, deep=True))] = Raw(
            loader.construct_object(value, deep=True), source, lines=lines
        )
    return found


def _parts(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many nodes this one stands for with its aliases written out; too many where it holds itself."""
    if id(node) not in known:
        known[id(node)] = _MOST_PARTS + 1
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        below = 0 if isinstance(node, yaml.ScalarNode) else sum(_parts(part, known) for part in inner)
        known[id(node)] = min(1 + below, _MOST_PARTS + 1)
    return known[id(node)]


def _yaml_problem(path: Path, error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{path.name}:{mark.line + 1}" if mark else path.name
    why = getattr(error, "problem", None) or str(error).splitlines()[0]
    if "another document" in why:
        return Problem(where, "a second document begins", "write one recipe a file")
    return Problem(where, f"not valid YAML ({why})", "correct the indentation, quote or bracket there")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _walk(place: Place, node: yaml.Node, name: yaml.Node | None = None) -> Iterator[Visit]:
    """Yield a node and all below it: where it stands below the key, the node of its name in a mapping, and itself."""
    yield place, name, node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk((*place, str(key.value)), value, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk((*place, index), item)


def _duplicates(path: Path, node: yaml.MappingNode) -> Iterator[Problem]:
    first: dict[Any, int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # `{{ x }}`: reported when it is constructed
        if key.value in first:
            what = f"'{key.value}' is given twice (first on line {first[key.value]}); YAML keeps the last silently"
            yield Problem(f"{path.name}:{_line(key)}", what, "keep one of the two lines")
        first.setdefault(key.value, _line(key))


def _number_trap(node: yaml.ScalarNode) -> tuple[str, str] | None:
    """Return what is wrong with a plain word that YAML 1.1 reads as another number than it looks like, and the fix."""
    text = node.value
    if node.tag in (_INT, _FLOAT) and ":" in text:
        return f"YAML reads {text} as a number to the base 60", f'write "{text}" in quotes'
    if node.tag == _INT and re.fullmatch(r"[-+]?0\d+", text.replace("_", "")):
        return f"YAML reads {text} as an octal number", f"write {int(text.replace('_', ''))}"
    return None


def _nested_trap(node: yaml.ScalarNode) -> tuple[str, str] | None:
    """Return the same for words below a key of a mapping; the catalogue types ``1e-6`` and ``no`` at the top."""
    text = node.value
    if node.tag == _STR and _EXPONENT.fullmatch(text):
        mantissa, exponent = re.split("[eE]", text)
        sign = "" if exponent.startswith(("-", "+")) else "+"
        number = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent}"
        return f"YAML reads {text} as a text", f"write {number}"
    if node.tag == _BOOL and text.lower() not in ("true", "false"):
        truth = text.lower() in ("yes", "on", "y")
        return f"YAML reads {text} as {str(truth).lower()}", f'write {str(truth).lower()}, or "{text}" in quotes'
    return None


def read_flags(flags: Iterable[str], problems: list[Problem]) -> list[tuple[str, Any]]:
    """Read ``--key value``, ``--key=value``, ``--key`` and ``--no_key`` (booleans), hyphens or underscores."""
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
        pairs.append(_pair(name, values, problems))
    return pairs


def _pair(name: str, values: list[str], problems: list[Problem]) -> tuple[str, Any]:
    if not values and name.startswith("no_") and catalogue().get(name[3:], {}).get("type") == "bool":
        return name[3:], False
    if not values:
        return name, True
    if catalogue().get(name, {}).get("type", "").startswith("list") and len(values) > 1:
        return name, values
    if len(values) > 1:
        problems.append(Problem(f"--{name}", f"takes one value, got {values}", "quote it or drop the rest"))
    return name, values[0]
