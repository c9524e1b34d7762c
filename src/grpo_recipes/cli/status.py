"""`grpo status`: how a run stands, or all of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from grpo_recipes.cli.runs import RUN_HELP, how_it_stands, is_over, job_of, named_run, run_root
from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import shown
from grpo_recipes.runs.find import RunFiles
from grpo_recipes.runs.health import notices_of
from grpo_recipes.runs.progress import clock
from grpo_recipes.slurm.queue import NO_ANSWER, Job, my_jobs

HELP = "say how a run stands, or list all of them"
TAKES_RECIPE = False
_PACE_ROWS = 20  # of metrics.jsonl, over which a step's time is averaged


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run."""
    parser.add_argument("which", nargs="?", metavar="RUN", help=f"{RUN_HELP}; without it a table of all in RUN_ROOT")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Print how a run stands, or a table of the runs in RUN_ROOT, the newest first.

    Returns:
        0.

    Raises:
        ConfigError: there is no such run.
    """
    if options.which is None:
        _print_table()
        return 0
    found = named_run(options.which)
    for name, text in _facts(found, job_of(found)):
        print(f"{name:<8} {text}")
    return 0


def _facts(run: RunFiles, job: Job | None) -> list[tuple[str, str]]:
    facts = [("run", shown(run.folder)), ("state", how_it_stands(run, job))]
    if run.cause:
        facts.append(("cause", run.cause))
    if run.job_id:
        ends = f", at most until {job.ends}" if job and job.ends and not job.waits and job.active else ""
        facts.append(("job", f"{run.job_id} {job or 'is no longer known to Slurm'}{ends}"))
    if run.rows:
        facts.append(("step", _step(run)))
        facts.append(("reward", f"{_reward(run)} (mean of the last steps)"))
    if left := _left(run, job):
        facts.append(("left", f"about {left} of training"))
    if run.summary.get("restarts"):
        facts.append(("restarts", str(run.summary["restarts"])))
    facts += [("note", str(notice)) for notice in notices_of(run.rows, run.value, over=is_over(run, job))]
    facts += [("log", shown(path)) for path in run.logs.values()]
    return facts


def _print_table() -> None:
    folders = [path.parent for path in run_root().glob("*/run.json")]
    if not folders:
        print(f"grpo: there is no run in {shown(run_root())}")
        return
    jobs = my_jobs()
    rows = [("run", "state", "job", "step", "reward", "left")]
    for folder in sorted(folders, key=_changed, reverse=True):
        try:
            rows.append(_row(folder, jobs))
        except ConfigError as damaged:
            rows.append((folder.name, f"damaged: {Path(damaged.problems[0].where).name}", "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(folder: Path, jobs: Mapping[str, Job] | None) -> tuple[str, str, str, str, str, str]:
    """A run's line in the table; ``jobs`` is None where Slurm does not answer."""
    run = RunFiles(folder)
    unknown = Job(run.job_id, NO_ANSWER) if run.job_id else None
    job = unknown if jobs is None else jobs.get(run.job_id)
    return folder.name, how_it_stands(run, job), run.job_id, _step(run), _reward(run), _left(run, job)


def _changed(folder: Path) -> float:
    summary = folder / "summary.json"
    return os.path.getmtime(summary if summary.is_file() else folder)


def _step(run: RunFiles) -> str:
    if not run.rows:
        return ""
    last = run.rows[-1]
    return f"{last['step']}/{last.get('max_steps', '?')}"


def _reward(run: RunFiles) -> str:
    reward = run.recent("reward")
    return "" if reward is None else f"{reward:.3f}"


def _left(run: RunFiles, job: Job | None) -> str:
    """Time the remaining steps take at the pace of the last ones; empty where none is known or the run is over."""
    seconds = run.numbers("seconds/step", _PACE_ROWS)
    last = run.rows[-1] if run.rows else {}
    if not seconds or "max_steps" not in last or is_over(run, job):
        return ""
    return clock(sum(seconds) / len(seconds) * (last["max_steps"] - last["step"]))
