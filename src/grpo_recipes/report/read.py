"""A run as the report sees it: tolerant of runs that go on, were killed, or were made by older code; secrets masked."""

from __future__ import annotations

import functools
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_recipes.errors import config_error
from grpo_recipes.paths import shown
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs.health import LAST_STEPS, first_and_last, known, mean, number
from grpo_recipes.runs.rundir import find_run, json_mapping, read_json
from grpo_recipes.secrets import masked

Column = list[float | None]


@dataclass
class Table:
    """Rows of JSON as columns."""

    steps: list[float] = field(default_factory=list)  # the optimizer step of each row
    columns: dict[str, Column] = field(default_factory=dict)  # a value for each row; None: missing, or not finite
    odd: dict[str, Counter[str]] = field(default_factory=dict)  # name -> how many values were inf, -inf and nan
    unreadable: int = 0  # lines that are not a JSON row with a step; a torn last line is not counted

    def column(self, name: str) -> Column:
        """Return a value for each row, all None for an unknown name."""
        return self.columns.get(name, [None] * len(self.steps))

    def known(self, name: str) -> list[float]:
        """Return the finite values of a column."""
        return known(self.columns.get(name, ()))

    def last(self, name: str) -> float | None:
        """Return the newest finite value."""
        return next(reversed(self.known(name)), None)


class Scored(NamedTuple):
    """A row of ``samples.jsonl``: its step, every total reward, and where in the file it begins."""

    step: int
    rewards: array[float]
    offset: int


class Setting(NamedTuple):
    """A value of the recipe, and the origin named above it."""

    value: Any
    origin: str

    @property
    def set_by(self) -> str:
        """What set it: the recipe's file, a flag or an environment variable."""
        by_recipe = ":" in self.origin or not self.origin
        return "flag" if self.origin.startswith("--") else "the recipe" if by_recipe else "environment variable"


class Outcome(NamedTuple):
    """The result of a run, counted as ``summary.json`` does; a running run has no summary yet."""

    first: float | None  # mean reward of the first 3 steps
    last: float | None  # mean reward of the last 5 steps
    best: tuple[float, float] | None  # highest mean reward over 5 steps, and the last of them
    steps: float  # taken
    of: float | None  # steps wanted
    seconds: float  # of all steps together
    recent: float | None  # seconds of a step, mean of the last 20
    tokens_per_second: float | None  # over all steps


@dataclass(frozen=True)
class RunRecord:
    """A run directory, read."""

    folder: Path
    name: str  # of the folder: run name and timestamp
    identity: dict[str, Any]
    plan: dict[str, Any]
    batch: dict[str, Any]  # of the plan, empty without one
    summary: dict[str, Any]
    status: str  # in the summary
    benchmarks: dict[str, dict[str, Any]]  # name -> scores, in the summary
    settings: dict[str, Setting]  # the given keys of the recipe
    metrics: Table
    evals: Table
    scored: list[Scored]

    def value(self, key: str) -> Any:
        """Return a value of the recipe, or the key's default."""
        return self.settings[key].value if key in self.settings else catalogue().get(key, {}).get("default")

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Rewards, steps and times of the whole run."""
        metrics = self.metrics
        lengths, speeds = metrics.column("seconds/step"), metrics.column("tokens_per_second")
        timed = [(a, a * b) for a, b in zip(lengths, speeds, strict=True) if a is not None and b is not None]
        measured, seconds = sum(length for length, _ in timed), known(lengths)
        rewards = metrics.known("reward")
        steps = [step for step, one in zip(metrics.steps, metrics.column("reward"), strict=True) if one is not None]
        size = min(LAST_STEPS, len(rewards)) or 1
        levels = ((sum(rewards[end - size : end]) / size, steps[end - 1]) for end in range(size, len(rewards) + 1))
        first, last = first_and_last(rewards)
        return Outcome(
            first=first, last=last, best=max(levels, default=None), steps=metrics.steps[-1] if metrics.steps else 0,
            of=metrics.last("max_steps"), seconds=sum(seconds), recent=mean(seconds[-20:]),
            tokens_per_second=sum(tokens for _, tokens in timed) / measured if measured else None,
        )  # fmt: skip


def read_run(folder: Path) -> RunRecord:
    """Read a run directory; raise ConfigError for another folder, or when one of its JSON files is damaged."""
    folder = find_run(Path(), shown(folder), shown(folder)).folder
    identity, plan, summary = (clean(read_json(folder / f"{name}.json")) for name in ("run", "plan", "summary"))
    metrics, evals = read_table(folder / "metrics.jsonl"), read_table(folder / "eval.jsonl")
    if not evals.steps:
        found = {name: column for name, column in metrics.columns.items() if name.startswith("eval_")}
        evals = Table(metrics.steps, found) if found else evals
    given = summary.get("benchmarks")
    benchmarks = (
        {name: result for name, result in given.items() if isinstance(result, dict)} if isinstance(given, dict) else {}
    )
    return RunRecord(
        folder=folder, name=folder.name, identity=identity, plan=plan, batch=plan.get("batch", {}), summary=summary,
        status=str(summary.get("status", "unknown")), benchmarks=benchmarks, metrics=metrics,
        settings=read_settings(folder / "recipe.yaml"), evals=evals, scored=[*read_scored(folder / "samples.jsonl")],
    )  # fmt: skip


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
    """Yield each whole line, with where it begins, as a mapping that is empty where the line is something else."""
    if not path.exists():
        return
    with path.open("rb") as file:
        offset = 0
        for line in file:
            if line.endswith(b"\n") and line.strip():
                yield offset, json_mapping(line.decode(errors="replace")) or {}
            offset += len(line)


def read_scored(path: Path) -> Iterator[Scored]:
    """Yield steps and rewards of ``samples.jsonl``, without the texts."""
    for offset, row in _rows(path):
        if isinstance(row.get("step"), int):
            yield Scored(row["step"], array("d", known(number(value) for value in _list(row, "rewards"))), offset)


def read_samples(path: Path, scored: Scored) -> list[dict[str, Any]]:
    """Return the sampled completions of one row, secrets masked."""
    with path.open("rb") as file:
        file.seek(scored.offset)
        row = json_mapping(file.readline().decode(errors="replace")) or {}
    return [clean(sample) for sample in _list(row, "samples") if isinstance(sample, dict)]


def _list(row: dict[str, Any], key: str) -> list[Any]:
    found = row.get(key)
    return found if isinstance(found, list) else []


def read_settings(path: Path) -> dict[str, Setting]:
    """Return the given keys of a frozen recipe; the origin is in the line above each, or behind it in older runs."""
    text = path.read_text(errors="replace") if path.exists() else ""
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        raise config_error(shown(path), "is damaged (not YAML)", "restore it, or remove the file") from None
    origins = {key: origin for origin, key in re.findall(r"^# (.*)\n([A-Za-z_]\w*):", text, re.MULTILINE)}
    origins |= {key: origin for key, origin in re.findall(r"^(\w+):.*  # (\S+)$", text, re.MULTILINE)}
    pairs = values.items() if isinstance(values, dict) else ()
    return {str(key): Setting(clean(value), masked(origins.get(str(key), ""))) for key, value in pairs}
