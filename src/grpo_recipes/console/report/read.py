"""Read a run directory for the report: ``read_run`` returns a ``RunRecord`` with metrics, evaluations and rewards.

The run may still be running or may have been killed: missing files are empty, and damaged lines are counted.
"""

from __future__ import annotations

import functools
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_recipes.paths import display_path
from grpo_recipes.runs.health import AVERAGED_STEPS, average_first_and_last, drop_missing, finite_number, mean
from grpo_recipes.runs.rundir import Run, find_run, load_json_mapping
from grpo_recipes.runs.trace import sum_spans

Column = list[float | None]
AFTER_STEP = ("save", "evaluate")  # phases after a step, with seconds in the row of the next step


@dataclass
class Table:
    """Rows of ``metrics.jsonl`` or ``eval.jsonl`` as columns of numbers."""

    steps: list[float] = field(default_factory=list)  # the optimizer step of each row
    columns: dict[str, Column] = field(default_factory=dict)  # a value for each row; None: missing, or not finite
    nonfinite: dict[str, Counter[str]] = field(default_factory=dict)  # name -> number of values inf, -inf and nan
    unreadable: int = 0  # lines that are not a JSON row with a step; a torn last line is not counted

    def column(self, name: str) -> Column:
        """Return the column ``name`` with an entry per row: None for rows without a finite value, or without it."""
        return self.columns.get(name, [None] * len(self.steps))

    def known(self, name: str) -> list[float]:
        """Return the finite values of a column, without gaps; [] for an unknown name."""
        return drop_missing(self.columns.get(name, ()))

    def last(self, name: str) -> float | None:
        """Return the newest finite value of a column, or None."""
        return next(reversed(self.known(name)), None)


class Scored(NamedTuple):
    """A row of ``samples.jsonl`` without its texts."""

    step: int
    rewards: array[float]  # all finite total rewards


class Outcome(NamedTuple):
    """The result of a run, computed like ``summary.json``, which running runs do not have yet."""

    first: float | None  # mean reward of the first 5 steps
    last: float | None  # mean reward of the last 5 steps
    best: tuple[float, float] | None  # highest mean reward over 5 steps, and the last of these steps
    steps: float  # number of finished steps
    total: float | None  # number of planned steps
    seconds: float  # sum over all steps
    recent: float | None  # mean seconds of the last 20 steps
    tokens_per_second: float | None  # mean over the steps


@dataclass(frozen=True)
class RunRecord(Run):
    """A run directory, and the rows of its files that the report draws."""

    metrics: Table
    evals: Table
    scored: list[Scored]
    origins: dict[str, str]  # recipe key -> file and line, flag or variable that set it; incomplete for old runs

    @property
    def status(self) -> str:
        """The status in the summary, or "unknown"."""
        return str(self.summary.get("status", "unknown"))

    @property
    def benchmarks(self) -> dict[str, dict[str, Any]]:
        """The scores of each benchmark, from the summary: benchmark -> score name -> value; {} without benchmarks."""
        benchmarks = self.summary.get("benchmarks")
        pairs = benchmarks.items() if isinstance(benchmarks, dict) else ()
        return {name: scores for name, scores in pairs if isinstance(scores, dict)}

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Rewards, steps and times of the whole run, computed at the first access."""
        metrics, rewards = self.metrics, self.metrics.known("reward")
        column = metrics.column("reward")
        steps = [step for step, reward in zip(metrics.steps, column, strict=True) if reward is not None]
        size = min(AVERAGED_STEPS, len(rewards)) or 1
        levels = ((sum(rewards[end - size : end]) / size, steps[end - 1]) for end in range(size, len(rewards) + 1))
        first, last = average_first_and_last(rewards)
        seconds = metrics.known("seconds/step")
        return Outcome(
            first, last, max(levels, default=None), metrics.steps[-1] if metrics.steps else 0,
            metrics.last("max_steps"), sum(seconds), mean(seconds[-20:]), mean(metrics.known("tokens_per_second")),
        )  # fmt: skip

    @functools.cached_property
    def last_seconds(self) -> dict[str, float]:
        """Seconds of the save and the evaluation after the last step, from the trace: phase -> seconds.

        The row of the next step has these times, so ``metrics`` lacks them after the last step.
        """
        steps = self.metrics.steps
        return sum_spans(self.folder, steps[-1] + 1, AFTER_STEP) if steps else {}


@dataclass(frozen=True)
class Group:
    """Runs of one recipe with different seeds, or a single run."""

    label: str  # unique among the groups
    runs: Sequence[RunRecord]  # at least one
    colour: int = 1  # 1 to 7
    kind: str = "line"  # style of its curves: dashed if another group has the same colour

    @property
    def finals(self) -> list[float]:
        """The final reward, the mean of the last 5 steps, of each run that has one."""
        return drop_missing(run.outcome.last for run in self.runs)

    @property
    def limits(self) -> tuple[float | None, float | None]:
        """The lowest and highest reward of a single completion in any run; None and None without rewards."""
        ends = [
            end
            for run in self.runs
            for row in run.scored
            if row.rewards
            for end in (min(row.rewards), max(row.rewards))
        ]
        return min(ends, default=None), max(ends, default=None)

    @property
    def evaluations(self) -> list[float]:
        """The reward in the last evaluation of each run that has one."""
        return drop_missing(run.evals.last("eval_reward") for run in self.runs)

    def scores(self, benchmark: str, key: str) -> list[float]:
        """Return the score ``key`` of a benchmark for each run that has it."""
        return drop_missing(finite_number(run.benchmarks.get(benchmark, {}).get(key)) for run in self.runs)


def read_run(folder: Path) -> RunRecord:
    """Read a run directory; raise ConfigError for any other folder.

    A damaged ``summary.json``, ``plan.json`` or similar file raises ConfigError later, when it is first read.
    """
    run = find_run(Path(), display_path(folder), display_path(folder))
    metrics, evals = read_table(run.folder / "metrics.jsonl"), read_table(run.folder / "eval.jsonl")
    recipe = run.folder / "recipe.yaml"
    text = recipe.read_text(errors="replace") if recipe.exists() else ""
    origins = re.findall(r"^# (.*)\n([A-Za-z_]\w*):", text, re.MULTILINE)
    scored = [rewards for rewards, _ in read_scored_rows(run.folder / "samples.jsonl")]
    return RunRecord(run.folder, metrics, evals, scored, {key: origin for origin, key in origins})


def read_table(path: Path) -> Table:
    """Read a JSONL file as columns of finite numbers; a missing file gives an empty table.

    Lines without a step are counted as unreadable. Values such as ``nan`` are counted by column and are None in it.
    """
    lines = list(read_rows(path))
    rows = [row for row in lines if finite_number(row.get("step")) is not None]
    table = Table(steps=[row["step"] for row in rows], unreadable=len(lines) - len(rows))
    for index, row in enumerate(rows):
        for key, value in row.items():
            if isinstance(value, str) and value in ("inf", "-inf", "nan"):
                table.nonfinite.setdefault(key, Counter())[value] += 1
            elif (finite := finite_number(value)) is not None:
                if key not in table.columns:  # not setdefault: a new list per cell would take minutes
                    table.columns[key] = [None] * len(rows)
                table.columns[key][index] = finite
    return table


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield each complete line of a file as a mapping, or an empty mapping if the line is something else.

    A missing file has no rows, and empty lines are skipped.
    """
    if path.exists():
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            yield from (load_json_mapping(line) or {} for line in file if line.endswith("\n") and line.strip())


def read_scored_rows(path: Path) -> Iterator[tuple[Scored, list[dict[str, Any]]]]:
    """Yield each row of ``samples.jsonl``, a generation: its step with all rewards, and its sampled completions.

    Damaged lines and rows without a step are skipped. Rewards that are not finite numbers are left out.
    """
    for row in read_rows(path):
        if isinstance(row.get("step"), int):
            rewards, samples = (row[key] if isinstance(row.get(key), list) else [] for key in ("rewards", "samples"))
            scored = Scored(row["step"], array("d", drop_missing(map(finite_number, rewards))))
            yield scored, [sample for sample in samples if isinstance(sample, dict)]
