"""The results of a sweep's trials: their table on the terminal, and ``sweep.html``, which compares them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from grpo_recipes.process.reports import aligned
from grpo_recipes.report.page import NOTHING, SMOKE_BADGE, render, short, spread
from grpo_recipes.report.pages import Group, comparison, group_of
from grpo_recipes.report.read import RunRecord, read_run
from grpo_recipes.runs.rundir import write_whole
from grpo_recipes.sweep.folder import COMPLETED, GONE, Sweep

PAGE = "sweep.html"
SEED = "seed"
_LOCK_SECONDS = 60


@dataclass(frozen=True)
class Result:
    """A trial and its run."""

    name: str
    values: dict[str, str]  # what it varies, as it was written
    status: str  # as in ``summary.json``, or ``GONE``
    run: RunRecord | None  # None where its directory is gone

    @property
    def cause(self) -> str:
        """Return why it did not complete, or an empty text."""
        return "" if self.run is None or self.status == COMPLETED else str(self.run.summary.get("cause") or "")


def read_results(sweep: Sweep) -> list[Result]:
    """Read every trial with its run."""
    results = []
    for index, trial in enumerate(sweep.record["cells"]):
        status = sweep.status(index)
        run = None if status == GONE else read_run(sweep.trial_dir(index))
        results.append(Result(trial["name"], trial["values"], status, run))
    return results


def settings(sweep: Sweep, results: Sequence[Result]) -> list[Group]:
    """Return a group for each setting: its completed trials, which differ in their seed alone."""
    alike: dict[str, list[RunRecord]] = {}
    for result in results:
        if result.run is not None and result.status == COMPLETED:
            label = ", ".join(f"{key}={value}" for key, value in result.values.items() if key != SEED)
            alike.setdefault(label or str(sweep.record["name"]), []).append(result.run)
    return [group_of(label, runs, number) for number, (label, runs) in enumerate(alike.items())]


def text_table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Return a line for each trial and, where the seed is varied, each setting's mean with its 95 % interval."""
    keys = list(sweep.record["axes"])
    rows = [(*keys, "status", "steps", "reward", "evaluation")]
    for result in results:
        steps = rewards = evaluation = NOTHING
        if result.run is not None:
            outcome, evaluation = result.run.outcome, short(result.run.evals.last("eval_reward"))
            rewards = NOTHING if outcome.last is None else f"{short(outcome.first)} -> {short(outcome.last)}"
            steps = f"{outcome.steps:,.0f}"
        rows.append((*(result.values[key] for key in keys), result.status, steps, rewards, evaluation))
    lines = aligned(rows)
    if SEED in keys:
        groups = settings(sweep, results)
        means = [(group.label, spread(group.finals), spread(group.evaluations)) for group in groups]
        lines += ["", *aligned([("mean of", "reward", "evaluation"), *means])]
    return "\n".join(lines)


def write_sweep(sweep: Sweep, path: Path | None = None) -> tuple[Path, list[Result]]:
    """Write the page of a sweep, ended or not, by default in its directory; return its path and the results it shows.

    A damaged file of a trial is a ConfigError, a page that cannot be written an OSError.
    """
    path = path or sweep.folder / PAGE
    # Trials of an array job end at the same time: the page of the last must not be replaced by an older one.
    with (sweep.folder / "page.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            _wait_for(lock.fileno())
        results = read_results(sweep)
        write_whole(path, sweep_page(sweep, results, path))
    return path, results


def _wait_for(descriptor: int) -> None:
    """Take the lock, or wait a minute for it: an old page is better than none."""
    for _ in range(_LOCK_SECONDS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(1)


def sweep_page(sweep: Sweep, results: Sequence[Result], path: Path) -> str:
    """Return the page as text; its links start from ``path``, where it will be."""
    groups, title = settings(sweep, results), sweep.folder.name
    done = sum(result.status == COMPLETED for result in results)
    badges = [(f"{done} of {len(results)} completed", "completed" if done == len(results) else "running")]
    badges += [SMOKE_BADGE] if any(one.run is not None and one.run.summary.get("smoke") for one in results) else []
    reports = {one.name: one.run.folder / "report.html" for one in results if one.run is not None}
    here = path.absolute().parent
    links = {name: quote(os.path.relpath(file, here)) for name, file in reports.items() if file.is_file()}
    values = {**comparison(groups), "axes": list(sweep.record["axes"]), "results": results, "links": links}
    values |= {} if groups else {"headline": "No trial has completed yet."}
    return render("sweep.html.j2", title=f"Sweep {title}", name=title, badges=badges, **values)
