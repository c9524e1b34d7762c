"""Tables of config converters, and the translator that reads them.

A config converter turns the settings of another tool (flags, variables, YAML) into recipe keys. Its table
is a YAML file next to its code. A list of the file has one row for each setting:

    settings:
      - {names: --lr, key: learning_rate, default: 1e-5, help: learning rate}
      - {names: --optimizer, key: optim, values: {adamw: adamw_torch, adafactor: adafactor}}
      - {names: eval.enabled, values: {"true": {eval_strategy: steps}, "false": {eval_strategy: "no"}}}
      - {names: trainer.critic_warmup, values: {"0": {}}, why: no value function is trained, fix: write 0}
      - {names: --trainer-rank, fix: remove it; num_processes sets the number of training processes}
      - {names: --seq-len, convert: split_length}

A value without keys changes nothing, with ``why`` as the reason. Any value that no row translates is rejected with
``fix``. ``convert`` is a function of the table's module for a setting that depends on others.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import Problem
from grpo_recipes.paths import shell_quote
from grpo_recipes.recipe.document import FAST_LOADER, Value, as_bool
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.secrets import contains_secret

ANY = "*"  # the pattern of every value
VALUE = "{value}"  # the setting's own value, in the values of ``sets``
_WORD = re.compile(r"[\d.eE+-]+|true|false")  # on the command line, where all values are texts
_LONGEST = 60  # characters of a value in a message


@dataclass(frozen=True)
class Row:
    """One setting of another tool, with the recipe keys that it sets or the reason for a rejection."""

    names: tuple[str, ...]  # its spellings; messages use the first
    sets: Mapping[str, Any] = field(default_factory=dict)  # recipe key -> its value, or "{value}"
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # pattern of a value -> the keys it sets
    why: str = ""  # why a value that sets no key changes nothing
    fix: str = ""  # the fix for every other value
    unless: Mapping[str, str] = field(default_factory=dict)  # setting -> pattern of its value that makes this one idle
    needs: Mapping[str, str] = field(default_factory=dict)  # setting -> values of it that this one needs
    convert: str = ""  # a function of the table's module that translates it
    type: str = ""  # "switch": a flag without value; "words": a flag with several values; "bool": true or false
    least: int | None = None  # the value is an integer of at least this
    default: str | None = None  # its value if neither it nor a recipe is given
    replaced_by: str = ""  # recipe keys; if the user sets one of them, the default is not used
    variable: str = ""  # an environment variable: the flag that it sets
    script: bool = False  # an environment variable that only a shell script reads
    help: str = ""  # its line in --help and in the table of the docs
    remark: str = ""  # the other tool's default, and the reason if this one differs

    @property
    def name(self) -> str:
        """Return the spelling that messages use."""
        return self.names[0]

    @property
    def rejected(self) -> bool:
        """Return whether the setting is rejected with every value."""
        return bool(self.fix) and not (self.sets or self.values or self.convert) and self.least is None

    def keys_for(self, value: Any) -> dict[str, Any] | None:
        """Return the recipe keys that a value sets, or None if the row has no keys for the value.

        The first matching pattern of ``values`` decides; its keys are empty if the value changes nothing. Without a
        match, the keys of ``sets`` apply, except for the value None. ``Table.translate`` decides whether a result of
        None is an error.
        """
        for pattern, keys in self.values.items():
            if matches(value, pattern):
                return dict(keys)
        return None if value is None or not self.sets else self.filled(value)

    def filled(self, value: Any) -> dict[str, Any]:
        """Return the keys of ``sets``, with ``value`` instead of the placeholder ``VALUE``.

        A list of one item becomes the item if the only key is a text.
        """
        if isinstance(value, list) and len(value) == 1 and [catalogue()[key]["type"] for key in self.sets] == ["str"]:
            value = value[0]
        return {key: value if template == VALUE else template for key, template in self.sets.items()}

    def fix_for(self, value: Any, flag: bool = False) -> str:
        """Return the row's ``fix``, or else the recipe lines for this value, or flags if ``flag`` is true.

        In a flag, ``VALUE`` stands for a value that is missing, long or secret.
        """
        keys = self.filled(value)
        if self.fix or not flag:
            return self.fix or f"write {in_words(keys)}"
        flags = []
        for key, item in keys.items():
            text = short(",".join(map(str, item)) if isinstance(item, list) else item).removeprefix(": ")
            missing = item is True and catalogue()[key]["type"] != "bool"
            flags.append(f"--{key} {shell_quote(text) if text and not missing else 'VALUE'}")
        return f"write {' '.join(flags)}"

    def meaning(self) -> str:
        """Return the meaning of the setting, in Markdown, for a table of the docs: its help, its keys, or its fix."""
        if self.help and not self.sets and not self.values:
            return self.help
        if ANY in self.values:
            return f"changes nothing: {self.why}"
        parts = [f"`{key}`" for key in self.sets]
        for pattern, keys in self.values.items():
            written = " and ".join(f"`{key}{short(value)}`" for key, value in keys.items()) or "changes nothing"
            parts.append(f"`{pattern.replace('[[]', '[')}`: {written}")
        sentences = [", ".join(parts), self.why]
        sentences += [f"not read where `{name}` is `{pattern}`" for name, pattern in self.unless.items()]
        if not self.sets:
            sentences.append(f"{'others are ' if self.values else ''}refused: {self.fix}")
        return "; ".join(filter(None, sentences))


def short(value: Any) -> str:
    """Return ``: value`` as in a recipe; an empty text for None, for a long value, and for a secret."""
    if isinstance(value, str) and _WORD.fullmatch(value):
        return f": {value}"
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    text = text.removesuffix("\n...\n").strip()
    return f": {text}" if value is not None and len(text) <= _LONGEST and not contains_secret(value) else ""


def in_words(keys: Mapping[str, Any]) -> str:
    """Return recipe keys with their values, e.g. ``use_vllm: true and bf16: false``."""
    return " and ".join(f"{key}{short(value)}" for key, value in keys.items())


@dataclass(frozen=True)
class Settings:
    """All settings of a file or command line, for a setting that depends on others."""

    values: Mapping[str, Any]  # setting -> its value
    device: str | None = None  # of the run: "cpu", "cuda", or None if it is not known
    key: Callable[[str], Any] = lambda _: None  # the value of a recipe key


@dataclass
class Setting:
    """One setting of another tool after its translation: recipe keys, a reason why it sets none, or a problem."""

    name: str  # dots separate the sections of a file
    raw: Value
    row: Row
    keys: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    problem: Problem | None = None

    @property
    def value(self) -> Any:
        """Return the value as the user wrote it."""
        return self.raw.value

    @property
    def subject(self) -> str:
        """Return the quoted name as the subject of a problem; "" for a flag, because its place is already its name."""
        return "" if self.raw.source == self.name else f"'{self.name}' "

    @property
    def shown(self) -> str:
        """Return the setting as messages show it: a line of a file, or a flag with its value."""
        if self.raw.source == self.name:
            return f"{self.name} {self.value}"
        return f"{self.raw.source}: {self.name}{short(self.value)}"

    def write(self, keys: Mapping[str, Any]) -> None:
        """Set recipe keys."""
        self.keys = dict(keys)

    def accept(self, why: str) -> None:
        """Accept the setting without recipe keys; ``why`` is the reason, for ``note``."""
        self.why = why

    def reject(self, problem: str, fix: str = "") -> None:
        """Reject the setting at its place in the file or command line; the row has the usual fix."""
        self.problem = Problem(self.raw.source, problem, fix or self.row.fix or "remove it")

    def note(self) -> str:
        """Return a line about a setting that is accepted."""
        if self.keys:
            return f"{self.raw.source}: '{self.name}' is read as {in_words(self.keys)}"
        return f"{self.shown} changes nothing: {self.why}"


@dataclass(frozen=True)
class Table:
    """The rows of one list in a table file, and the module with its functions."""

    rows: tuple[Row, ...]
    module: str

    @functools.cached_property
    def by_name(self) -> Mapping[str, Row]:
        """Return the row of each spelling."""
        return {name: row for row in self.rows for name in row.names}

    def translate(self, name: str, raw: Value, settings: Settings) -> Setting:
        """Translate one setting and return it with recipe keys, with the reason why it sets none, or with a problem.

        ``name`` must be in the table. ``settings`` has all settings of the file or command line, because some settings
        depend on others.
        """
        row = self.by_name[name]
        setting = Setting(name, raw, row)
        for other, pattern in row.unless.items():
            if matches(settings.values.get(other, self.by_name[other].default), pattern):
                setting.accept(f"{other} is {pattern}")
                return setting
        for other, modes in row.needs.items():
            mode = settings.values.get(other)
            if mode is not None and mode not in modes.split():
                fix = f"write {other} {modes.split()[0]}, or leave it out"
                setting.reject(f"{setting.subject}does nothing with {other} {mode}", fix)
                return setting
        least = row.least
        if row.type == "bool" and not isinstance(raw.value, bool):
            problem = f"{setting.subject}must be true or false, got {raw.value!r}"
            setting.reject(problem, f"write {name}=true or false")
            return setting
        if least is not None and (whole_number(raw.value) is None or int(raw.value) < least):
            problem = f"{setting.subject}must be an integer of at least {least}, got {raw.value!r:.100}"
            setting.reject(problem, row.fix or f"write e.g. {name} {least + 1}")
            return setting
        if row.convert:
            getattr(importlib.import_module(self.module), row.convert)(setting, settings)
            return setting
        keys = row.keys_for(raw.value)
        if keys is None and raw.value is None:
            setting.reject(f"'{name}' is empty", "give it a value, or remove it")
        elif keys is None and (row.values or row.rejected):
            setting.reject(_describe_no_equivalent(setting))
        else:
            setting.write(keys or {})
            setting.accept(row.why)
        return setting


def _describe_no_equivalent(setting: Setting) -> str:
    """Return the message that a setting, or only its value, has no equivalent in a recipe."""
    if setting.raw.source != setting.name:
        return f"'{setting.name}{short(setting.value)}' has no equivalent here"
    return "has no equivalent here" if setting.row.rejected else f"'{setting.value!s:.100}' has no equivalent here"


def whole_number(value: Any) -> int | None:
    """Return a value or its text as an integer of at least 0, or None for any other value."""
    return int(value) if str(value).isdecimal() and not isinstance(value, bool) else None


def matches(value: Any, pattern: str) -> bool:
    """Return whether a value, or the boolean that its text means, matches a pattern."""
    return any(fnmatchcase(str(form).lower(), pattern) for form in (value, as_bool(value)))


@functools.cache
def read_table(path: Path, section: str, module: str = "") -> Table:
    """Read and return one list of a table file; ``module`` has the functions that its rows name with ``convert``."""
    return Table(tuple(map(_read_row, read_file(path)[section])), module)


@functools.cache
def read_file(path: Path) -> Any:
    """Return the content of a table file of this package, parsed as YAML; cached."""
    return yaml.load(path.read_text(encoding="utf-8"), FAST_LOADER)


def _read_row(entry: dict[str, Any]) -> Row:
    """Return the row of a table's entry, with its short forms expanded.

    ``key: lr`` means ``sets: {lr: "{value}"}``. Together with it, ``values: {low: 0.1}`` means
    ``values: {low: {lr: 0.1}}``.
    """
    entry = dict(entry)
    key, default, values = entry.pop("key", ""), entry.pop("default", None), entry.pop("values", {})
    return Row(
        names=tuple(entry.pop("names").split()),
        sets=entry.pop("sets", {key: VALUE} if key else {}),
        values={pattern: keys if isinstance(keys, dict) else {key: keys} for pattern, keys in values.items()},
        default=None if default is None else str(default),
        **entry,
    )
