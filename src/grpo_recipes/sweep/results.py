"""The results of a sweep's trials, and their table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_recipes.process.reports import aligned
from grpo_recipes.report.compare import Group, group_of, spread
from grpo_recipes.report.page import NOTHING, short
from grpo_recipes.report.read import RunRecord, read_run
from grpo_recipes.sweep.folder import COMPLETED, GONE, Sweep

SEED = "seed"


@dataclass(frozen=True)
class Result:
    """A trial and its run."""

    name: str
    values: dict[str, str]  # what it varies, as it was written
    status: str  # as in ``summary.json``, or ``GONE``
    cause: str  # why it did not complete, or an empty text
    run: RunRecord | None  # None where its directory is gone

    @property
    def without_seed(self) -> str:
        """The values beside the seed: trials that share them are samples of one setting."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items() if key != SEED)


def read_results(sweep: Sweep) -> list[Result]:
    """Read every trial with its run."""
    results = []
    for index, name in enumerate(sweep.names):
        status = sweep.status(index)
        run = None if status == GONE else read_run(sweep.trial_dir(index))
        cause = "" if run is None or status == COMPLETED else str(run.summary.get("cause") or "")
        results.append(Result(name, sweep.values(index), status, cause, run))
    return results


def settings(sweep: Sweep, results: Sequence[Result]) -> list[Group]:
    """Return a group for each setting: its completed trials, which differ in their seed alone."""
    alike: dict[str, list[RunRecord]] = {}
    for result in results:
        if result.run is not None and result.status == COMPLETED:
            alike.setdefault(result.without_seed, []).append(result.run)
    return [
        group_of(label or str(sweep.record["name"]), runs, number) for number, (label, runs) in enumerate(alike.items())
    ]


def text_table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Return a line for each trial and, where the seed is varied, each setting's mean with its 95 % interval."""
    keys = list(sweep.record["axes"])
    rows = [(*keys, "status", "steps", "reward", "evaluation")]
    rows += [(*(result.values[key] for key in keys), result.status, *_numbers(result.run)) for result in results]
    lines = aligned(rows)
    if SEED in keys:
        lines += ["", *aligned([("mean of", "reward", "evaluation"), *map(_means, settings(sweep, results))])]
    return "\n".join(lines)


def _numbers(run: RunRecord | None) -> tuple[str, str, str]:
    if run is None:
        return NOTHING, NOTHING, NOTHING
    count = run.outcome
    rewards = NOTHING if count.last is None else f"{short(count.first)} -> {short(count.last)}"
    return f"{count.steps:,.0f}", rewards, short(run.evals.last("eval_reward"))


def _means(group: Group) -> tuple[str, str, str]:
    return group.label, spread(group.finals), spread(group.evaluations)
