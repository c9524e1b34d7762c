"""The command `grpo status`: the state of a run or a folder of runs, or a table of everything in RUN_ROOT."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_recipes.cli import command, option
from grpo_recipes.cli.display import print_labelled
from grpo_recipes.cli.follow import (
    ENDED,
    GROUP_HELP,
    RUN_OR_GROUP,
    describe_state,
    find_jobs,
    find_run_job,
    find_target,
    group_state,
)
from grpo_recipes.cli.jobs import BareJob, list_bare_jobs
from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.closing import describe_model, describe_next_step
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.paths import display_path
from grpo_recipes.process.reports import align_columns
from grpo_recipes.process.terminal import LOG
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.runs import rundir
from grpo_recipes.runs.commands import fill_commands
from grpo_recipes.runs.groups import GONE, RunGroup, list_groups
from grpo_recipes.runs.health import (
    average_first_and_last,
    drop_missing,
    find_notices,
    finite_number,
    format_rewards,
)
from grpo_recipes.runs.progress import (
    find_current_activity,
    format_best,
    format_episode_metrics,
    format_evaluation,
    format_position,
    format_seconds_since,
)
from grpo_recipes.runs.rundir import Run
from grpo_recipes.slurm.client import NO_ANSWER, Job, list_my_jobs


@command(
    f"Show the state of {RUN_OR_GROUP}, or list all of them",
    option("which", nargs="?", metavar="RUN", help=f"{GROUP_HELP} (default: list everything in RUN_ROOT)"),
)
def status(options: argparse.Namespace) -> int:
    """Print the state of a run or a folder of runs, or a table of everything in RUN_ROOT. Return 0."""
    if options.which is None:
        _print_runs()
        return 0
    run = find_target(options.which)
    if not isinstance(run, Run):
        lines = run.lines() if isinstance(run, BareJob) else group_lines(run, find_jobs(run))
        print(*lines, sep="\n")
        return 0
    job = find_run_job(run)
    state, has_ended = describe_state(run, job)
    step, reward, time_left = format_position(run.rows, has_ended)
    if reward:  # shown as the mean of the first and of the last steps
        rewards = drop_missing(finite_number(row.get("reward")) for row in run.rows)
        initial, current = average_first_and_last(rewards)
        assert initial is not None and current is not None
        reward = format_rewards(initial, current, len(rewards))
    time_limit = f", at most until {job.ends}" if job and job.ends and not job.waits and job.active else ""
    phase, since = find_current_activity(run.folder) if run.is_running() else ("", 0.0)
    evaluations = rundir.read_rows(run.folder / "eval.jsonl", lenient=True)
    facts = [
        ("run", display_path(run.folder)),
        ("state", state),
        ("cause", run.cause),
        ("job", run.job_id and f"{run.job_id} {job or 'is no longer known to Slurm'}{time_limit}"),
        ("phase", phase and f"{phase} for {format_seconds_since(since)}"),
        ("step", step),
        ("reward", reward),
        ("episodes", run.rows and format_episode_metrics(run.rows[-1])),
        ("eval", evaluations and format_evaluation(evaluations[-1]).removeprefix("eval ")),
        ("best", format_best(rundir.read_json(run.folder / rundir.BEST))),
        ("left", time_left and f"about {time_left} of training"),
        ("restarts", str(run.summary.get("restarts") or "")),
        *(("note", fill_commands(str(notice), run)) for notice in find_notices(run.rows, run.value, over=has_ended)),
        *(("log", display_path(path)) for path in (run.folder / LOG, *run.logs.values()) if path.is_file()),
        *(_describe_ending(run) if has_ended else ()),
    ]
    print_labelled([f"{name:<8} {text}" for name, text in facts if text], 8)
    return 0


def _describe_ending(run: Run) -> Iterator[tuple[str, str]]:
    """Yield labels and texts that `grpo launch` prints at the end of a run: results, model, advice and next command."""
    hooks = AllHooks()
    yield from hooks.list_results(run.folder).items()
    if run.summary.get("status") in ENDED:
        yield "model", describe_model(run)
    fix, next_command = describe_next_step(run, hooks)
    yield "fix", fix
    yield "resume" if "--resume" in next_command else "next", next_command


_COLUMNS = ("state", "job", "step", "reward", "left")


def _print_runs() -> None:
    """Print a table of RUN_ROOT, the most recently written run or folder of runs first. Query Slurm for the jobs."""
    root, jobs = run_root(os.environ), list_my_jobs()  # jobs are None if Slurm does not answer
    runs, groups = rundir.list_runs(root), list_groups(root)
    job_ids = set[str]()
    for run in runs:
        with contextlib.suppress(ConfigError):  # the table shows a damaged run directory
            job_ids.add(run.job_id)
    bare_jobs = list_bare_jobs((jobs or {}).values(), job_ids)
    rows: list[tuple[str, ...]] = [(f"({job.script})", job.state, job.job_id) for job in bare_jobs]
    entries: list[Run | RunGroup] = [*runs, *groups]
    for entry in sorted(entries, key=_find_write_time, reverse=True):
        if isinstance(entry, RunGroup):
            name = f"{entry.folder.parent.name}/{entry.folder.name}"
            try:
                state = group_state(entry, jobs)[0]
            except ConfigError as error:
                state = _describe_damage(error)
            rows.append((name, state, " ".join(map(str, entry.record["jobs"]))))
        else:
            rows.append((entry.folder.name, *_make_cells(entry, jobs)))
    if not rows:
        print(f"grpo: no runs found in {display_path(root)}. Start one with: grpo launch RECIPE")
        return
    rows.insert(0, ("run", *_COLUMNS))
    print(*align_columns([(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]), sep="\n")


def _make_cells(run: Run, jobs: dict[str, Job] | None) -> tuple[str, ...]:
    """Return a run's cells for ``_COLUMNS``; for a damaged run, only its state. ``jobs`` are as in ``group_state``."""
    try:
        job = (Job(run.job_id, NO_ANSWER) if run.job_id else None) if jobs is None else jobs.get(run.job_id)
        state, has_ended = describe_state(run, job)
        return state, run.job_id, *format_position(run.rows, has_ended)
    except ConfigError as error:
        return _describe_damage(error), "", "", "", ""


def _describe_damage(error: ConfigError) -> str:
    """Return the state of a run whose file is damaged, with the file's name."""
    return f"damaged: {Path(error.problems[0].where).name}"


def group_lines(group: RunGroup, jobs: dict[str, Job] | None) -> list[str]:
    """Return lines with the state of a folder of runs, and a table of its trials.

    ``jobs`` are the user's Slurm jobs by id, or None if Slurm does not answer.
    """
    state, has_ended = group_state(group, jobs)
    rows: list[tuple[str, ...]] = [("trial", *_COLUMNS)]
    for index, name in enumerate(group.names):
        cells = _make_cells(Run(group.trial_dir(index)), jobs)
        if group.status(index) == GONE:
            cells = (GONE, *cells[1:])
        elif cells[0].startswith("never started") and not has_ended:
            cells = ("waiting for other trials", *cells[1:])
        rows.append((name, *cells))
    return [f"{group.kind:<8} {display_path(group.folder)}", f"state    {state}", "", *align_columns(rows)]


def _find_write_time(entry: Run | RunGroup) -> float:
    """Return the Unix time of the last write to the summary (or else record) of a run or group, or its trials; or 0."""
    summaries = entry.folder.glob(f"{rundir.CELLS}/*/summary.json")
    trials = [path.stat().st_mtime for path in summaries]
    record = entry.record_file if isinstance(entry, RunGroup) else "run.json"
    for name in ("summary.json", record):
        with contextlib.suppress(OSError):
            return max((entry.folder / name).stat().st_mtime, *trials, 0.0)
    return 0.0  # removed after it was listed
