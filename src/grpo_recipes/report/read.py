"""A run directory as the report sees it: tolerant of runs that still run, were killed, or were made by older code."""

from __future__ import annotations

import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.errors import config_error
from grpo_recipes.paths import shown
from grpo_recipes.secrets import masked

Column = list[float | None]
# Parts of the run's JSON files that are read further.
_MAPPINGS = ("batch", "code", "versions")
_LISTS = ("processes", "notes")


@dataclass
class Table:
    """Rows of JSON as columns.

    Attributes:
        steps: the optimizer step of each row.
        columns: name -> a value a row; None where it is missing or no finite number.
        odd: name -> how many values were ``inf``, ``-inf`` and ``nan``.
        unreadable: lines that are no JSON row with a step; a torn last line is not counted.
    """

    steps: list[float] = field(default_factory=list)
    columns: dict[str, Column] = field(default_factory=dict)
    odd: dict[str, Counter[str]] = field(default_factory=dict)
    unreadable: int = 0

    def column(self, name: str) -> Column:
        """A value a row, all None for a name no row has."""
        return self.columns.get(name, [None] * len(self.steps))

    def has(self, name: str) -> bool:
        """Whether any row has a finite value of this name."""
        return any(value is not None for value in self.columns.get(name, ()))

    def last(self, name: str) -> float | None:
        """The newest finite value."""
        return next((value for value in reversed(self.column(name)) if value is not None), None)


@dataclass(frozen=True)
class Scored:
    """A row of ``samples.jsonl``: its step, every total reward, and where in the file it begins."""

    step: int
    rewards: array[float]
    offset: int


@dataclass(frozen=True)
class Setting:
    """A recipe key, its value, and the origin named above it."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class RunRecord:
    """All that is known of a run."""

    folder: Path
    identity: dict[str, Any]
    plan: dict[str, Any]
    summary: dict[str, Any]
    settings: list[Setting]
    metrics: Table
    evals: Table
    scored: list[Scored]

    @property
    def name(self) -> str:
        """The folder's name: run name and timestamp."""
        return self.folder.name

    @property
    def status(self) -> str:
        """As in ``summary.json``."""
        return str(self.summary.get("status", "unknown"))

    @property
    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """Name -> scores, from ``summary.json``."""
        found = self.summary.get("benchmarks")
        named = found.items() if isinstance(found, dict) else ()
        return {name: scores for name, scores in named if isinstance(scores, dict)}

    def setting(self, key: str) -> Any:
        """A given value of the recipe, or None."""
        return next((setting.value for setting in self.settings if setting.key == key), None)


def read_run(folder: Path) -> RunRecord:
    """Read a run directory.

    Raises:
        ConfigError: it is none, or one of its JSON files is damaged.
    """
    if not os.path.isfile(folder / "run.json"):  # False too for a name that is too long
        raise config_error(shown(folder), "is not a run directory (no run.json)", "name a folder under run_root")
    metrics = read_table(folder / "metrics.jsonl")
    return RunRecord(
        folder=folder.absolute(),
        identity=_read_mapping(folder / "run.json"),
        plan=_read_mapping(folder / "plan.json"),
        summary=_read_mapping(folder / "summary.json"),
        settings=read_settings(folder / "recipe.yaml"),
        metrics=metrics,
        evals=_with_evals_of(metrics, read_table(folder / "eval.jsonl")),
        scored=list(read_scored(folder / "samples.jsonl")),
    )


def _read_mapping(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    content = _row(path.read_text(errors="replace"))
    what = "not a JSON mapping" if content is None else _wrong_part(content)
    if content is None or what:
        raise config_error(shown(path), f"is damaged ({what})", "restore it, or remove the file")
    return dict(_clean(content))


def _wrong_part(content: dict[str, Any]) -> str:
    """The first part that is of another kind than the launcher writes, or an empty text."""
    for key, part in content.items():
        if key in _MAPPINGS and not isinstance(part, dict):
            return f"'{key}' is no mapping"
        if key in _LISTS and not isinstance(part, list):
            return f"'{key}' is no list"
        if key == "processes" and not all(isinstance(process, dict) for process in part):
            return f"'{key}' is no list of mappings"
    return ""


def _clean(value: Any) -> Any:
    """The value with every secret in it masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked(str(key)): _clean(part) for key, part in value.items()}
    return [_clean(part) for part in value] if isinstance(value, list) else value


def read_table(path: Path) -> Table:
    """Read rows of JSON; a torn last line is left out."""
    table = Table()
    rows = []
    for row in _rows(path):
        if row is None or number(row.get("step")) is None:
            table.unreadable += 1
            continue
        rows.append(row)
    table.steps = [row["step"] for row in rows]
    for index, row in enumerate(rows):
        for key, value in row.items():
            if isinstance(value, str) and value in ("inf", "-inf", "nan"):
                table.odd.setdefault(masked(key), Counter())[value] += 1
            elif (known := number(value)) is not None:
                table.columns.setdefault(masked(key), [None] * len(rows))[index] = known
    return table


def number(value: Any) -> float | None:
    """A number that can be drawn: finite, and so is its difference to any other; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value)


def _rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each whole line as a mapping, or None."""
    if not path.exists():
        return
    with path.open(errors="replace") as file:
        for line in file:
            if line.endswith("\n") and line.strip():
                yield _row(line)


def _row(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _with_evals_of(metrics: Table, evals: Table) -> Table:
    """Evaluation rows stand in ``eval.jsonl``; where there is none, in the ``eval_`` columns of the metrics."""
    if evals.steps:
        return evals
    found = {name: column for name, column in metrics.columns.items() if name.startswith("eval_")}
    return Table(steps=metrics.steps, columns=found) if found else evals


def read_scored(path: Path) -> Iterator[Scored]:
    """Steps and rewards of ``samples.jsonl``, without the texts."""
    if not path.exists():
        return
    with path.open("rb") as file:
        offset = 0
        for line in file:
            row = _row(line) if line.endswith(b"\n") else None
            if row is not None and isinstance(row.get("step"), int):
                rewards = [known for value in _list(row, "rewards") if (known := number(value)) is not None]
                yield Scored(row["step"], array("d", rewards), offset)
            offset += len(line)


def read_samples(path: Path, scored: Scored) -> list[dict[str, Any]]:
    """The sampled completions of one row, secrets masked."""
    with path.open("rb") as file:
        file.seek(scored.offset)
        row = _row(file.readline()) or {}
    return [_clean(sample) for sample in _list(row, "samples") if isinstance(sample, dict)]


def _list(row: dict[str, Any], key: str) -> list[Any]:
    found = row.get(key)
    return found if isinstance(found, list) else []


def read_settings(path: Path) -> list[Setting]:
    """The given keys of a frozen recipe with the origin that stands above each, or behind it in older runs."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise config_error(shown(path), "is damaged (not YAML)", "restore it, or remove the file") from None
    origins = {key: origin for origin, key in re.findall(r"^# (.*)\n([A-Za-z_]\w*):", text, re.MULTILINE)}
    origins |= {key: origin for key, origin in re.findall(r"^(\w+):.*  # (\S+)$", text, re.MULTILINE)}
    pairs = values.items() if isinstance(values, dict) else ()
    return [Setting(str(key), _clean(value), masked(origins.get(str(key), ""))) for key, value in pairs]
