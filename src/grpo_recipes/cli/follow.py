"""The commands `grpo status`, `grpo logs` and `grpo stop`, for runs, folders of several runs, and Slurm jobs.

``find_target`` turns the user's word (a folder, a name, a job id, ``last``) into a ``Run``, a ``RunGroup`` (for example
a sweep) or a ``BareJob``, a job without a run directory.
"""

import argparse
import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from grpo_recipes.cli import command, option, switch
from grpo_recipes.cli.jobs import BareJob, SlurmPoll, find_bare_job
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.resolve import POINTERS
from grpo_recipes.paths import display_path, is_locked, shell_path, sort_newest_first
from grpo_recipes.process.terminal import LOG, strip_control_codes
from grpo_recipes.recipe.extensions import merged
from grpo_recipes.recipe.keys import run_root
from grpo_recipes.runs import rundir
from grpo_recipes.runs.groups import COMPLETED, RunGroup, find_group, group_kinds
from grpo_recipes.runs.rundir import Run
from grpo_recipes.secrets import mask_secrets
from grpo_recipes.slurm.client import NO_ANSWER, Job, cancel_job, find_job, list_my_jobs

RUN_HELP = "Run directory, name of a run in RUN_ROOT, last for the newest run, or id of a Slurm job"
_KINDS = [f"a {kind.kind}" for kind in group_kinds()]
GROUP_HELP = "".join([RUN_HELP, *(f"; or directory or name of {kind}" for kind in _KINDS)])
RUN_OR_GROUP = " or ".join(["a run", *_KINDS])
ENDED = ("completed", "failed", "stopped")
# Kinds of logs, and prefixes of their roles.
_LOGS = {
    "slurm": ("slurm.out", "slurm.err"), "server": ("server",), "trainer": ("trainer",), "launch": ("launch",),
    **{name.replace("-", "_"): (role,) for name, (role, _) in merged("logs").items()},
}  # fmt: skip
POLL_SECONDS = 1.0  # between two reads of the files
_MOST_BYTES = 1 << 20  # read from one file at a time

Target: TypeAlias = Run | RunGroup | BareJob
Jobs: TypeAlias = dict[str, Job] | None  # by id; None if Slurm does not answer about a group; see find_jobs


def find_target(name: str) -> Target:
    """Find a run, a folder of runs, or a job without a run directory by the user's name for it.

    Raise ConfigError if nothing has this name.
    """
    if group := find_group(run_root(os.environ), name):
        return group
    try:
        return find_run(name)
    except ConfigError:
        if _is_job_id(name) and (job := find_bare_job(name)):
            return job
        raise


def _is_job_id(name: str) -> bool:
    return re.fullmatch(r"\d+(_\d+)?", name) is not None


def find_run(name: str) -> Run:
    """Find a run by its folder, the folder's name in RUN_ROOT, its job id or ``last``, or raise ConfigError."""
    fix = "give a run directory, a run in RUN_ROOT, the id of its job, or last"
    runs = rundir.list_runs(run_root(os.environ))  # the newest first
    if newest := next((run for run in runs if run.folder.name.startswith(f"{name}-")), None):
        fix = f"write {newest.folder.name}, the newest run with this run_name"
    folder = str(_find_folder_of_job(name)) if _is_job_id(name) else name
    return rundir.find_run(run_root(os.environ), folder, name, fix)


def _find_folder_of_job(job_id: str) -> Path:
    """Find the run directory of a job: the path in a pointer file in run_root, or the folder of its batch script.

    Raise ConfigError if no run of the job is found, or if the job is an array of several runs.
    """
    pointers = [path for path in (run_root(os.environ) / POINTERS).glob(f"*-{job_id}") if path.is_file()]
    for pointer in sort_newest_first(pointers):
        folder = Path(pointer.read_text().strip())
        if os.path.isfile(folder / "run.json"):
            return folder
    tasks = sorted(path.name.rpartition("-")[2] for path in (run_root(os.environ) / POINTERS).glob(f"*-{job_id}_*"))
    if tasks:
        fix = f"give the id of one run, e.g. {tasks[0]}, or stop all runs with scancel {job_id}"
        raise config_error(job_id, f"is an array job of {len(tasks)} runs", fix)
    job = find_job(job_id)
    if job and job.script and os.path.isfile(job.script.parent / "run.json"):
        return job.script.parent
    problem = "no run of this job found"
    raise config_error(job_id, problem, "give the run directory, or set RUN_ROOT to the folder of the run")


def describe_state(run: Run, job: Job | None) -> tuple[str, bool]:
    """Describe the state of a run in words, and return whether it has ended and will not be started again.

    ``job`` is the run's job in Slurm, or None if it has none or Slurm has forgotten it.
    """
    status = str(run.summary.get("status", "unknown"))
    status = SUBMITTED if status in ENDED and run.is_starting() else status
    # Without an answer from Slurm, an unfinished run may still wait or run. A finished run stays finished.
    active = job is not None and job.active and not (job.state == NO_ANSWER and status in ENDED)
    has_ended = not active and (status in ENDED or not run.is_running())
    if job is not None and job.waits:
        return f"waiting in the queue{f' ({job.reason})' if job.reason else ''}", has_ended
    if status in ENDED:
        return status, has_ended
    if job is not None and job.state == NO_ANSWER:
        return f"{status}, but Slurm does not answer", has_ended
    if has_ended:
        job_state = f", its job is {job.state}" if job is not None else ""
        state = "never started" if status == SUBMITTED else "lost: its launcher is gone"
        return f"{state}{job_state}", has_ended
    return "starting" if status == SUBMITTED else status, has_ended


def group_state(group: RunGroup, jobs: dict[str, Job] | None) -> tuple[str, bool]:
    """Describe the state of a folder of runs in words, and return whether it has ended.

    ``jobs`` are the user's Slurm jobs by id, or None if Slurm does not answer.
    """
    trials = [Run(group.trial_dir(index)) for index in range(len(group.names))]
    active = [
        run
        for run in trials
        if run.is_running() or (jobs is None and run.job_id and run.summary.get("status") not in ENDED)
    ]
    active += [run for run in trials if jobs and (job := jobs.get(run.job_id)) is not None and job.active]
    has_ended = not active and not is_locked(group.folder / "lock")
    completed = sum(group.status(index) == COMPLETED for index in range(len(trials)))
    state = "running" if not has_ended else COMPLETED if group.is_over() else "stopped"
    return f"{state}, {completed} of {group.trial_count} trials completed", has_ended


@command(
    "Print the logs of a run",
    option("which", metavar="RUN", help=GROUP_HELP),
    switch("-f", "--follow", help="Print new lines until the run ends"),
    option("-n", "--lines", type=int, default=50, help="Last lines to print of each log (default 50)"),
    switch("--launch", help="Print the launcher's log, launch.log (default)"),
    switch("--slurm", help="Print the output of the Slurm job"),
    switch("--server", help="Print the log of the vLLM server"),
    switch("--trainer", help="Print the log of the trainers"),
    *(switch(f"--{name}", help=text) for name, (_, text) in merged("logs").items()),
)
def logs(options: argparse.Namespace) -> int:
    """Print logs, or with ``-f`` follow them; return 0, or 130 after Ctrl-C. No log without ``-f``: ConfigError."""
    if options.lines < 0:
        raise config_error("--lines", f"expected 0 or more, got {options.lines}", "use --lines 50")
    target = find_target(options.which)
    kinds = [kind for kind in _LOGS if getattr(options, kind)]
    follower = LogFollower(kinds, options.lines)
    try:
        if options.follow:
            if not isinstance(target := wait_for_run(target, follower), BareJob):
                _follow(target, follower)
        elif not [run for run in active_runs(target) if follower.print_new(run, fall_back=True)]:
            names = " or ".join(kinds or ["launch"]).replace("_", "-")
            problem = f"{display_path(target.folder)} has no {names} log yet"
            raise config_error(options.which, problem, "wait for it with -f, or see its state with grpo status")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def active_runs(target: Target) -> list[Run | BareJob]:
    """Return the runs whose logs are of interest: the run or job itself, or the running trials of a group.

    If no trial of the group runs, return the trial with the newest log, or an empty list if there is no log.
    """
    if isinstance(target, BareJob):
        return [target]
    if isinstance(target, Run):
        return [Run(target.folder)]
    trials = [Run(target.trial_dir(index)) for index in range(len(target.names))]
    newest_log = sort_newest_first(run.folder / LOG for run in trials)[:1]
    return [run for run in trials if run.is_running()] or [Run(path.parent) for path in newest_log]


class LogFollower:
    """Print the last ``lines`` and then the new lines in the logs of runs, also of later attempts (see ``_LOGS``)."""

    def __init__(self, kinds: Iterable[str], lines: int):
        self._roles = [role for kind in kinds for role in _LOGS[kind]]
        self._lines = lines
        self._offsets: dict[Path, int] = {}
        self._last_path: Path | None = None

    def print_new(self, run: Run | BareJob, fall_back: bool = False) -> bool:
        """Print the new lines of a run's logs, at first only the last lines; return whether any log exists.

        If no kind of log was requested, print ``launch.log``. With ``fall_back``, a run without ``launch.log`` uses the
        log of its job or, outside Slurm, of its trainers.
        """
        logs = {**run.logs, **({"launch": run.folder / LOG} if (run.folder / LOG).is_file() else {})}
        fallback = [*(_LOGS["slurm"] if run.job_id else _LOGS["trainer"])] if fall_back and "launch" not in logs else []
        roles = tuple(self._roles or ["launch", *fallback])
        paths = [path for role, path in logs.items() if str(role).startswith(roles)]
        for path in paths:
            size, offset = path.stat().st_size, self._offsets.get(path)
            start = max(0, size - _MOST_BYTES) if offset is None else min(offset, size)
            with path.open("rb") as file:
                file.seek(start)
                content = file.read(_MOST_BYTES)
            # Print complete lines, because masking would miss a secret in two parts. Exceptions are very long lines and
            # the last line of a dead process.
            end = content.rfind(b"\n") + 1
            content = content[:end] if run.is_running() and (end or len(content) < _MOST_BYTES) else content
            self._offsets[path] = start + len(content)
            content = content[content.find(b"\n") + 1 :] if start and offset is None else content
            lines = strip_control_codes(mask_secrets(content.decode(errors="replace"))).splitlines(keepends=True)
            if offset is None:
                lines = lines[max(0, len(lines) - self._lines) :]
            if lines and path != self._last_path:
                print(f"==> {display_path(path)} <==")
                self._last_path = path
            print("".join(lines), end="", flush=True)
        return bool(paths)


def wait_for_run(target: Target, follower: LogFollower | None = None) -> Target:
    """Wait until a job has a run directory and return the run; return the job if it ends before that.

    Return other targets at once. While waiting, print each change of the job's state and, with a ``follower``, the new
    lines of its logs. Raise ConfigError if Slurm does not answer for ``SILENCE_SECONDS``.
    """
    if not isinstance(target, BareJob):
        return target
    job_id, last_state = target.job_id, ""
    poll = SlurmPoll(lambda: find_target(job_id))
    while True:
        target = poll.answer()
        if not isinstance(target, BareJob):
            return target
        if target.state != last_state:
            last_state = target.state
            print(f"grpo: job {job_id}: {last_state}", flush=True)
        if follower is not None:
            follower.print_new(target, fall_back=True)
        if not target.is_running():
            print(*([f"grpo: job {job_id}: {target.cause}"] if target.cause else []), sep="\n", flush=True)
            return target
        poll.need_answer(job_id, target.job is not None and target.job.state == NO_ANSWER)
        time.sleep(POLL_SECONDS)


def _follow(target: Run | RunGroup, follower: LogFollower) -> None:
    """Print new lines until the run or group has ended; raise ConfigError if Slurm is silent for too long."""
    last_state, folders = "", dict[Path, None]()
    poll = SlurmPoll(lambda: find_jobs(target))
    while True:
        folders |= {run.folder: None for run in active_runs(target)}
        state, has_ended = target_state(target, poll.answer())
        if state != last_state and ("waiting" in state or state == "starting"):
            print(f"grpo: {state}", flush=True)
        last_state = state
        for folder in list(folders):
            follower.print_new(Run(folder), fall_back=has_ended)
            if isinstance(target, RunGroup) and not Run(folder).is_running():
                follower.print_new(Run(folder))
                del folders[folder]
        if has_ended:
            print(f"grpo: {display_path(target.folder)} has ended: {state}")
            return
        poll.need_answer(display_path(target.folder), is_silent(target, poll.answer()))
        time.sleep(POLL_SECONDS)


def is_silent(target: Run | RunGroup, jobs: Jobs) -> bool:
    """Return whether the state of a run or group is unknown because Slurm does not answer.

    This is false if a process of the run or group runs on this machine. ``jobs`` is the result of ``find_jobs``.
    """
    if isinstance(target, RunGroup):
        return jobs is None and not any(run.is_running() for run in active_runs(target))
    has_no_answer = any(job.state == NO_ANSWER for job in (jobs or {}).values())
    return has_no_answer and not Run(target.folder).is_running()


def find_jobs(target: Run | RunGroup) -> Jobs:
    """Query Slurm for the job of a run, or for all jobs of the user if the trials of a group are jobs.

    The result is empty without a job. For a group, it is None if Slurm does not answer.
    """
    if isinstance(target, RunGroup):
        return list_my_jobs() if target.record["jobs"] else {}
    job = find_run_job(target)
    return {job.id: job} if job else {}


def find_run_job(run: Run) -> Job | None:
    job_id = Run(run.folder).job_id  # read again: a resumed run may have another job
    return find_job(job_id) if job_id else None


def target_state(target: Run | RunGroup, jobs: Jobs) -> tuple[str, bool]:
    """Describe the state of a run or a group, given the result of ``find_jobs``, and return whether it has ended."""
    if isinstance(target, RunGroup):
        return group_state(target, jobs)
    return describe_state(Run(target.folder), next(iter((jobs or {}).values()), None))


@command(
    f"Save and stop {RUN_OR_GROUP}",
    option("which", metavar="RUN", help=GROUP_HELP),
    switch("--now", help="Stop at once, without waiting for the current step"),
)
def stop(options: argparse.Namespace) -> int:
    """Request that a run, or all trials of a group, save and end; remove a waiting job from the queue. Return 0.

    Raise ConfigError if the target has already ended.
    """
    target = find_target(options.which)
    if isinstance(target, BareJob):
        if not target.is_running():
            logs = list(target.logs.values())
            fix = f"see {display_path(logs[-1])}" if logs else f"see sacct -j {target.job_id}"
            raise config_error(target.job_id, f"the job has already ended ({target.state})", fix)
        cancel_job(target.job_id)
        waited = target.job is not None and target.job.waits
        result = "was removed from the queue" if waited else "was canceled; it had no run directory yet"
        print(f"grpo: job {target.job_id} {result}")
        return 0
    state, has_ended = target_state(target, find_jobs(target))
    if has_ended:
        resume = (
            target.resume_command()
            if isinstance(target, RunGroup)
            else f"grpo launch --resume {shell_path(target.folder)}"
        )
        fix = f"see {display_path(target.folder)}" if state.startswith(COMPLETED) else f"resume it with: {resume}"
        raise config_error(options.which, f"{display_path(target.folder)} has already ended ({state})", fix)
    if isinstance(target, Run):
        _stop_run(target, options.now)
        return 0
    rundir.stop_file(target.folder).touch()  # also read by the command that starts the trials
    if is_locked(target.folder / "lock"):
        print("grpo: stop requested: the running trial saves and ends, no other trial starts (--now stops at once)")
    for run in (Run(target.trial_dir(index)) for index in range(len(target.names))):
        if (options.now or not is_locked(target.folder / "lock")) and not describe_state(run, find_run_job(run))[1]:
            _stop_run(run, options.now)
    return 0


def _stop_run(run: Run, now: bool) -> None:
    """Request that a run saves and ends, and is not requeued; print the action.

    A waiting job, or the job of a run that has not started, is removed from the queue, and the run's summary gets
    the status "stopped". With ``now``, another job is canceled, or without a job the launcher gets SIGTERM twice.
    Raise ConfigError with ``now`` if the launcher runs on another machine without Slurm.
    """
    job = find_run_job(run)
    job = job if job is not None and job.active else None  # after its job, a run may continue outside Slurm
    (run.folder / rundir.NO_REQUEUE).touch()
    if job is not None and (job.waits or run.summary.get("status") != "running"):
        cancel_job(job.id)  # no process runs that could save or read a stop request
        rundir.finish_summary(run.folder, status="stopped", cause="removed from the queue by grpo stop")
        print(f"grpo: job {job.id} was removed from the queue; its run directory is kept: {display_path(run.folder)}")
    elif now and job is not None:
        cancel_job(job.id)
        print(f"grpo: job {job.id} was canceled; it saves if Slurm gives it enough time")
    elif now:
        host, pid = rundir.read_launcher(run.folder)
        if host != socket.gethostname():
            problem = f"the launcher runs on {host}, but this is {socket.gethostname()}"
            raise config_error("--now", problem, f"run the command on {host}")
        result = "is gone; its process guards stop the other processes"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            result = "was told to stop at once"
            time.sleep(1.2)  # the launcher counts signals within a second as one, and stops at the second one
            os.kill(pid, signal.SIGTERM)
        print(f"grpo: its launcher (pid {pid}) {result}")
    else:
        rundir.stop_file(run.folder).touch()
        print("grpo: stop requested: the run saves after the current step and ends (--now stops at once)")
