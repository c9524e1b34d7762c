"""The commands that show and stop runs, and folders of several runs: status, logs, stop."""

import argparse
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from grpo_recipes.cli import command, option, switch
from grpo_recipes.cli.jobs import Asking, BareJob, find_bare_job, without_runs
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.resolve import POINTERS
from grpo_recipes.paths import display_path, is_locked, newest_first, shell_path
from grpo_recipes.process.reports import aligned
from grpo_recipes.process.terminal import LOG, readable
from grpo_recipes.recipe.extensions import merged
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.runs import rundir
from grpo_recipes.runs.groups import COMPLETED, GONE, RunGroup, find_group, group_kinds, groups_in
from grpo_recipes.runs.health import find_notices
from grpo_recipes.runs.progress import current_activity, episodes_line, evaluation_line, run_position, seconds_since
from grpo_recipes.runs.rundir import Run
from grpo_recipes.secrets import masked
from grpo_recipes.slurm.client import NO_ANSWER, Job, cancel, find_job, my_jobs

RUN_HELP = "run directory, its name in RUN_ROOT, last for the newest there, or the id of a Slurm job"
_KINDS = [f"a {kind.kind}" for kind in group_kinds()]
GROUP_HELP = "".join([RUN_HELP, *(f"; or {kind} by its directory or name" for kind in _KINDS)])
_ANY = " or ".join(["a run", *_KINDS])
_OVER = ("completed", "failed", "stopped")
# Kinds of logs, and how the roles begin whose logs they are.
_LOGS = {
    "slurm": ("slurm.out", "slurm.err"), "server": ("server",), "trainer": ("trainer",), "launch": ("launch",),
    **{name.replace("-", "_"): (role,) for name, (role, _) in merged("logs").items()},
}  # fmt: skip
LOOK_SECONDS = 1.0  # between two looks at the files
_MOST_BYTES = 1 << 20  # of one file at a time


def named(which: str) -> Run | RunGroup | BareJob:
    """Return the run, the folder of runs or the job without a run directory that the user means."""
    if group := find_group(run_root(os.environ), which):
        return group
    try:
        return named_run(which)
    except ConfigError:
        if _is_job_id(which) and (job := find_bare_job(which)):
            return job
        raise


def _is_job_id(which: str) -> bool:
    return re.fullmatch(r"\d+(_\d+)?", which) is not None


def named_run(which: str) -> Run:
    """Return the run a person means by a folder, a name, a job id or ``last``."""
    fix = "name a run directory, a run in RUN_ROOT, the id of its job, or last"
    name = str(_folder_of_job(which)) if _is_job_id(which) else which
    return rundir.find_run(run_root(os.environ), name, which, fix)


def _folder_of_job(job_id: str) -> Path:
    """Find a run by the pointer its launcher or its submission left, else by where its batch script is."""
    pointers = [path for path in (run_root(os.environ) / POINTERS).glob(f"*-{job_id}") if path.is_file()]
    for pointer in newest_first(pointers):
        folder = Path(pointer.read_text().strip())
        if os.path.isfile(folder / "run.json"):
            return folder
    tasks = sorted(path.name.rpartition("-")[2] for path in (run_root(os.environ) / POINTERS).glob(f"*-{job_id}_*"))
    if tasks:
        fix = f"name one of them, e.g. {tasks[0]}; scancel {job_id} ends them all"
        raise config_error(job_id, f"is an array job of {len(tasks)} runs", fix)
    job = find_job(job_id)
    if job and job.script and os.path.isfile(job.script.parent / "run.json"):
        return job.script.parent
    raise config_error(job_id, "is not the job of a run known here", "name the run directory, or set RUN_ROOT")


def _state(run: Run, job: Job | None) -> tuple[str, bool]:
    """Return the run's state in a few words, and whether it has ended and nothing will start it again."""
    status = str(run.summary.get("status", "unknown"))
    status = SUBMITTED if status in _OVER and run.is_beginning() else status
    # A Slurm that does not answer can't tell whether an unfinished run waits or runs; a finished one stays finished.
    active = job is not None and job.active and not (job.state == NO_ANSWER and status in _OVER)
    over = not active and (status in _OVER or not run.is_running())
    if job is not None and job.waits:
        return f"waiting in the queue{f' ({job.reason})' if job.reason else ''}", over
    if status in _OVER:
        return status, over
    if job is not None and job.state == NO_ANSWER:
        return f"{status}, but Slurm does not answer", over
    if over:
        end = f", its job is {job.state}" if job is not None else ""
        return f"never started{end}" if status == SUBMITTED else f"lost: its launcher is gone{end}", over
    return "starting" if status == SUBMITTED else status, over


@command(
    f"show the state of {_ANY}, or list all of them",
    option("which", nargs="?", metavar="RUN", help=f"{GROUP_HELP}; without it a table of all in RUN_ROOT"),
)
def status(options: argparse.Namespace) -> int:
    """Print the state of a run or a folder of runs, or a table of those in RUN_ROOT, first the one written last."""
    if options.which is None:
        _print_runs()
        return 0
    run = named(options.which)
    if not isinstance(run, Run):
        lines = run.lines() if isinstance(run, BareJob) else group_lines(run, jobs_of(run))
        print(*lines, sep="\n")
        return 0
    job = jobs_of(run)
    state, over = _state(run, job)
    step, reward, left = run_position(run.rows, over)
    ends = f", at most until {job.ends}" if job and job.ends and not job.waits and job.active else ""
    doing, since = current_activity(run.folder) if run.is_running() else ("", 0.0)
    evaluations = rundir.read_rows(run.folder / "eval.jsonl", lenient=True)
    facts = [
        ("run", display_path(run.folder)),
        ("state", state),
        ("cause", run.cause),
        ("job", run.job_id and f"{run.job_id} {job or 'is no longer known to Slurm'}{ends}"),
        ("phase", doing and f"{doing} for {seconds_since(since)}"),
        ("step", step),
        ("reward", reward and f"{reward} (mean of the last steps)"),
        ("episodes", run.rows and episodes_line(run.rows[-1])),
        ("eval", evaluations and evaluation_line(evaluations[-1])),
        ("left", left and f"about {left} of training"),
        ("restarts", str(run.summary.get("restarts") or "")),
        *(("note", str(notice)) for notice in find_notices(run.rows, run.value, over=over)),
        *(("log", display_path(path)) for path in (run.folder / LOG, *run.logs.values()) if path.is_file()),
    ]
    print(*(f"{name:<8} {text}" for name, text in facts if text), sep="\n")
    return 0


_HEAD = ("state", "job", "step", "reward", "left")


def _print_runs() -> None:
    """Print a table of RUN_ROOT, first the run or folder whose summary was written last: a resume too."""
    root, jobs = run_root(os.environ), my_jobs()  # jobs are None if Slurm does not answer
    runs, groups = rundir.runs_in(root), groups_in(root)
    job_ids = set[str]()
    for run in runs:
        with contextlib.suppress(ConfigError):  # a damaged run directory, which the table shows
            job_ids.add(run.job_id)
    bare_jobs = without_runs((jobs or {}).values(), job_ids)
    rows: list[tuple[str, ...]] = [(f"({job.script})", job.state, job.job_id) for job in bare_jobs]
    entries: list[Run | RunGroup] = [*runs, *groups]
    for entry in sorted(entries, key=_written, reverse=True):
        if isinstance(entry, RunGroup):
            name = f"{entry.folder.parent.name}/{entry.folder.name}"
            rows.append((name, group_state(entry, jobs)[0], " ".join(map(str, entry.record["jobs"]))))
        else:
            rows.append((entry.folder.name, *_cells(entry, jobs)))
    if not rows:
        print(f"grpo: there is no run in {display_path(root)}")
        return
    rows.insert(0, ("run", *_HEAD))
    print(*aligned([(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]), sep="\n")


def _cells(run: Run, jobs: dict[str, Job] | None) -> tuple[str, ...]:
    """Return a run's cells below ``_HEAD``; ``jobs`` are None where Slurm does not answer."""
    try:
        job = (Job(run.job_id, NO_ANSWER) if run.job_id else None) if jobs is None else jobs.get(run.job_id)
        state, over = _state(run, job)
        return state, run.job_id, *run_position(run.rows, over)
    except ConfigError as error:
        return f"damaged: {Path(error.problems[0].where).name}", "", "", "", ""


def group_state(group: RunGroup, jobs: dict[str, Job] | None) -> tuple[str, bool]:
    """Return the state of a folder of runs with its completed trials, and whether it is over."""
    trials = [Run(group.trial_dir(index)) for index in range(len(group.names))]
    active = [
        run
        for run in trials
        if run.is_running() or (jobs is None and run.job_id and run.summary.get("status") not in _OVER)
    ]
    active += [run for run in trials if jobs and (job := jobs.get(run.job_id)) is not None and job.active]
    over = not active and not is_locked(group.folder / "lock")
    done = sum(group.status(index) == COMPLETED for index in range(len(trials)))
    state = "running" if not over else COMPLETED if group.is_over() else "stopped"
    return f"{state}, {done} of {group.wanted} trials completed", over


def group_lines(group: RunGroup, jobs: dict[str, Job] | None) -> list[str]:
    """Return the state of a folder of runs, with a line for each trial as in the table of runs."""
    state, over = group_state(group, jobs)
    rows: list[tuple[str, ...]] = [("trial", *_HEAD)]
    for index, name in enumerate(group.names):
        cells = _cells(Run(group.trial_dir(index)), jobs)
        if group.status(index) == GONE:
            cells = (GONE, *cells[1:])
        elif cells[0].startswith("never started") and not over:
            cells = ("waiting for its turn", *cells[1:])
        rows.append((name, *cells))
    return [f"{group.kind:<8} {display_path(group.folder)}", f"state    {state}", "", *aligned(rows)]


def _written(entry: Run | RunGroup) -> float:
    """Return when the summary of a run, or of a trial, was written last; else when the folder was made."""
    summaries = entry.folder.glob(f"{rundir.CELLS}/*/summary.json")
    trials = [path.stat().st_mtime for path in summaries]
    record = entry.record_file if isinstance(entry, RunGroup) else "run.json"
    for name in ("summary.json", record):
        with contextlib.suppress(OSError):
            return max((entry.folder / name).stat().st_mtime, *trials, 0.0)
    return 0.0  # removed meanwhile


@command(
    "print the logs of a run; -f follows them until it ends",
    option("which", metavar="RUN", help=GROUP_HELP),
    switch("-f", "--follow", help="go on until the run ends"),
    option("-n", "--lines", type=int, default=50, help="lines of each log to begin with (50)"),
    switch("--launch", help="what the launcher printed, launch.log (default)"),
    switch("--slurm", help="the job's output"),
    switch("--server", help="the log of the vLLM server"),
    switch("--trainer", help="the log of the trainers"),
    *(switch(f"--{name}", help=text) for name, (_, text) in merged("logs").items()),
)
def logs(options: argparse.Namespace) -> int:
    """Print logs, and follow them with ``-f``; return 130 after Ctrl-C."""
    if options.lines < 0:
        raise config_error("--lines", f"is {options.lines}", "write 0 or more")
    found = named(options.which)
    kinds = [kind for kind in _LOGS if getattr(options, kind)]
    follower = Follower(kinds, options.lines)
    try:
        if options.follow:
            if not isinstance(found := wait_for_run(found, follower), BareJob):
                _follow(found, follower)
        elif not [run for run in runs_of(found) if follower.look(run, instead=True)]:
            names = " or ".join(kinds or ["launch"]).replace("_", "-")
            what = f"{display_path(found.folder)} has no log of {names} yet"
            raise config_error(options.which, what, "grpo status shows its state; -f waits for it")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def runs_of(found: Run | RunGroup | BareJob) -> list[Run | BareJob]:
    """Return a run or a job, or the trials that run; if none does, the trial whose log was written last."""
    if isinstance(found, BareJob):
        return [found]
    if isinstance(found, Run):
        return [Run(found.folder)]
    trials = [Run(found.trial_dir(index)) for index in range(len(found.names))]
    last = newest_first(run.folder / LOG for run in trials)[:1]
    return [run for run in trials if run.is_running()] or [Run(path.parent) for path in last]


class Follower:
    """Print what is new in the logs of runs, beginning with the last lines; a new attempt's logs join in."""

    def __init__(self, kinds: Iterable[str], lines: int):
        self._roles = [role for kind in kinds for role in _LOGS[kind]]
        self._lines = lines
        self._offsets: dict[Path, int] = {}
        self._shown: Path | None = None

    def look(self, run: Run | BareJob, instead: bool = False) -> bool:
        """Print what is new; return whether there is any log at all.

        Without kinds of logs it is ``launch.log``, or ``instead`` the job's or the trainers', of a run that has none.
        """
        found = {**run.logs, **({"launch": run.folder / LOG} if (run.folder / LOG).is_file() else {})}
        others = [*(_LOGS["slurm"] if run.job_id else _LOGS["trainer"])] if instead and "launch" not in found else []
        wanted = tuple(self._roles or ["launch", *others])
        paths = [path for role, path in found.items() if str(role).startswith(wanted)]
        for path in paths:
            size, known = path.stat().st_size, self._offsets.get(path)
            start = max(0, size - _MOST_BYTES) if known is None else min(known, size)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_BYTES)
            # Whole lines alone: masking would miss a secret cut in two. One that is too long is shown all the same,
            # and so is one that a process did not end before its death.
            whole = content.rfind(b"\n") + 1
            content = content[:whole] if run.is_running() and (whole or len(content) < _MOST_BYTES) else content
            self._offsets[path] = start + len(content)
            content = content[content.find(b"\n") + 1 :] if start and known is None else content
            lines = readable(masked(content.decode(errors="replace"))).splitlines(keepends=True)
            if known is None:
                lines = lines[max(0, len(lines) - self._lines) :]
            if lines and path != self._shown:
                print(f"==> {display_path(path)} <==")
                self._shown = path
            print("".join(lines), end="", flush=True)
        return bool(paths)


def wait_for_run(which: Run | RunGroup | BareJob, follower: Follower | None = None) -> Run | RunGroup | BareJob:
    """Return the run of a job that has none yet, once it exists; return the job if it ends before.

    Print its state when it changes, and meanwhile what is new in its logs.
    """
    if not isinstance(which, BareJob):
        return which
    job_id, state, slurm = which.job_id, "", Asking(lambda: named(which.job_id))
    while True:
        found = slurm.answer()
        if not isinstance(found, BareJob):
            return found
        if found.state != state:
            state = found.state
            print(f"grpo: job {job_id}: {state}", flush=True)
        if follower is not None:
            follower.look(found, instead=True)
        if found.over:
            print(*([f"grpo: job {job_id}: {found.cause}"] if found.cause else []), sep="\n", flush=True)
            return found
        slurm.need_answer(job_id, found.job is not None and found.job.state == NO_ANSWER)
        time.sleep(LOOK_SECONDS)


def _follow(found: Run | RunGroup, follower: Follower) -> None:
    """Print what is new until the run or the folder of runs is over, the last lines included."""
    said, slurm, seen = "", Asking(lambda: jobs_of(found)), dict[Path, None]()
    while True:
        seen |= {run.folder: None for run in runs_of(found)}
        state, over = state_of(found, slurm.answer())
        if state != said and ("waiting" in state or state == "starting"):
            print(f"grpo: {state}", flush=True)
        said = state
        for folder in list(seen):
            follower.look(Run(folder), instead=over)
            if isinstance(found, RunGroup) and not Run(folder).is_running():
                follower.look(Run(folder))
                del seen[folder]
        if over:
            print(f"grpo: {display_path(found.folder)} is over: {said}")
            return
        slurm.need_answer(display_path(found.folder), is_silent(found, slurm.answer()))
        time.sleep(LOOK_SECONDS)


def is_silent(found: Run | RunGroup, jobs: Any) -> bool:
    """Return whether Slurm does not answer and no process of the run or the folder of runs is seen here."""
    if isinstance(found, RunGroup):
        return jobs is None and not any(run.is_running() for run in runs_of(found))
    return jobs is not None and jobs.state == NO_ANSWER and not Run(found.folder).is_running()


def jobs_of(found: Run | RunGroup) -> Any:
    """Return the job of a run, or all jobs of the user if the trials of a folder are jobs, as Slurm sees them now."""
    if isinstance(found, RunGroup):
        return my_jobs() if found.record["jobs"] else {}
    run = Run(found.folder)
    return find_job(run.job_id) if run.job_id else None


def state_of(found: Run | RunGroup, jobs: Any) -> tuple[str, bool]:
    """Return the state of a run or a folder of runs, given the answer of ``jobs_of``, and whether it is over."""
    return group_state(found, jobs) if isinstance(found, RunGroup) else _state(Run(found.folder), jobs)


@command(
    f"have {_ANY} save and end; --now ends it at once",
    option("which", metavar="RUN", help=GROUP_HELP),
    switch("--now", help="end it without waiting for the step in flight"),
)
def stop(options: argparse.Namespace) -> int:
    """Ask a run, or the trials of a folder, to save and end; take a job that waits out of the queue."""
    found = named(options.which)
    if isinstance(found, BareJob):
        _stop_job(found)
        return 0
    state, over = state_of(found, jobs_of(found))
    if over:
        again = found.again() if isinstance(found, RunGroup) else f"grpo launch --resume {shell_path(found.folder)}"
        fix = f"see {display_path(found.folder)}" if state.startswith(COMPLETED) else f"it goes on with: {again}"
        raise config_error(options.which, f"{display_path(found.folder)} has already ended ({state})", fix)
    if isinstance(found, Run):
        _stop_run(found, options.now)
        return 0
    rundir.stop_file(found.folder).touch()  # also read by the command that starts the trials
    if is_locked(found.folder / "lock"):
        print("grpo: stop requested: the running trial saves and ends, no other starts (--now ends it at once)")
    for run in (Run(found.trial_dir(index)) for index in range(len(found.names))):
        if (options.now or not is_locked(found.folder / "lock")) and not state_of(run, jobs_of(run))[1]:
            _stop_run(run, options.now)
    return 0


def _stop_job(job: BareJob) -> None:
    """Cancel a job that has no run directory."""
    if job.over:
        fix = f"see {display_path(next(reversed(job.logs.values())))}" if job.logs else f"see sacct -j {job.job_id}"
        raise config_error(job.job_id, f"the job has already ended ({job.state})", fix)
    cancel(job.job_id)
    waited = job.job is not None and job.job.waits
    end = "is out of the queue" if waited else "is cancelled; it had no run directory yet"
    print(f"grpo: job {job.job_id} {end}")


def _stop_run(found: Run, now: bool) -> None:
    job = jobs_of(found)
    (found.folder / rundir.NO_REQUEUE).touch()
    if job is not None and (job.waits or found.summary.get("status") != "running"):
        cancel(job.id)  # nothing of it runs: there is nothing to save, and nobody who would see a request
        rundir.finish_summary(found.folder, status="stopped", cause="taken out of the queue by grpo stop")
        print(f"grpo: job {job.id} is out of the queue; the run directory stays: {display_path(found.folder)}")
    elif now and job is not None:
        cancel(job.id)
        print(f"grpo: job {job.id} is cancelled; it saves if Slurm leaves it the time")
    elif now:
        host, pid = rundir.launcher_of(found.folder)
        if host != socket.gethostname():
            raise config_error("--now", f"the launcher runs on {host}, this is {socket.gethostname()}", "do it there")
        asked = "is gone: its process guards end the rest"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            asked = "was asked to end at once"
            time.sleep(1.2)  # within a second two count as one; the second is final
            os.kill(pid, signal.SIGTERM)
        print(f"grpo: its launcher (pid {pid}) {asked}")
    else:
        rundir.stop_file(found.folder).touch()
        print("grpo: stop requested: the run saves after the step in flight and ends (--now ends it at once)")
