"""What the user wrote: recipe files with lines and bases, flags, and their values typed by the catalogue."""

import contextlib
import functools
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.paths import display_path, home, shell_quote
from grpo_recipes.recipe.keys import REFUSED_VALUES, catalogue, nearest_of, nested_catalogue

BASE_KEY = "base"
UNSET = "unset"  # the flag --unset KEY, which takes back a key of the recipe file or of a variable
Entry = Mapping[str, Any]  # a key of the catalogue
Place = tuple[str | int, ...]  # of a value in a file: names and indices
_MOST_BYTES = 1 << 20
_MOST_PARTS = 100_000
_MOST_BASES = 10  # recipes that a recipe builds on, one through the other
_LONGEST = 100  # characters of a value in a message
_INT, _FLOAT, _STR, _BOOL, _MERGE, _DATE = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "str", "bool", "merge", "timestamp")
)
_EXPONENT = re.compile(r"([-+]?)(\d+\.?\d*|\.\d+)[eE]([-+]?)(\d+)")
# No file, log or process takes these: NUL and other control characters but tab and line ends, and half characters.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_WORDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "dict": "a mapping",
    "list[dict]": "a list of mappings",
}  # fmt: skip
_READ_AS_BOOL = ("no", "yes", "on", "off", "true", "false")  # words that need quotes in YAML
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Value:
    """The value of a key, and where it came from."""

    value: Any  # as YAML or the command line gives it, then of the catalogue's type
    source: str  # file:line, --flag, a variable's name, or "default"
    shadowed: str = ""  # file:line of the recipe's value that a flag or a variable overrides
    from_text: bool = False  # of the command line or the environment, which have no types
    lines: Mapping[Place, str] = field(default_factory=dict)  # file:line of each key of the file, nested ones included
    by_entry_point: bool = False  # set by an entry point for a flag of another tool, which is the source

    @property
    def from_flag(self) -> bool:
        """Return whether the command line gives the value."""
        return self.by_entry_point or self.source.startswith("--")


class _Loader(yaml.SafeLoader):
    """Load YAML safely, and a date or a time as the text that was written: no key is one."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the tag of a node without one."""
        tag = str(super().resolve(kind, value, implicit))
        return _STR if tag == _DATE or (tag in (_INT, _FLOAT) and ":" in value) else tag

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        def unreadable(_: Exception) -> yaml.YAMLError:
            what = f"'{str(node.value)[:40]}' cannot be read as {node.tag.rpartition(':')[2]}"
            return yaml.constructor.ConstructorError(None, None, what, node.start_mark)

        with translate((ValueError, KeyError, AttributeError), unreadable):  # PyYAML's own, on `!!bool maybe`
            return super().construct_object(node, deep)


def read_document(path: Path, problems: list[Problem]) -> list[dict[str, Value]]:
    """Return the keys of a recipe file and of its bases, the file's own last; add what is wrong to ``problems``."""
    chain, layers = [path], [read_file(path, problems)]
    while base := layers[0].pop(BASE_KEY, None):
        if len(chain) > _MOST_BASES:
            what = f"'{BASE_KEY}' leads through more than {_MOST_BASES} recipes"
            raise config_error(base.source, what, "put the keys of some of them into one file")
        chain.append(_base_file(chain, base))
        layers.insert(0, read_file(chain[-1], problems))
    return layers


def _base_file(chain: list[Path], base: Value) -> Path:
    """Return the file a recipe builds on: beside it, or in the repository, so that a copied recipe still finds it."""
    if not isinstance(base.value, str):
        raise config_error(base.source, f"'{BASE_KEY}' is {base.value!r}", "name one recipe file")
    places = [folder / os.path.expanduser(base.value) for folder in (chain[-1].parent, home())]
    found = next((place for place in places if os.path.isfile(place)), None)  # False too for a name that is too long
    if found is None:
        what = f"there is no recipe '{base.value}' beside this one or in the repository"
        fix = "write the path itself, or from ~; variables are not read here" if "$" in base.value else ""
        raise config_error(base.source, what, fix or "name an existing recipe")
    if found.resolve() in [path.resolve() for path in chain]:
        raise config_error(base.source, f"'{base.value}' builds on this recipe again", f"remove one {BASE_KEY}")
    return found


def read_file(path: Path, problems: list[Problem]) -> dict[str, Value]:
    """Return the keys of one recipe file as they are written; add what is wrong to ``problems``."""

    def unreadable(error: OSError | UnicodeDecodeError) -> ConfigError:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        return config_error(str(path), f"cannot be read ({reason})", "name an existing recipe")

    def not_yaml(error: yaml.YAMLError) -> ConfigError:
        mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"{display_path(path)}:{mark.line + 1}" if mark else display_path(path)
        return config_error(where, f"not valid YAML ({why})", "correct the indentation, quote or bracket there")

    with translate((OSError, UnicodeDecodeError), unreadable):
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise config_error(str(path), f"has {size // 10**6} MB, more than any recipe has", "name a recipe")
        text = path.read_text(encoding="utf-8")
    deep = config_error(display_path(path), "values are nested too deeply, or in themselves", "write them flatter")
    with translate(RecursionError, lambda _: deep), translate(yaml.YAMLError, not_yaml):
        return _parsed(path, text, problems)


def _parsed(path: Path, text: str, problems: list[Problem]) -> dict[str, Value]:
    file = display_path(path)

    def line(node: yaml.Node) -> str:
        return f"{file}:{node.start_mark.line + 1}"

    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise config_error(line(root), "a recipe is a mapping of key: value", "write one key: value a line")
    if merge := next((key for key, _ in root.value if key.tag == _MERGE), None):
        raise config_error(line(merge), "'<<' is not a key of a recipe", f"use {BASE_KEY}: FILE")
    lines: dict[Place, str] = {}
    for count, (place, name, node) in enumerate(_walk((), root)):
        if count > _MOST_PARTS:
            what = f"its anchors and aliases stand for more than {_MOST_PARTS:,} values"
            raise config_error(file, what, "write the values out")
        if name is not None:
            lines[place] = line(name)
        if isinstance(node, yaml.MappingNode):
            first: dict[str, yaml.Node] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (earlier := first.setdefault(key.value, key)) is not key:
                    given = f"'{key.value}' is given twice (first on line {earlier.start_mark.line + 1})"
                    what, fix = f"{given}; YAML keeps the last silently", "keep one of the two lines"
                    problems.append(Problem(line(key), what, fix))
        elif isinstance(node, yaml.ScalarNode) and node.style is None:
            nested = any(isinstance(step, str) for step in place[1:])
            problems += [Problem(line(node), *trap) for trap in _traps(node.tag, node.value, nested)]
    read = functools.partial(loader.construct_object, deep=True)
    return {str(read(key)): Value(read(value), line(key), lines=lines) for key, value in root.value}


def _walk(place: Place, node: yaml.Node, name: yaml.Node | None = None) -> Iterator[tuple[Place, Any, yaml.Node]]:
    """Yield a node and all below it: its place, the node of its name in a mapping, and the node itself."""
    yield place, name, node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk((*place, str(key.value)), value, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk((*place, index), item)


def _traps(tag: str, text: str, nested: bool) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a plain word that YAML 1.1 reads otherwise than it looks, and the fix.

    ``nested``: below a key of a mapping; at the top the catalogue types ``1e-6`` and ``no``.
    """
    if tag == _INT and re.fullmatch(r"[-+]?0\d+", text.replace("_", "")):
        yield f"YAML reads {text} as an octal number", f"write {int(text.replace('_', ''))}"
    elif nested and tag == _STR and (match := _EXPONENT.fullmatch(text)):
        sign, mantissa, direction, exponent = match.groups()
        number = f"{sign}{mantissa if '.' in mantissa else mantissa + '.0'}e{direction or '+'}{exponent}"
        yield f"YAML reads {text} as a text", f"write {number}"
    elif nested and tag == _BOOL and text.lower() not in ("true", "false"):
        truth = str(text.lower() in ("yes", "on", "y")).lower()
        yield f"YAML reads {text} as {truth}", f'write {truth}, or "{text}" in quotes'


def read_flags(flags: Iterable[str], problems: list[Problem]) -> list[tuple[str, Any]]:
    """Read ``--key value``, ``--key=value``, ``--key`` and ``--no_key`` (booleans), hyphens or underscores.

    A list is several words, words with commas, or YAML's ``[a, b]``. ``--unset key`` is a pair with the name UNSET.
    """
    pairs: list[tuple[str, Any]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        if re.match("-[A-Za-z]", flag):
            problems.append(Problem(flag, "begins with one hyphen", f"write -{flag}"))
            rest = list(itertools.dropwhile(lambda word: not word.startswith("-"), rest))
            continue
        if not flag.startswith("--"):
            fix = "put the recipe right after the command, and write --key value for a key"
            problems.append(Problem(f"'{flag}'", "is neither the recipe nor the value of a flag", fix))
            continue
        name, equals, text = flag[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else list(itertools.takewhile(lambda word: not word.startswith("--"), rest))
        rest = rest if equals else rest[len(values) :]
        kind, negated = (catalogue().get(key, {}).get("type", "") for key in (name, name.removeprefix("no_")))
        kind = "list[str]" if name == UNSET else kind
        if kind.startswith("list") and values[:1] and values[0].startswith("[") and values[-1].endswith("]"):
            values = [" ".join(values)]  # [a, b] without quotes is several words to the shell
        if len(values) > 1 and not kind.startswith("list"):
            problems.append(
                Problem(
                    f"--{name}",
                    f"takes one value, got {values}",
                    f"write --{name} {shell_quote(values[0])}, or quote the value",
                )
            )
        if values:
            pairs.append((name, values if len(values) > 1 and kind.startswith("list") else values[0]))
        else:
            off = name.startswith("no_") and negated == "bool"
            pairs.append((name.removeprefix("no_"), False) if off else (name, True))
    return pairs


def as_words(keys: Mapping[str, Value]) -> list[str]:
    """Return recipe keys as flags of `grpo launch`."""
    words: list[str] = []
    for key, value in keys.items():
        items = (value.value or ["none"]) if isinstance(value.value, list) else [value.value]
        words += [f"--{key}", *("null" if item is None else _plain(item) for item in items)]
    return words


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False).strip()
    return str(value).lower() if isinstance(value, bool) else str(value)


def unset_keys(flagged: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the names that ``--unset`` lists."""
    texts = [text for name, text in flagged if name == UNSET and text is not True]
    return [name.replace("-", "_") for text in texts for name in _convert("list[str]", text, from_text=True)]


def convert_value(key: str, entry: Entry, given: Value, place: Place = ()) -> tuple[Any, list[Problem]]:
    """Return what the user gave as the catalogue's type, and every problem with it; ``place`` is the key by default."""
    value, place = given.value, place or (key,)
    if value is None or (given.from_text and value == "null"):
        empty = Problem(given.source, f"'{key}' is empty", f"write {_example(entry)}, or remove it")
        return None, [] if entry["optional"] else [empty]
    forgotten = value is True or (value == "" and entry["type"] in ("int", "float"))
    if forgotten and entry["type"] != "bool" and given.source.startswith("--"):
        return None, [Problem(given.source, "is given without a value", f"write {given.source} VALUE")]
    if entry.get("infinite") and str(value).lower().removeprefix("+") in (".inf", "inf", "infinity"):
        return math.inf, []  # as YAML, Python and JSON write it
    if entry.get("auto") and value == "auto":
        return None, []
    try:
        value = _convert(entry["type"], value, given.from_text)
    except ValueError as error:
        return None, [Problem(given.source, f"'{key}' is {error}", f"write {_example(entry)}")]
    problems = [Problem(given.source, f"'{key}' is {what}", f"write {fix}") for what, fix in _limits(key, entry, value)]
    if key in nested_catalogue() and isinstance(value, dict):
        problems += _type_parts(key, value, given, place)
    elif key in nested_catalogue() and isinstance(value, list):
        for index, item in enumerate(value):
            problems += _type_parts(key, item, given, (*place, index))
    return value, problems


def _type_parts(key: str, parts: dict[str, Any], given: Value, place: Place) -> Iterator[Problem]:
    """Type the parts of a mapping whose keys are known, in place, and yield what is wrong at its own line."""
    known = nested_catalogue()[key]
    for name, part in parts.items():
        where = given.lines.get((*place, name), given.source)
        if name not in known:
            close = nearest_of(str(name), known)
            fix = f"write '{close}'" if close else f"write one of {', '.join(known)}"
            yield Problem(where, f"unknown key '{name}' in {key}", fix)
            continue
        value, problems = convert_value(
            f"{key}.{name}", known[name], replace(given, value=part, source=where), (*place, name)
        )
        parts[name] = part if problems else value
        yield from problems


def _convert(kind: str, value: Any, from_text: bool) -> Any:
    """Return a value as the type of the catalogue; a ValueError's text goes on from "the key is"."""
    if kind.startswith("list["):
        if isinstance(value, str) and from_text and value.startswith("["):
            value = _parsed_text(value)
        if isinstance(value, str) and kind != "list[dict]":
            value = [] if value == "none" else [part.strip() for part in value.split(",")] if from_text else [value]
        if not isinstance(value, list):
            raise ValueError(f"{value!r:.{_LONGEST}} where {_WORDS.get(kind, 'a list')} belongs")
        return [_convert(kind[5:-1], item, from_text) for item in value]
    if kind == "any":
        return value
    wrong = ValueError(f"{value!r:.{_LONGEST}} where {_WORDS[kind]} belongs")
    if kind in ("dict", "bool"):
        if kind == "dict" and isinstance(value, str):
            value = _parsed_text(value)
        value = as_bool(value) if kind == "bool" and from_text else value
        if not isinstance(value, dict if kind == "dict" else bool):
            raise wrong
        return value
    if isinstance(value, bool):
        hint = " (YAML reads no, yes, on and off as booleans: quote the word)" if kind == "str" else ""
        raise ValueError(f"the boolean {value} where {_WORDS[kind]} belongs{hint}")
    if not isinstance(value, str | int | float):
        raise wrong
    if kind == "str":
        if found := _CONTROL.search(str(value)):
            raise ValueError(f"a text with the control character {found[0]!r}")
        return str(value)
    number = math.inf  # a whole number above 1e308
    with contextlib.suppress(OverflowError), translate(ValueError, lambda _: wrong):
        number = float(value)  # also of a text: YAML 1.1 reads 1e-6 as one
    if math.isnan(number):
        raise ValueError("not a number (nan)")
    if kind == "float" and math.isinf(number):
        raise ValueError(f"{value!r:.{_LONGEST}}, which is not finite")
    if kind == "int" and not number.is_integer():
        raise wrong
    return number if kind == "float" else value if isinstance(value, int) else int(number)


def _parsed_text(text: str) -> Any:
    """Return a text of the command line as YAML reads it, or the text itself if it is not YAML."""
    with contextlib.suppress(yaml.YAMLError, RecursionError):  # the latter on a thousand brackets
        return yaml.load(text, _Loader)
    return text


def as_bool(value: Any) -> Any:
    """Return a text of the command line as the boolean it names, anything else as it is."""
    return _TRUTH.get(value.lower(), value) if isinstance(value, str) else value


def _limits(key: str, entry: Entry, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the limit of the catalogue that a value breaks, and what to write."""
    low, high, choices = entry.get("min"), entry.get("max"), entry.get("choices")
    if low is not None and value < low:
        usual = entry.get("default")
        example = f", e.g. {usual:g}" if isinstance(usual, int | float) and usual > low else ""
        yield f"{value}, below {low}", f"{low} or more{example}"
    if high is not None and value > high:
        yield f"{value}, above {high}", f"{high} or less"
    if choices and isinstance(value, str) and value not in choices:
        close = nearest_of(value, choices) if len(choices) > 12 else None
        fix = REFUSED_VALUES.get(key, {}).get(value)
        yield f"'{value}'", fix or (f"'{close}'" if close else _example(entry))


def _example(entry: Entry) -> str:
    if entry.get("choices"):
        return "one of " + ", ".join(f'"{word}"' if word in _READ_AS_BOOL else word for word in entry["choices"])
    if entry.get("auto"):
        return f"auto, or {_WORDS[entry['type']]}"
    return _WORDS.get(entry["type"], "a list, e.g. [a, b]")
