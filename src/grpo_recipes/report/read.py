"""A run as the report sees it: tolerant of runs that go on, were killed, or were made by older code; secrets masked."""

from __future__ import annotations

import functools
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
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs.health import first_and_last, known, number
from grpo_recipes.runs.rundir import find_run, json_mapping, read_json
from grpo_recipes.secrets import masked

Column = list[float | None]


@dataclass
class Table:
    """Rows of JSON as columns."""

    steps: list[float] = field(default_factory=list)  # the optimizer step of each row
    columns: dict[str, Column] = field(default_factory=dict)  # a value a row; None: missing, or no finite number
    odd: dict[str, Counter[str]] = field(default_factory=dict)  # name -> how many values were inf, -inf and nan
    unreadable: int = 0  # lines that are no JSON row with a step; a torn last line is not counted

    def column(self, name: str) -> Column:
        """Return a value a row, all None for a name no row has."""
        return self.columns.get(name, [None] * len(self.steps))

    def has(self, name: str) -> bool:
        """Return whether any row has a finite value of this name."""
        return any(value is not None for value in self.columns.get(name, ()))

    def last(self, name: str) -> float | None:
        """Return the newest finite value."""
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
class Outcome:
    """What a run came to, counted as ``summary.json`` does; a running run has no summary yet."""

    first: float | None  # mean reward of the first 3 steps
    last: float | None  # mean reward of the last 5 steps
    best: tuple[float, float] | None  # highest mean reward over 5 steps, and the last of them
    steps: float  # taken
    of: float | None  # steps wanted
    seconds: float  # of all steps together
    tokens_per_second: float | None  # over all steps


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
    def batch(self) -> dict[str, Any]:
        """The batch of the plan, empty without a plan."""
        found: dict[str, Any] = self.plan.get("batch", {})
        return found

    @property
    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """Name -> scores, from ``summary.json``."""
        return _mappings_in(self.summary.get("benchmarks"))

    def setting(self, key: str) -> Any:
        """Return a given value of the recipe, or None."""
        return next((setting.value for setting in self.settings if setting.key == key), None)

    def value(self, key: str) -> Any:
        """Return a value of the recipe, or the key's default."""
        given = {setting.key: setting.value for setting in self.settings}
        return given[key] if key in given else catalogue().get(key, {}).get("default")

    @functools.cached_property
    def outcome(self) -> Outcome:
        """What the run came to."""
        metrics = self.metrics
        seconds = metrics.column("seconds/step")
        pairs = zip(seconds, metrics.column("tokens_per_second"), strict=True)
        tokens = [(length, length * rate) for length, rate in pairs if length is not None and rate is not None]
        total = sum(length for length, _ in tokens)
        first, last = first_and_last(known(metrics.column("reward")))
        return Outcome(
            first=first,
            last=last,
            best=self._best(),
            steps=metrics.steps[-1] if metrics.steps else 0,
            of=metrics.last("max_steps"),
            seconds=sum(known(seconds)),
            tokens_per_second=sum(count for _, count in tokens) / total if total else None,
        )

    def _best(self) -> tuple[float, float] | None:
        pairs = zip(self.metrics.column("reward"), self.metrics.steps, strict=True)
        rows = [(reward, step) for reward, step in pairs if reward is not None]
        size = min(5, len(rows))
        ends = range(size, len(rows) + 1) if rows else ()
        levels = ((sum(reward for reward, _ in rows[end - size : end]) / size, rows[end - 1][1]) for end in ends)
        return max(levels, default=None)


def baselines_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return scores of what knows nothing, and of the model before training, in a result of ModeBench."""
    return _mappings_in(result.get("baselines"))


def _mappings_in(found: Any) -> dict[str, dict[str, Any]]:
    named = found.items() if isinstance(found, dict) else ()
    return {name: scores for name, scores in named if isinstance(scores, dict)}


def read_run(folder: Path) -> RunRecord:
    """Read a run directory; raise ConfigError where it is none, or one of its JSON files is damaged."""
    folder = find_run(Path(), shown(folder), shown(folder)).folder
    metrics = read_table(folder / "metrics.jsonl")
    identity, plan, summary = (clean(read_json(folder / f"{name}.json")) for name in ("run", "plan", "summary"))
    return RunRecord(
        folder=folder,
        identity=identity,
        plan=plan,
        summary=summary,
        settings=read_settings(folder / "recipe.yaml"),
        metrics=metrics,
        evals=_with_evals_of(metrics, read_table(folder / "eval.jsonl")),
        scored=list(read_scored(folder / "samples.jsonl")),
    )


def clean(value: Any) -> Any:
    """Return the value with every secret in it masked."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, dict):
        return {masked(str(key)): clean(part) for key, part in value.items()}
    return [clean(part) for part in value] if isinstance(value, list) else value


def read_table(path: Path) -> Table:
    """Read rows of JSON as columns."""
    found = [row for _, row in _rows(path)]
    rows = [row for row in found if number(row.get("step")) is not None]
    table = Table(steps=[row["step"] for row in rows], unreadable=len(found) - len(rows))
    for index, row in enumerate(rows):
        for key, value in row.items():
            if isinstance(value, str) and value in ("inf", "-inf", "nan"):
                table.odd.setdefault(masked(key), Counter())[value] += 1
            elif (finite := number(value)) is not None:
                table.columns.setdefault(masked(key), [None] * len(rows))[index] = finite
    return table


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each whole line, with where it begins, as a mapping that is empty where the line is no mapping."""
    if not path.exists():
        return
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield offset, _row(line)
            offset += len(line)


def _row(line: bytes) -> dict[str, Any]:
    return json_mapping(line.decode(errors="replace")) or {}


def _with_evals_of(metrics: Table, evals: Table) -> Table:
    """Return the rows of ``eval.jsonl``; where there are none, the ``eval_`` columns of the metrics."""
    found = {name: column for name, column in metrics.columns.items() if name.startswith("eval_")}
    return evals if evals.steps or not found else Table(steps=metrics.steps, columns=found)


def read_scored(path: Path) -> Iterator[Scored]:
    """Yield steps and rewards of ``samples.jsonl``, without the texts."""
    for offset, row in _rows(path):
        if isinstance(row.get("step"), int):
            rewards = known(number(value) for value in _list(row, "rewards"))
            yield Scored(row["step"], array("d", rewards), offset)


def read_samples(path: Path, scored: Scored) -> list[dict[str, Any]]:
    """Return the sampled completions of one row, secrets masked."""
    with path.open("rb") as file:
        file.seek(scored.offset)
        row = _row(file.readline())
    return [clean(sample) for sample in _list(row, "samples") if isinstance(sample, dict)]


def _list(row: dict[str, Any], key: str) -> list[Any]:
    found = row.get(key)
    return found if isinstance(found, list) else []


def read_settings(path: Path) -> list[Setting]:
    """Return the given keys of a frozen recipe with the origin that stands above each, or behind it in older runs."""
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
    return [Setting(str(key), clean(value), masked(origins.get(str(key), ""))) for key, value in pairs]
