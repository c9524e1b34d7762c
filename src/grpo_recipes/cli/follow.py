"""The commands that look at runs and sweeps, and end them: status, logs, watch, stop."""

import argparse
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from grpo_recipes.cli import command, option, switch
from grpo_recipes.cli.jobs import Asking, BareJob, find_bare_job, without_runs
from grpo_recipes.console.sweep.folder import COMPLETED, FOLDER, GONE, RECORD, Sweep, read_sweep, sweeps_in
from grpo_recipes.console.watch import Picture, coloured
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.resolve import POINTERS
from grpo_recipes.paths import as_argument, is_locked, newest_first, shown
from grpo_recipes.process.reports import aligned
from grpo_recipes.process.terminal import LOG, columns, readable
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.runs import rundir
from grpo_recipes.runs.health import notices_of
from grpo_recipes.runs.progress import Progress, activity, episodes_line, evaluation_line, seconds_since, standing
from grpo_recipes.runs.rundir import Run
from grpo_recipes.secrets import masked
from grpo_recipes.slurm.client import NO_ANSWER, Job, cancel, find_job, my_jobs

RUN_HELP = "run directory, its name in RUN_ROOT, last for the newest there, or the id of a Slurm job"
_EITHER_HELP = f"{RUN_HELP}; or a sweep by its directory or name"
_OVER = ("completed", "failed", "stopped")
# Kinds of logs, and how the roles begin whose logs they are.
_LOGS = {
    "slurm": ("slurm.out", "slurm.err"), "server": ("server",), "trainer": ("trainer",), "launch": ("launch",),
    "run_api": ("run-api",), "environments": ("environment-",),
}  # fmt: skip
_SECONDS = 1.0  # between two looks at the files
_MOST_BYTES = 1 << 20  # of one file at a time


def named(which: str) -> Run | Sweep | BareJob:
    """Return the run, the sweep or the job without a run directory that the user means."""
    for folder in (Path(which), run_root(os.environ) / FOLDER / which):
        if which and os.path.isfile(folder / RECORD):
            return read_sweep(folder)
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
    "show the state of a run or a sweep, or list all of them",
    option("which", nargs="?", metavar="RUN", help=f"{_EITHER_HELP}; without it a table of all in RUN_ROOT"),
)
def status(options: argparse.Namespace) -> int:
    """Print the state of a run or a sweep, or a table of those in RUN_ROOT, first the one written last."""
    if options.which is None:
        _print_runs()
        return 0
    run = named(options.which)
    if not isinstance(run, Run):
        lines = run.lines() if isinstance(run, BareJob) else sweep_lines(run, _jobs_of(run))
        print(*lines, sep="\n")
        return 0
    job = _jobs_of(run)
    state, over = _state(run, job)
    step, reward, left = standing(run.rows, over)
    ends = f", at most until {job.ends}" if job and job.ends and not job.waits and job.active else ""
    doing, since = activity(run.folder) if run.is_running() else ("", 0.0)
    evaluations = rundir.read_rows(run.folder / "eval.jsonl", lenient=True)
    facts = [
        ("run", shown(run.folder)),
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
        *(("note", str(notice)) for notice in notices_of(run.rows, run.value, over=over)),
        *(("log", shown(path)) for path in (run.folder / LOG, *run.logs.values()) if path.is_file()),
    ]
    print(*(f"{name:<8} {text}" for name, text in facts if text), sep="\n")
    return 0


_HEAD = ("state", "job", "step", "reward", "left")


def _print_runs() -> None:
    """Print a table of runs and sweeps in RUN_ROOT, first the one whose summary was written last: a resume too."""
    root, jobs = run_root(os.environ), my_jobs()  # jobs are None if Slurm does not answer
    runs, sweeps = rundir.runs_in(root), sweeps_in(root / FOLDER)
    job_ids = set[str]()
    for run in runs:
        with contextlib.suppress(ConfigError):  # a damaged run directory, which the table shows
            job_ids.add(run.job_id)
    bare_jobs = without_runs((jobs or {}).values(), job_ids)
    rows: list[tuple[str, ...]] = [(f"({job.script})", job.state, job.job_id) for job in bare_jobs]
    entries: list[Run | Sweep] = [*runs, *sweeps]
    for entry in sorted(entries, key=_written, reverse=True):
        if isinstance(entry, Sweep):
            name = f"{entry.folder.parent.name}/{entry.folder.name}"
            rows.append((name, sweep_state(entry, jobs)[0], " ".join(map(str, entry.record["jobs"]))))
        else:
            rows.append((entry.folder.name, *_cells(entry, jobs)))
    if not rows:
        print(f"grpo: there is no run in {shown(root)}")
        return
    rows.insert(0, ("run", *_HEAD))
    print(*aligned([(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]), sep="\n")


def _cells(run: Run, jobs: dict[str, Job] | None) -> tuple[str, ...]:
    """Return a run's cells below ``_HEAD``; ``jobs`` are None where Slurm does not answer."""
    try:
        job = (Job(run.job_id, NO_ANSWER) if run.job_id else None) if jobs is None else jobs.get(run.job_id)
        state, over = _state(run, job)
        return state, run.job_id, *standing(run.rows, over)
    except ConfigError as error:
        return f"damaged: {Path(error.problems[0].where).name}", "", "", "", ""


def sweep_state(sweep: Sweep, jobs: dict[str, Job] | None) -> tuple[str, bool]:
    """Return the state of a sweep with its completed trials, and whether it is over."""
    trials = [Run(sweep.trial_dir(index)) for index in range(len(sweep.names))]
    active = [
        run
        for run in trials
        if run.is_running() or (jobs is None and run.job_id and run.summary.get("status") not in _OVER)
    ]
    active += [run for run in trials if jobs and (job := jobs.get(run.job_id)) is not None and job.active]
    over = not active and not is_locked(sweep.folder / "lock")
    done = sum(sweep.status(index) == COMPLETED for index in range(len(trials)))
    state = "running" if not over else COMPLETED if sweep.is_over() else "stopped"
    return f"{state}, {done} of {sweep.wanted} trials completed", over


def sweep_lines(sweep: Sweep, jobs: dict[str, Job] | None) -> list[str]:
    """Return what there is to know of a sweep now: a line for each trial, as for a run in the table of runs."""
    state, over = sweep_state(sweep, jobs)
    rows: list[tuple[str, ...]] = [("trial", *_HEAD)]
    for index, name in enumerate(sweep.names):
        cells = _cells(Run(sweep.trial_dir(index)), jobs)
        if sweep.status(index) == GONE:
            cells = (GONE, *cells[1:])
        elif cells[0].startswith("never started") and not over:
            cells = ("waiting for its turn", *cells[1:])
        rows.append((name, *cells))
    return [f"sweep    {shown(sweep.folder)}", f"state    {state}", "", *aligned(rows)]


def _written(one: Run | Sweep) -> float:
    """Return when the summary of a run, or of a sweep's trial, was written last; else when it was made."""
    trials = [path.stat().st_mtime for path in one.folder.glob("cells/*/summary.json")]
    for name in ("summary.json", "run.json", RECORD):
        with contextlib.suppress(OSError):
            return max((one.folder / name).stat().st_mtime, *trials, 0.0)
    return 0.0  # removed meanwhile


@command(
    "print the logs of a run; -f follows them until it ends",
    option("which", metavar="RUN", help=_EITHER_HELP),
    switch("-f", "--follow", help="go on until the run ends"),
    option("-n", "--lines", type=int, default=50, help="lines of each log to begin with (50)"),
    switch("--launch", help="what the launcher printed, launch.log (default)"),
    switch("--slurm", help="the job's output"),
    switch("--server", help="the log of the vLLM server"),
    switch("--trainer", help="the log of the trainers"),
    switch("--run-api", help="the log of Atropos' run-api"),
    switch("--environments", help="the logs of Atropos' environments"),
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
            if not isinstance(found := _wait_for_run(found, follower), BareJob):
                _follow(found, follower)
        elif not [run for run in runs_of(found) if follower.look(run, instead=True)]:
            names = " or ".join(kinds or ["launch"]).replace("_", "-")
            what = f"{shown(found.folder)} has no log of {names} yet"
            raise config_error(options.which, what, "grpo status shows its state; -f waits for it")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def runs_of(found: Run | Sweep | BareJob) -> list[Run | BareJob]:
    """Return a run or a job, or the trials of a sweep that run; if none does, the trial whose log was written last."""
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
                print(f"==> {shown(path)} <==")
                self._shown = path
            print("".join(lines), end="", flush=True)
        return bool(paths)


def _wait_for_run(which: Run | Sweep | BareJob, follower: Follower | None = None) -> Run | Sweep | BareJob:
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
        time.sleep(_SECONDS)


def _follow(found: Run | Sweep, follower: Follower) -> None:
    """Print what is new until the run or sweep is over, the last lines included."""
    said, slurm, seen = "", Asking(lambda: _jobs_of(found)), dict[Path, None]()
    while True:
        seen |= {run.folder: None for run in runs_of(found)}
        state, over = _look_at(found, slurm.answer())
        if state != said and ("waiting" in state or state == "starting"):
            print(f"grpo: {state}", flush=True)
        said = state
        for folder in list(seen):
            follower.look(Run(folder), instead=over)
            if isinstance(found, Sweep) and not Run(folder).is_running():
                follower.look(Run(folder))
                del seen[folder]
        if over:
            print(f"grpo: {shown(found.folder)} is over: {said}")
            return
        slurm.need_answer(shown(found.folder), _is_silent(found, slurm.answer()))
        time.sleep(_SECONDS)


def _is_silent(found: Run | Sweep, jobs: Any) -> bool:
    """Return whether Slurm does not answer and no process of the run or sweep is seen here."""
    if isinstance(found, Sweep):
        return jobs is None and not any(run.is_running() for run in runs_of(found))
    return jobs is not None and jobs.state == NO_ANSWER and not Run(found.folder).is_running()


def _jobs_of(found: Run | Sweep) -> Any:
    """Return the job of a run, or all of the user's where the trials of a sweep are jobs, as Slurm sees them now."""
    if isinstance(found, Sweep):
        return my_jobs() if found.record["jobs"] else {}
    run = Run(found.folder)
    return find_job(run.job_id) if run.job_id else None


def _look_at(found: Run | Sweep, jobs: Any) -> tuple[str, bool]:
    """Return the state of a run or sweep as it is now, by what ``_jobs_of`` returned, and whether it is over."""
    return sweep_state(found, jobs) if isinstance(found, Sweep) else _state(Run(found.folder), jobs)


@command(
    "show the reward curve and the phases of a run while it goes on",
    option("which", metavar="RUN", help=_EITHER_HELP),
)
def watch(options: argparse.Namespace) -> int:
    """Draw a run until it ends; where stdout is no terminal, draw once and print a line for each step."""
    try:
        found = _wait_for_run(named(options.which))
        if isinstance(found, BareJob):
            return 0
        slurm = Asking(lambda: _jobs_of(found))

        def look() -> tuple[str, bool]:
            state, over = _look_at(found, slurm.answer())
            slurm.need_answer(shown(found.folder), not over and _is_silent(found, slurm.answer()))
            return state, over

        if isinstance(found, Sweep):
            _watch(lambda width: sweep_lines(found, slurm.answer()), look, lambda: [])
        else:
            picture, steps = Picture(found.folder), Progress(found.folder)
            _watch(lambda width: picture.lines(width, *look()), look, lambda: [*map(steps.line, steps.rows.new())])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _watch(
    draw: Callable[[int], list[str]], look: Callable[[], tuple[str, bool]], lines: Callable[[], list[str]]
) -> None:
    """Draw again and again until it is over; without a terminal at the beginning and the end."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    def frame() -> Group:
        texts = (Text(line, coloured(line), no_wrap=True, overflow="ellipsis") for line in draw(columns()))
        return Group(*texts)

    if not sys.stdout.isatty():
        print(*draw(columns()), sep="\n", flush=True)
        while not look()[1]:
            print("".join(f"{line}\n" for line in lines()), end="", flush=True)
            time.sleep(_SECONDS)
        print(*draw(columns()), sep="\n")
        return
    console = Console(width=columns(), highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        stack.callback(console.show_cursor)  # rich does not where a signal comes while it draws the first picture
        live = stack.enter_context(Live(frame(), console=console, auto_refresh=False))
        while not look()[1]:
            time.sleep(_SECONDS)
            live.update(frame(), refresh=True)
        live.update(frame(), refresh=True)


@command(
    "have a run or a sweep save and end; --now ends it at once",
    option("which", metavar="RUN", help=_EITHER_HELP),
    switch("--now", help="end it without waiting for the step in flight"),
)
def stop(options: argparse.Namespace) -> int:
    """Ask a run, or the trials of a sweep, to save and end; take a job that waits out of the queue."""
    found = named(options.which)
    if isinstance(found, BareJob):
        _stop_job(found)
        return 0
    state, over = _look_at(found, _jobs_of(found))
    if over:
        again = found.again() if isinstance(found, Sweep) else f"grpo launch --resume {as_argument(found.folder)}"
        fix = f"see {shown(found.folder)}" if state.startswith(COMPLETED) else f"it goes on with: {again}"
        raise config_error(options.which, f"{shown(found.folder)} has already ended ({state})", fix)
    if isinstance(found, Run):
        _stop_run(found, options.now)
        return 0
    rundir.stop_file(found.folder).touch()  # the trials that follow, and by `grpo sweep` itself the one that runs
    if is_locked(found.folder / "lock"):
        print("grpo: stop requested: the running trial saves and ends, no other starts (--now ends it at once)")
    for run in (Run(found.trial_dir(index)) for index in range(len(found.names))):
        if (options.now or not is_locked(found.folder / "lock")) and not _look_at(run, _jobs_of(run))[1]:
            _stop_run(run, options.now)
    return 0


def _stop_job(job: BareJob) -> None:
    """Cancel a job that has no run directory."""
    if job.over:
        fix = f"see {shown(next(reversed(job.logs.values())))}" if job.logs else f"see sacct -j {job.job_id}"
        raise config_error(job.job_id, f"the job has already ended ({job.state})", fix)
    cancel(job.job_id)
    waited = job.job is not None and job.job.waits
    end = "is out of the queue" if waited else "is cancelled; it had no run directory yet"
    print(f"grpo: job {job.job_id} {end}")


def _stop_run(found: Run, now: bool) -> None:
    job = _jobs_of(found)
    (found.folder / rundir.NO_REQUEUE).touch()
    if job is not None and (job.waits or found.summary.get("status") != "running"):
        cancel(job.id)  # nothing of it runs: there is nothing to save, and nobody who would see a request
        rundir.finish_summary(found.folder, status="stopped", cause="taken out of the queue by grpo stop")
        print(f"grpo: job {job.id} is out of the queue; the run directory stays: {shown(found.folder)}")
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
