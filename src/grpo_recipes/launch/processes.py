"""The plan's processes as they run, which of them ended the run, and the process guard over each of them.

The guard (``main``) is between the launcher and a process: nothing of a run outlives it, or the launcher. Its arguments
are the run directory, the two scratch folders, the pid of the launcher (on another node that of the node worker), and
the process as JSON. It runs the command in a session of its own, adopts orphans, and when the command ends, or the
launcher dies, ends all that is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import EXIT_STOPPED, ConfigError
from grpo_recipes.launch.hooks import AllHooks
from grpo_recipes.paths import display_path, python_module
from grpo_recipes.plan.types import Process
from grpo_recipes.process import tree
from grpo_recipes.process.scratch import Scratch, SegmentRecorder
from grpo_recipes.process.terminal import readable, without_library_frames
from grpo_recipes.runs import rundir
from grpo_recipes.secrets import masked

_LAST_LINES = 30
_ERROR = r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): [^\n]+)"
# vLLM begins the lines of a process with its name. The API server reports the engine's death later.
_ENGINE_ERROR = re.compile(rf"^\((?:EngineCore|Worker)[^)\n]*\) (?:ERROR [^\n]*?\] )?{_ERROR}", re.MULTILINE)
_TRACEBACK_ERROR = re.compile(rf"Traceback \(most recent call last\):\n(?:.*\n)*?(?:\[[^\]\n]*\]:? ?)?{_ERROR}")
_MOST_LOG, _MOST_ERROR = 4_000_000, 300  # bytes of a log that are searched, characters of an error
_LOOK_SECONDS = 0.2  # between two looks at all processes
_PRINTED_SECONDS = 5.0  # within which a parent has printed how its ranks died
_NEWS_SECONDS = 8.0  # longer than a node needs to see what is gone: 2 s, 0.3 s and _PRINTED_SECONDS in ``Child.state``
_TICK_SECONDS = 0.05  # between two looks of a guard at its command
_SAVE_SECONDS = 25.0  # a little longer than the launcher waits after SIGTERM
_LAUNCHER_SECONDS = 1.0  # until it has asked the ranks to save
_END_SECONDS = 3.0  # between SIGTERM and SIGKILL
_GUARD_SECONDS = 15.0  # a process guard whose command is gone ends the rest within its own grace


@dataclass(frozen=True)
class Ending:
    """How a run, or one of its processes, ended."""

    code: int
    cause: str = ""  # one line: who and why; empty after success
    failed_rank: int | None = None  # the rank that failed first
    log: Path | None = None  # its last lines explain the ending
    lost: Process | None = None  # the process that was lost, where it is not a trainer
    renews: bool = False  # whether it works, and is only to be started again with another model
    error: str = ""  # the first error that the lost process wrote to its log


@dataclass(frozen=True)
class Rank:
    """A rank that has written its record."""

    record: dict[str, Any]  # processes/rank_<n>.json
    log: str
    gone: bool = False  # its process is gone, and the record holds no exit
    code: int | None = None  # of a rank that is gone, where that can be known
    orphaned: bool = False  # accelerate, which started it, was killed by a signal


@dataclass(frozen=True)
class State:
    """What is seen of a process of the plan, or of all processes of a role."""

    alive: bool = True  # whether its process guard, and so the process, runs
    pid: int | None = None  # of the command under the guard, once it has started
    exit: int | None = None  # the command's exit code, negative for a signal, once it has ended
    lost: Ending | None = None  # what of it is gone: the process to blame, not those it took along
    ranks: Sequence[Rank] = ()

    def has_failed_rank(self) -> bool:
        """Return whether a rank is gone, or has recorded an error."""
        return any(rank.gone or rank.record.get("exit") not in (None, 0, EXIT_STOPPED) for rank in self.ranks)

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> State:
        """Return the state that ``dataclasses.asdict`` made plain."""
        lost = Ending(**plain["lost"]) if plain["lost"] else None
        return cls(**{**plain, "lost": lost, "ranks": [Rank(**rank) for rank in plain["ranks"]]})


class Started:
    """A process of the plan that was started: a ``Child`` here, or a ``RemoteChild`` on another node."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.log = Path(process.log).absolute()
        self.log_begins = self.log.stat().st_size if self.log.is_file() else 0  # an earlier process wrote the rest

    def state(self) -> State:
        """Return what is seen of it now; where something is gone, wait for seconds until its exit code is known."""
        raise NotImplementedError

    def end(self) -> None:
        """End the command and all it started; after three seconds by SIGKILL."""
        raise NotImplementedError


class Child(Started):
    """A process of the plan on this node, under its process guard; ``environment`` is what all processes share."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch) -> None:
        super().__init__(process)
        self._run_dir = run_dir
        self._record = run_dir / "processes" / f"{process.name}.json"
        self._record.unlink(missing_ok=True)
        planned = json.dumps(asdict(replace(process, environment={}, log=str(self.log))))  # nothing secret in an argv
        folders = map(str, (run_dir, scratch.disk, scratch.memory))
        guard = python_module("grpo_recipes.launch.processes", *folders, str(os.getpid()), planned)
        self._popen = subprocess.Popen(
            guard,
            env=process.full_environment(environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=scratch.locks,
        )
        tree.OWN_CHILDREN.add(self._popen.pid)
        self.guard_pid = self._popen.pid
        self._where = f" on node {process.node}" if process.node else ""
        self._seen: dict[int, str] = {}  # names of the processes whose loss is this one's loss, by pid
        self._rank_codes: dict[int, int | None] = {}  # of ranks that are gone, by pid

    def alive(self) -> bool:
        """Return whether its process guard runs."""
        return self._popen.poll() is None

    def state(self) -> State:
        alive, lost = self.alive(), self._lost()
        ranks = self._ranks() if self.process.trains else ()  # after the loss: a rank records its end before that
        record = rundir.read_json(self._record)
        return State(alive, record.get("pid"), record.get("exit"), lost, ranks)

    def end(self) -> None:
        orphans = [child for child in tree.descendants() if child.pid in self._seen]  # ours where the guard was killed
        below = [child for pid in (self.guard_pid, *(one.pid for one in orphans)) for child in tree.descendants(pid)]
        tree.end_all({*orphans, *below}, _END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_GUARD_SECONDS)
        self._popen.kill()

    def _exit_code_within(self, seconds: float) -> int | None:
        """Return the command's exit code, which its guard writes within a tick of its death."""
        deadline = time.monotonic() + seconds
        while (code := rundir.read_json(self._record).get("exit")) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def _lost(self) -> Ending | None:
        """Return the process to blame where one is gone; else remember the command and the engines of vLLM."""
        command, label = rundir.read_json(self._record).get("pid"), self.process.label + self._where
        gone = [pid for pid in self._seen if not tree.is_alive(pid)]
        if gone:
            code = self._exit_code_within(2) if command in gone else None
            others = [pid for pid in gone if pid != command]
            if others and (code is None or code >= 0):
                return ending_of(f"{self._seen[others[0]]} (pid {others[0]})", None)
            return ending_of(f"{label} (pid {command})", code)
        if command is not None and tree.is_alive(command):
            self._seen.setdefault(command, label)
            for child in tree.descendants(command) if self.process.ready == "serving" else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name().startswith("VLLM::"):
                        engine = child.name().removeprefix("VLLM::")
                        self._seen.setdefault(child.pid, f"the vLLM engine process {engine}")
        if self.alive():
            return None
        record = rundir.read_json(self._record)
        return ending_of(f"{label} (pid {record.get('pid')})", record.get("exit"))

    def _ranks(self) -> list[Rank]:
        records = rank_records(self._run_dir, self.process.node)
        gone = {record["pid"] for record in records if "exit" not in record and not tree.is_alive(record["pid"])}
        ended = gone or any(record.get("exit") == EXIT_STOPPED for record in records)
        orphaned = bool(ended) and (self._exit_code_within(0.3) or 0) < 0
        deadline = time.monotonic() + _PRINTED_SECONDS  # for all of them together
        for pid in gone - self._rank_codes.keys():
            self._rank_codes[pid] = None if orphaned else self._printed_code(pid, deadline)
        return [
            Rank(record, str(self.log), record["pid"] in gone, self._rank_codes.get(record["pid"]), orphaned)
            for record in records
        ]

    def _printed_code(self, pid: int, deadline: float) -> int | None:
        """Wait until the parent, torch's elastic agent or accelerate's simple launcher, has printed how a rank died."""
        while True:
            text = tail(self.log, 2000)
            if match := re.search(rf"exitcode\s*:\s*(-?\d+) \(pid: {pid}\)", text):
                return int(match[1])
            if match := re.search(r"died with <Signals\.\w+: (\d+)>", text):
                return -int(match[1])
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.1)


def rank_records(run_dir: Path, node: int = 0) -> list[dict[str, Any]]:
    """Return the records that the ranks of a node have written, ``processes/rank_<n>.json``."""
    records = (rundir.json_mapping(path) or {} for path in sorted((run_dir / "processes").glob("rank_*.json")))
    whole = [one for one in records if isinstance(one.get("rank"), int) and isinstance(one.get("pid"), int)]
    return [record for record in whole if record.get("node", 0) == node]


def rank_pids(run_dir: Path, node: int = 0) -> dict[int, int]:
    """Return the pids of the ranks that live on a node, by rank; only that node's own processes can ask."""
    running = (record for record in rank_records(run_dir, node) if "exit" not in record)
    return {record["rank"]: record["pid"] for record in running if tree.is_alive(record["pid"])}


class Group:
    """All processes of one role, e.g. the trainers of every node."""

    def __init__(self, members: Sequence[Started]) -> None:
        self.members = list(members)
        self.process = members[0].process
        self.log = members[0].log

    def state(self) -> State:
        """Return the state of them all: alive while one runs, lost by the first that failed, done when all are."""
        states = [member.state() for member in self.members]
        deadline = time.monotonic() + _NEWS_SECONDS
        # For the loss of one rank those of other nodes fail at once, and their news may come first.
        while 0 < sum(state.has_failed_rank() for state in states) < len(states) and time.monotonic() < deadline:
            time.sleep(0.1)
            states = [member.state() for member in self.members]
        codes, lost = [state.exit for state in states], [state.lost for state in states]
        failed = next((one for one in lost if one and one.code), None)
        return State(
            alive=any(state.alive for state in states),
            pid=states[0].pid,
            exit=None if None in codes else next((code for code in codes if code), 0),
            lost=failed or (lost[0] if None not in lost else None),
            ranks=[rank for state in states for rank in state.ranks],
        )

    def first_error(self) -> str:
        """Return the first error that the engine of a server wrote; empty for other processes."""
        serves = self.process.ready == "serving"
        return first_error(self.log, self.members[0].log_begins, _ENGINE_ERROR) if serves else ""

    def end(self) -> None:
        """End them on every node at once."""
        threads = [threading.Thread(target=member.end) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:  # not an executor: a signal must be able to interrupt the wait
            thread.join()


def newest_model(process: Process, environment: Mapping[str, str]) -> str | None:
    """Return the folder of the model that a process is to be started with, where the trainer has named one."""
    if not process.renewed:
        return None
    link = Path(process.full_environment(environment)["GRPO_SYNC_DIR"]) / rundir.NEWEST_MODEL
    return str(link.resolve()) if link.exists() else None


def wait_for_ending(
    groups: Sequence[Group], on_tick: Callable[[], Ending | None], stopping: Callable[[], bool] = lambda: False
) -> Ending:
    """Wait until the trainers are done, something dies, or ``on_tick`` returns an ending; see ``find_ending``."""
    while True:
        ending = on_tick()
        tree.reap()
        ending = ending or find_ending(groups, stopping())
        if ending and not (ending.lost and stopping()):  # what SIGTERM ended while we looked is no loss
            return ending
        time.sleep(_LOOK_SECONDS)


def find_ending(groups: Sequence[Group], stopping: bool) -> Ending | None:
    """Return how the run ends by what is gone of its processes, or None.

    SIGTERM comes to every process of a cancelled job: while the run is ``stopping``, only the ranks, which save,
    determine the ending, and what started them may end before them.
    """
    # The trainers are looked at before the others, and blamed after them: a rank fails as soon as its server is gone.
    trainers = next((group.state() for group in groups if group.process.trains), None)
    if not stopping and (trainers is None or trainers.alive or trainers.exit != 0):
        for group in groups:
            if not group.process.trains and (lost := group.state().lost):
                error = group.first_error()
                cause = f"{lost.cause}: {error}" if error else lost.cause
                return replace(lost, code=lost.code or 1, cause=cause, log=group.log, lost=group.process, error=error)
    if trainers is None:
        return None
    ending = _rank_ending(trainers, stopping)
    if ending is not None or trainers.lost is None or (stopping and trainers.alive):
        return ending
    log = next(group.log for group in groups if group.process.trains)
    return replace(trainers.lost, log=log) if trainers.lost.code else Ending(0)


def _rank_ending(trainers: State, stopping: bool) -> Ending | None:
    """Return the failure of the rank that failed first; a rank gone without an exit in its record was killed.

    A killed rank comes before those that recorded an error, which may have failed for the loss of it. Last come those
    that SIGTERM ended: with it torch's elastic agent ends the rest. Where accelerate was killed, that is the cause.
    """
    failures: list[tuple[int, float, Ending]] = []
    for rank in trainers.ranks:
        record, number, log = rank.record, rank.record["rank"], Path(rank.log)
        stopped = record.get("exit") == EXIT_STOPPED
        if rank.orphaned and (rank.gone or (stopped and not stopping)):
            return None
        if record.get("exit"):
            ending = Ending(record["exit"], f"rank {number}: {record['cause']}", None if stopped else number, log)
            failures.append((1, record["time"], ending))
        elif rank.gone:
            where = f" on node {record['node']}" if record.get("node") else ""
            ending = ending_of(f"rank {number} (pid {record['pid']}{where})", rank.code)
            error = first_error(log) if rank.code is None or rank.code > 0 else ""
            cause = f"{ending.cause}: {error}" if error else ending.cause
            ending = replace(ending, code=ending.code or 1, cause=cause, failed_rank=number, log=log)
            ended_with_others = rank.code in (None, -signal.SIGTERM)
            failures.append((2 if ended_with_others else 0, time.time(), ending))
    return min(failures, key=lambda failure: failure[:2])[2] if failures else None


def ending_of(who: str, code: int | None) -> Ending:
    """Return how a process ended by its exit code, negative for a signal, None where it is not known."""
    if code is None:
        return Ending(1, f"{who} died or was killed")
    how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return Ending(128 - code if code < 0 else code, f"{who} {how}")


def tail(log: Path, lines: int = _LAST_LINES) -> str:
    """Return the last lines of a log without frames of libraries, secrets masked; nothing where it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - max(400 * lines, 60_000)))
        text = without_library_frames(readable(file.read().decode(errors="replace")))
        return masked("\n".join(text.rstrip("\n").split("\n")[-lines:]))
    return ""


def first_error(log: Path, begins: int = 0, pattern: re.Pattern[str] = _TRACEBACK_ERROR) -> str:
    """Return the first error in a log from a byte on, in one line without secrets; empty if there is none."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(begins)
        if match := pattern.search(readable(file.read(_MOST_LOG).decode(errors="replace"))):
            return masked(match[1].strip())[:_MOST_ERROR]
    return ""


class _Stopped(BaseException):
    """SIGTERM came: from the launcher, or from the kernel because the launcher died."""


def _stop(*_: object) -> None:
    raise _Stopped


def main() -> int:
    """Run the command, and end everything with it."""
    run_dir, scratch, launcher = Path(sys.argv[1]), Scratch(Path(sys.argv[2]), Path(sys.argv[3])), int(sys.argv[4])
    process = Process.of_json(json.loads(sys.argv[5]))
    hooks = AllHooks()  # imported now: the files of the code may change during a run
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tree.die_with_parent(launcher)
        tree.become_subreaper()
        code = _run(process, run_dir, scratch)
    except _Stopped:
        code = 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    began = time.monotonic()
    # Ranks save where SIGTERM came to every process of the job and the launcher has asked them to.
    while process.trains and os.getppid() == launcher and tree.descendants():
        if time.monotonic() - began > (_SAVE_SECONDS if rundir.stop_file(run_dir).exists() else _LAUNCHER_SECONDS):
            break
        tree.reap()
        time.sleep(_TICK_SECONDS)
    tree.end_descendants()
    if os.getppid() != launcher:
        if process.node:  # here the node worker died, and the launcher ends the run
            scratch.remove()
        else:
            _report_dead_launcher(run_dir, scratch, launcher, hooks)
    return code


def _run(process: Process, run_dir: Path, scratch: Scratch) -> int:
    """Run the command to its end and return its exit code as a shell does, 128+n for signal n."""

    def set_signals() -> None:
        # The command inherits what we ignore. accelerate must outlive the SIGTERM that comes to every process of a
        # cancelled job: with it the kernel would end the rank that saves. Where it starts several ranks it has a
        # handler of its own. Ranks set the default again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if process.trains else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        tree.die_with_parent(guard, signal.SIGKILL)  # nobody else would end it

    guard = os.getpid()
    segments = SegmentRecorder(scratch.memory)
    with Path(process.log).open("ab") as log:
        child = subprocess.Popen(process.argv, stdout=log, stderr=log, preexec_fn=set_signals, start_new_session=True)
    tree.OWN_CHILDREN.add(child.pid)
    path, record = run_dir / "processes" / f"{process.name}.json", {"pid": child.pid, "guard": os.getpid()}
    rundir.write_json(path, record)
    while child.poll() is None:
        tree.reap()
        segments.look()
        time.sleep(_TICK_SECONDS)
    rundir.write_last_json(path, {**record, "exit": child.returncode})
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _report_dead_launcher(run_dir: Path, scratch: Scratch, launcher: int, hooks: AllHooks) -> None:
    """Do what the dead launcher cannot: remove the scratch folders, and write how the run ended."""
    scratch.remove()
    with contextlib.suppress(ConfigError):  # the lock does not say
        if rundir.launcher_of(run_dir)[1] != launcher:
            return  # the next launch has begun, and the run directory is its own
    cause = f"the launcher (pid {launcher}) died without ending the run; its process guard ended every process"
    resume = shlex.join(["grpo", "launch", "--resume", display_path(run_dir)])
    print(f"grpo: {cause}; continue with: {resume}", file=sys.stderr, flush=True)
    shutil.rmtree(run_dir / rundir.SYNC_FOLDER, ignore_errors=True)
    rundir.finish_summary(run_dir, status="failed", exit_code=128 + signal.SIGKILL, failed_rank=None, cause=cause)
    hooks.on_end(run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
