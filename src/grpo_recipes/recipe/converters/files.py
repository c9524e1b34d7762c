"""Read a YAML file of another tool as a recipe: each setting becomes recipe keys, a note, or a problem.

An extension registers a ``FileConverter`` with a table of the tool's settings as the part ``converters``. A setting
that the table does not have is a problem. Recipe keys in such a file are not changed. If a setting and a recipe key
contradict each other, the problem names both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.recipe.converters import meaning_of
from grpo_recipes.recipe.converters.table import Row, Setting, Settings, Table, in_words, read_file, read_table
from grpo_recipes.recipe.document import Value
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.recipe.keys import catalogue, nearest_of

_FEW = 10  # names that a fix lists


@dataclass(frozen=True)
class Surroundings:
    """The recipe around a file: its bases, the flags, and the device of the run."""

    values: Mapping[str, Any] = field(default_factory=dict)  # names of all files and flags -> the last value
    device: str | None = None  # "cpu", "cuda", or None if it is not known

    def key(self, name: str) -> Any:
        """Return the value of a recipe key, or its default."""
        return self.values.get(name, catalogue()[name]["default"])


@dataclass(frozen=True)
class FileConverter:
    """The YAML files of another tool."""

    path: Path  # the table
    module: str  # with the functions of the table
    recognizes: Callable[[Mapping[str, Value]], bool]

    @property
    def table(self) -> Table:
        """Return the settings of such a file."""
        return read_table(self.path, "settings", self.module)

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the names at the top level of such a file."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.table.by_name))

    def implied(self, file: Mapping[str, Value], names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield the recipe keys that a section of the file implies: the reason, the keys, and the section's place.

        The entries ``implied`` of the table define them. Keys that ``file`` sets are left out. ``names`` are the names
        in all files and flags. An entry is skipped if one of them matches a pattern in its ``unless``.
        """
        for entry in read_file(self.path)["implied"]:
            keys = {key: value for key, value in entry["keys"].items() if key not in file}
            section = entry.get("section", next(iter(file)))
            replaced = any(fnmatchcase(name, pattern) for name in names for pattern in entry.get("unless", ()))
            if keys and section in file and not replaced:
                yield entry["reason"], keys, file[section].source

    def settings(self, file: Mapping[str, Value], around: Surroundings) -> list[Setting]:
        """Return the settings of a file after their translation, in the order of the file."""
        flat = [
            item for name, raw in file.items() if name in self.sections for item in self._flatten(name, raw, (name,))
        ]
        settings = Settings({name: raw.value for name, raw in flat}, around.device, around.key)
        return [
            self.table.translate(name, raw, settings) if name in self.table.by_name else self._reject_unknown(name, raw)
            for name, raw in flat
        ]

    def as_keys(
        self, file: Mapping[str, Value], around: Surroundings, problems: list[Problem], notes: list[str]
    ) -> dict[str, Value]:
        """Return a file with recipe keys instead of its settings, and with the keys that its sections imply.

        ``around`` has the names and values of all files and flags of the recipe, and the device of the run: some
        settings depend on them. Append a note for each accepted setting and for implied keys. Append a problem for
        each setting that is rejected or contradicts a recipe key in the file. Recipe keys in the file stay as they
        are, and implied keys never replace others.
        """
        implied: dict[str, Value] = {}
        for reason, added, source in self.implied(file, {*file, *around.values}):
            notes.append(f"{source}: {reason} {in_words(added)}")
            implied |= {key: Value(value, source) for key, value in added.items()}
        keys = {name: raw for name, raw in file.items() if name not in self.sections}
        set_by: dict[str, str] = {}
        for setting in self.settings(file, around):
            if setting.problem is not None:
                problems.append(setting.problem)
                continue
            notes.append(setting.note())
            for key, value in setting.keys.items():
                if key in keys and keys[key].value != value:
                    problem = f"'{setting.name}' and '{set_by.get(key, key)}' give {key} two values"
                    fix = "keep one of the two" if key in set_by else f"keep {key}"
                    problems.append(Problem(setting.raw.source, problem, fix))
                elif key not in keys:
                    keys[key], set_by[key] = replace(setting.raw, value=value), setting.name
        return implied | keys

    def _flatten(self, name: str, raw: Value, place: tuple[str, ...]) -> Iterator[tuple[str, Value]]:
        """Yield the settings at or below ``name``: each one's full name, with dots, and its value with its line.

        ``place`` has the keys that lead to ``raw`` in the file. A mapping with a name in the table is not divided.
        An empty section at the top level is left out.
        """
        if name in self.table.by_name:
            yield name, raw
        elif isinstance(raw.value, dict):
            for part, value in raw.value.items():
                inside = (*place, str(part))
                source = raw.lines.get(inside, raw.source)
                yield from self._flatten(f"{name}.{part}", replace(raw, value=value, source=source), inside)
        elif raw.value is not None or len(place) > 1:
            yield name, raw

    def _reject_unknown(self, name: str, raw: Value) -> Setting:
        """Reject a setting that the table does not have, with the recipe key or the nearest name as the fix."""
        section, _, last = name.rpartition(".")
        inside = [row.rpartition(".")[2] for row in self.table.by_name if row.rpartition(".")[0] == section]
        known, close = meaning_of(name), nearest_of(last, inside)
        if not section:
            problem = f"{name}: expected a mapping, got {raw.value!r:.100}"
            fix = known.fix_for(raw.value) if known else "write its settings below it"
        else:
            problem = f"unknown key '{last}' in {section}"
            listed = f"write one of {', '.join(inside)}" if 1 < len(inside) < _FEW else "remove it"
            fix = known.fix_for(raw.value) if known else f"write '{close}'" if close else listed
        return Setting(name, raw, Row((name,)), problem=Problem(raw.source, problem, fix))


def converter_of(file: Mapping[str, Value]) -> FileConverter | None:
    """Return the converter that recognizes a file, or None for a recipe."""
    return next((converter for part in parts("converters") for converter in part if converter.recognizes(file)), None)
