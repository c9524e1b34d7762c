"""Read recipe files and flags as the user wrote them, and convert their values to the types of the catalog.

A recipe file may build on another file (``base: FILE``). Every value keeps its source, so that a message can name the
line. Flags and environment variables give strings, which ``Value.from_text`` marks; ``convert_value`` parses them.
Faults of single values are collected in a list of problems. A ConfigError rejects a file that cannot be read, that is
not a YAML mapping, or that names a missing base.

    layers = read_document(path, problems)  # the bases first, the file itself last
    value, problems = convert_value("seed", catalogue()["seed"], layers[-1]["seed"])
"""

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

from grpo_recipes.errors import Problem, config_error, translate_errors
from grpo_recipes.paths import display_path, find_code_root, shell_quote
from grpo_recipes.recipe.keys import REFUSED_VALUES, catalogue, nearest_of, nested_catalogue

BASE_KEY = "base"
UNSET = "unset"  # the flag --unset KEY, which removes a key that the recipe file or a variable sets
Entry = Mapping[str, Any]  # the type, default, help and limits of a key in the catalog
KeyPath = tuple[str | int, ...]  # the names and indices that lead to a value in a file
FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the Python loader takes longer than all of `grpo check`
_MOST_BYTES = 1 << 20
_MOST_PARTS = 100_000
_MOST_BASES = 10  # length of a chain of recipes that build on each other
_LONGEST = 100  # characters of a value in a message
_INT, _FLOAT, _STR, _BOOL, _MERGE, _DATE = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "str", "bool", "merge", "timestamp")
)
_EXPONENT = re.compile(r"([-+]?)(\d+\.?\d*|\.\d+)[eE]([-+]?)(\d+)")
# Files, logs and processes reject NUL, other control characters except tabs and line ends, and surrogates.
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
_TYPE_NAMES = {
    "int": "an integer", "float": "a number", "bool": "true or false", "str": "a string", "dict": "a mapping",
    "list[dict]": "a list of mappings",
}  # fmt: skip
_READ_AS_BOOL = ("no", "yes", "on", "off", "true", "false")  # words that need quotes in YAML
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True)
class Value:
    """The value of a key and its source."""

    value: Any  # as YAML or the command line gives it; after ``convert_value``, of the catalog's type
    source: str  # file:line, --flag, a variable's name, or "default"
    shadowed: str = ""  # file:line of the recipe's value that a flag or a variable overrides
    from_text: bool = False  # given on the command line or in the environment, where every value is a string
    lines: Mapping[KeyPath, str] = field(default_factory=dict)  # file:line of each key of the file, nested keys too
    by_entry_point: bool = False  # set by an entry point for a flag of another tool, which is the source

    @property
    def from_flag(self) -> bool:
        """Whether the command line sets the value, by a key's own flag or by a flag of another tool."""
        return self.by_entry_point or self.source.startswith("--")


class _Loader(yaml.SafeLoader):
    """Load YAML safely. Dates, times and base-60 numbers stay strings, because no key has such a type."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the type tag of a node without an explicit tag: string for dates and numbers with a colon."""
        tag = str(super().resolve(kind, value, implicit))
        return _STR if tag == _DATE or (tag in (_INT, _FLOAT) and ":" in value) else tag

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Return the value of a node; raise YAMLError if its tag does not fit, e.g. ``!!bool maybe``."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, AttributeError) as error:  # raised by PyYAML
            message = f"'{str(node.value)[:40]}' cannot be read as {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from error


def read_document(path: Path, problems: list[Problem]) -> list[dict[str, Value]]:
    """Return the keys of a recipe file and its bases, the bases first; append faults to ``problems``.

    Raise ConfigError for a file that can't be read, a missing or circular base, and a chain of too many recipes.
    """
    chain, layers = [path], [read_file(path, problems)]
    while base := layers[0].pop(BASE_KEY, None):
        if len(chain) > _MOST_BASES:
            message = f"'{BASE_KEY}' leads through more than {_MOST_BASES} recipes"
            raise config_error(base.source, message, "merge some of them into one file")
        # The file is next to the recipe that names it, or else in the repository.
        if not isinstance(base.value, str):
            problem = f"{BASE_KEY}: expected a path, got {base.value!r}"
            raise config_error(base.source, problem, "set it to one recipe file")
        candidates = [folder / os.path.expanduser(base.value) for folder in (chain[-1].parent, find_code_root())]
        # os.path.isfile also returns False for a name that is too long.
        file = next((candidate for candidate in candidates if os.path.isfile(candidate)), None)
        if file is None:
            problem = f"{BASE_KEY}: recipe '{base.value}' not found next to this one or in the repository"
            fix = "write the path without variables (~ is expanded)" if "$" in base.value else ""
            raise config_error(base.source, problem, fix or f"set {BASE_KEY} to an existing recipe")
        if file.resolve() in [path.resolve() for path in chain]:
            raise config_error(base.source, f"'{base.value}' builds on this recipe", f"remove one {BASE_KEY}")
        chain.append(file)
        layers.insert(0, read_file(chain[-1], problems))
    return layers


def read_file(path: Path, problems: list[Problem]) -> dict[str, Value]:
    """Read the keys of one recipe file without its bases; append faults to ``problems``.

    Raise ConfigError if the file can't be read, is larger than 1 MiB, or is not a YAML mapping.
    """
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            message = f"has {size // 10**6} MB, but a recipe has at most {_MOST_BYTES // 10**6} MB"
            raise config_error(str(path), message, "name a recipe")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise config_error(str(path), f"cannot be read ({reason})", "name an existing recipe") from error
    where = display_path(path)
    try:
        return _parse(path, text, problems)
    except RecursionError as error:
        problem = "values are nested too deeply, or in themselves"
        raise config_error(where, problem, "write them flatter") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        where = f"{where}:{mark.line + 1}" if mark else where
        fix = "correct the indentation, quote or bracket there"
        if "'\\t'" in reason:
            reason, fix = "it has a tab", "indent the line with spaces instead of the tab"
        raise config_error(where, f"not valid YAML ({reason})", fix) from error


def _parse(path: Path, text: str, problems: list[Problem]) -> dict[str, Value]:
    """Parse the text of a recipe file; return its keys, each with its value and line.

    Append a problem for each repeated key and each YAML trap. Raise ConfigError if the text is not a mapping, merges
    with ``<<``, or expands to too many values. Return {} for an empty file.
    """
    file = display_path(path)

    def line_of(node: yaml.Node) -> str:
        """Return "file:line" of a node."""
        return f"{file}:{node.start_mark.line + 1}"

    loader = _Loader(text)
    root = loader.get_single_node()
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise config_error(line_of(root), "a recipe must be a mapping of keys to values", "write one key: value a line")
    if merge := next((key for key, _ in root.value if key.tag == _MERGE), None):
        raise config_error(line_of(merge), "'<<' is not supported", f"use {BASE_KEY}: FILE")
    lines: dict[KeyPath, str] = {}
    for count, (path_to_node, name, node) in enumerate(_walk((), root)):
        if count > _MOST_PARTS:
            message = f"its anchors and aliases expand to more than {_MOST_PARTS:,} values"
            raise config_error(file, message, "write the values out")
        if name is not None:
            lines[path_to_node] = line_of(name)
        if isinstance(node, yaml.MappingNode):
            first: dict[str, yaml.Node] = {}
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if (earlier := first.setdefault(key.value, key)) is not key:
                    message = f"'{key.value}' is given twice (first on line {earlier.start_mark.line + 1})"
                    problems.append(Problem(line_of(key), message, "keep one of the two lines"))
        elif isinstance(node, yaml.ScalarNode) and node.style is None:
            nested = any(isinstance(step, str) for step in path_to_node[1:])
            kind = "" if nested or not path_to_node else catalogue().get(str(path_to_node[0]), {}).get("type", "")
            problems += [Problem(line_of(node), *trap) for trap in _find_yaml_traps(node.tag, node.value, kind, nested)]
    construct = functools.partial(loader.construct_object, deep=True)
    return {str(construct(key)): Value(construct(value), line_of(key), lines=lines) for key, value in root.value}


def _walk(path: KeyPath, node: yaml.Node, name: yaml.Node | None = None) -> Iterator[tuple[KeyPath, Any, yaml.Node]]:
    """Yield (path, name node, node) for a node and all nodes below it; the name node is None outside of mappings."""
    yield path, name, node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _walk((*path, str(key.value)), value, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk((*path, index), item)


def _find_yaml_traps(tag: str, text: str, kind: str, nested: bool) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for an unquoted value that YAML 1.1 reads differently from how it looks.

    These are integers with a leading zero, which YAML reads as octal. If ``kind``, the type of the key, is a string,
    they are also numbers with another spelling, such as ``1.10``. In ``nested`` values (in a mapping inside a key),
    they are also ``1e-6``, read as a string, and ``no``, ``yes``, ``on`` and ``off``, read as booleans. For other
    values, ``convert_value`` handles these two. ``tag`` is the type that YAML has resolved.
    """
    if kind in ("str", "list[str]") and tag in (_INT, _FLOAT):
        if (number := str(yaml.load(text, FAST_LOADER))) != text:
            yield f"YAML reads {text} as the number {number}", f'write "{text}" in quotes'
    elif tag == _INT and re.fullmatch(r"[-+]?0\d+", text.replace("_", "")):
        yield f"YAML reads {text} as an octal number", f"write {int(text.replace('_', ''))}"
    elif nested and tag == _STR and (match := _EXPONENT.fullmatch(text)):
        sign, mantissa, direction, exponent = match.groups()
        number = f"{sign}{mantissa if '.' in mantissa else mantissa + '.0'}e{direction or '+'}{exponent}"
        yield f"YAML reads {text} as a string", f"write {number}"
    elif nested and tag == _BOOL and text.lower() not in ("true", "false"):
        truth = str(text.lower() in ("yes", "on", "y")).lower()
        yield f"YAML reads {text} as {truth}", f'write {truth}, or "{text}" in quotes'


def read_flags(flags: Iterable[str], problems: list[Problem]) -> list[tuple[str, Any]]:
    """Parse the flags of a command into pairs of a name and its value; append faults to ``problems``.

    Accepted forms are ``--key value``, ``--key=value``, ``--key`` (the value is True) and, for booleans,
    ``--no_key`` (False), with hyphens or underscores. A list is several words, words with commas, or YAML's
    ``[a, b]``. ``--unset key`` becomes a pair with the name ``UNSET``.
    """
    pairs: list[tuple[str, Any]] = []
    words = list(flags)
    while words:
        flag = words.pop(0)
        if re.match("-[A-Za-z]", flag):
            problems.append(Problem(flag, "begins with one hyphen", f"write -{flag}"))
            words = list(itertools.dropwhile(lambda word: not word.startswith("-"), words))
            continue
        if not flag.startswith("--"):
            fix = "put the recipe right after the command, and write --key value for a key"
            problems.append(Problem(f"'{flag}'", "is neither the recipe nor the value of a flag", fix))
            continue
        name, equals, text = flag[2:].partition("=")
        name = name.replace("-", "_")
        values = [text] if equals else list(itertools.takewhile(lambda word: not word.startswith("--"), words))
        words = words if equals else words[len(values) :]
        kind, negated = (catalogue().get(key, {}).get("type", "") for key in (name, name.removeprefix("no_")))
        kind = "list[str]" if name == UNSET else kind
        if kind.startswith("list") and values[:1] and values[0].startswith("[") and values[-1].endswith("]"):
            values = [" ".join(values)]  # [a, b] without quotes is several words to the shell
        if len(values) > 1 and not kind.startswith("list"):
            fix = f"write --{name} {shell_quote(values[0])}, or quote the value"
            problems.append(Problem(f"--{name}", f"expected one value, got {values}", fix))
        if values:
            pairs.append((name, values if len(values) > 1 and kind.startswith("list") else values[0]))
        else:
            off = name.startswith("no_") and negated == "bool"
            pairs.append((name.removeprefix("no_"), False) if off else (name, True))
    return pairs


def as_words(keys: Mapping[str, Value]) -> list[str]:
    """Return recipe keys and their values as a list of command-line words: flags of `grpo launch`.

    None becomes "null", and an empty list "none".
    """
    words: list[str] = []
    for key, value in keys.items():
        items = (value.value or ["none"]) if isinstance(value.value, list) else [value.value]
        words += [f"--{key}", *("null" if item is None else _format_word(item) for item in items)]
    return words


def _format_word(value: Any) -> str:
    """Return a value as a word of the command line: a mapping as YAML in one line, a boolean as true or false."""
    if isinstance(value, dict):
        return str(yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)).strip()
    return str(value).lower() if isinstance(value, bool) else str(value)


def unset_keys(flagged: Iterable[tuple[str, Any]]) -> list[str]:
    """Return the names that ``--unset`` lists in the pairs of ``read_flags``, with underscores."""
    texts = [text for name, text in flagged if name == UNSET and text is not True]
    return [name.replace("-", "_") for text in texts for name in _convert("list[str]", text, from_text=True)]


def convert_value(key: str, entry: Entry, raw: Value, path: KeyPath = ()) -> tuple[Any, list[Problem]]:
    """Convert a value to the type of its catalog entry; return the converted value and all problems.

    The value is None for null and an automatic choice (``auto``), and after a problem of its type. A value outside of
    its limits is returned with its problems. Mappings with known keys are converted in place. ``path`` leads to the
    value in the file, by default the key itself.
    """
    value, path = raw.value, path or (key,)
    subject = "" if raw.source == f"--{key}" else f"{key}: "
    if value is None or (raw.from_text and value == "null"):
        message, fix = f"{subject}expected {_describe_expected(entry)}, got nothing", _suggest_value(key, entry)
        return None, [] if entry["optional"] else [Problem(raw.source, message, f"{fix}, or remove it")]
    lacks_value = value is True or (value == "" and entry["type"] in ("int", "float"))
    if lacks_value and entry["type"] != "bool" and raw.source.startswith("--"):
        return None, [Problem(raw.source, "is given without a value", f"write {raw.source} VALUE")]
    if entry.get("infinite") and str(value).lower().removeprefix("+") in (".inf", "inf", "infinity"):
        return math.inf, []  # the spellings of YAML, Python and JSON
    if entry.get("auto") and value == "auto":
        return None, []
    try:
        value = _convert(entry["type"], value, raw.from_text)
    except ValueError as error:
        return None, [Problem(raw.source, f"{subject}{error}", _suggest_value(key, entry))]
    problems = [
        Problem(raw.source, f"{subject}{message}", fix) for message, fix in _find_broken_limits(key, entry, value)
    ]
    if key in nested_catalogue() and isinstance(value, dict):
        problems += _convert_parts(key, value, raw, path)
    elif key in nested_catalogue() and isinstance(value, list):
        for index, item in enumerate(value):
            problems += _convert_parts(key, item, raw, (*path, index))
    return value, problems


def _convert_parts(key: str, parts: dict[str, Any], raw: Value, path: KeyPath) -> Iterator[Problem]:
    """Convert the values of a mapping with known keys in place; yield each unknown key and wrong value at its line.

    Wrong values stay unchanged. ``raw`` is the value of ``key``, and ``path`` leads to the mapping in the file.
    """
    known = nested_catalogue()[key]
    for name, part in parts.items():
        where = raw.lines.get((*path, name), raw.source)
        if name not in known:
            close = nearest_of(str(name), known)
            fix = f"write '{close}'" if close else f"write one of {', '.join(known)}"
            yield Problem(where, f"unknown key '{name}' in {key}", fix)
            continue
        raw_part = replace(raw, value=part, source=where)
        value, problems = convert_value(f"{key}.{name}", known[name], raw_part, (*path, name))
        parts[name] = part if problems else value
        yield from problems


def _convert(kind: str, value: Any, from_text: bool) -> Any:
    """Return a value converted to a type of the catalog; raise ValueError with the expected type if that is impossible.

    With ``from_text``, the value is text from a flag or variable, so booleans, and lists separated by commas, are
    parsed. Texts with a number become numbers in any case, and numbers become texts. A single text becomes a list if
    the type is a list of texts or numbers; "none" becomes []. A boolean is never a number or a text.
    """
    if kind.startswith("list["):
        if isinstance(value, str) and from_text and value.startswith("["):
            value = _parse_word(value)
        if isinstance(value, str) and kind != "list[dict]":
            value = [] if value == "none" else [part.strip() for part in value.split(",")] if from_text else [value]
        if not isinstance(value, list):
            raise ValueError(f"expected {_TYPE_NAMES.get(kind, 'a list')}, got {value!r:.{_LONGEST}}")
        return [_convert(kind[5:-1], item, from_text) for item in value]
    if kind == "any":
        return value
    mismatch = ValueError(f"expected {_TYPE_NAMES[kind]}, got {value!r:.{_LONGEST}}")
    if kind in ("dict", "bool"):
        if kind == "dict" and isinstance(value, str):
            value = _parse_word(value)
        value = as_bool(value) if kind == "bool" and from_text else value
        if not isinstance(value, dict if kind == "dict" else bool):
            raise mismatch
        return value
    if isinstance(value, bool):
        hint = " (YAML reads no, yes, on and off as booleans: quote the word)" if kind == "str" else ""
        raise ValueError(f"expected {_TYPE_NAMES[kind]}, got the boolean {value}{hint}")
    if not isinstance(value, str | int | float):
        raise mismatch
    if kind == "str":
        if control := _CONTROL.search(str(value)):
            raise ValueError(f"expected plain text, got the control character {control[0]!r}")
        return str(value)
    number = math.inf  # the value of an integer above 1e308
    with contextlib.suppress(OverflowError), translate_errors(ValueError, lambda _: mismatch):
        number = float(value)  # YAML 1.1 reads 1e-6 as a string
    if math.isnan(number):
        raise ValueError(f"expected {_TYPE_NAMES[kind]}, got nan")
    if kind == "float" and math.isinf(number):
        raise ValueError(f"expected a finite number, got {value!r:.{_LONGEST}}")
    if kind == "int" and not number.is_integer():
        raise mismatch
    return number if kind == "float" else value if isinstance(value, int) else int(number)


def _parse_word(text: str) -> Any:
    """Parse a word of the command line as YAML; return the word itself if it is not YAML."""
    with contextlib.suppress(yaml.YAMLError, RecursionError):  # RecursionError: a thousand brackets
        return yaml.load(text, _Loader)
    return text


def as_bool(value: Any) -> Any:
    """Return the boolean for ``true``, ``1``, ``yes``, ``false``, ``0`` and ``no``, any other value unchanged."""
    return _TRUTH.get(value.lower(), value) if isinstance(value, str) else value


def _find_broken_limits(key: str, entry: Entry, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each limit of the catalog entry that a value breaks: min, max and choices."""
    low, high, choices = entry.get("min"), entry.get("max"), entry.get("choices")
    if low is not None and value < low:
        default = entry.get("default")
        example = f", e.g. {default:g}" if isinstance(default, int | float) and default > low else ""
        yield f"expected at least {low}, got {value}", f"set {key} to {low} or more{example}"
    if high is not None and value > high:
        yield f"expected at most {high}, got {value}", f"set {key} to {high} or less"
    if choices and isinstance(value, str) and value not in choices:
        close = nearest_of(value, choices) if len(choices) > 12 else None
        fix = REFUSED_VALUES.get(key, {}).get(value) or (f"set {key}: {close}" if close else _suggest_value(key, entry))
        yield f"'{value}' is not supported", fix


def _describe_expected(entry: Entry) -> str:
    """Return a text for the values that a key accepts, e.g. ``an integer``, or ``one of`` its choices."""
    if entry.get("choices"):
        return "one of " + ", ".join(f'"{word}"' if word in _READ_AS_BOOL else word for word in entry["choices"])
    if entry.get("auto"):
        return f"auto or {_TYPE_NAMES[entry['type']]}"
    return _TYPE_NAMES.get(entry["type"], "a list, e.g. [a, b]")


def _suggest_value(key: str, entry: Entry) -> str:
    """Return the fix for a value of a wrong type: the type to set, and the default as an example if it is a number."""
    default = entry.get("default")
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    example = f", e.g. {default:g}" if is_number and not entry.get("choices") else ""
    return f"set {key} to {_describe_expected(entry)}{example}"
