"""The running processes of a plan, the search for the process that ended the run, and the process guard.

Every process of the plan runs under a guard (``main``), a small process between it and the launcher. The guard ensures
that no descendant outlives the command or the launcher. It runs the command in a new session, adopts orphans, and ends
all descendants when the command ends or the launcher dies. Its arguments are the run directory, the two scratch
folders, the pid of the launcher (on other nodes, of the node worker), and the process as JSON.
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
from grpo_recipes.paths import display_path, module_command
from grpo_recipes.plan.types import Process
from grpo_recipes.process import tree
from grpo_recipes.process.scratch import Scratch, SegmentRecorder
from grpo_recipes.process.terminal import collapse_library_frames, collapse_metrics, strip_control_codes
from grpo_recipes.process.waiting import wait_until
from grpo_recipes.runs import rundir
from grpo_recipes.secrets import mask_secrets

_LAST_LINES = 30
_ERROR = r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception): [^\n]+)"
# vLLM prefixes each line with the name of the process. The API server reports the death of the engine later.
_ENGINE_ERROR = re.compile(rf"^\((?:EngineCore|Worker)[^)\n]*\) (?:ERROR [^\n]*?\] )?{_ERROR}", re.MULTILINE)
_TRACEBACK_ERROR = re.compile(rf"Traceback \(most recent call last\):\n(?:.*\n)*?(?:\[[^\]\n]*\]:? ?)?{_ERROR}")
_MAX_LOG_BYTES, _MAX_ERROR_LENGTH = 4_000_000, 300  # searched part of a log, characters of an error
_CHECK_SECONDS = 0.2  # between two checks of all processes
_PRINTED_SECONDS = 5.0  # a parent prints the exit codes of its ranks within this time
_NEWS_SECONDS = 8.0  # longer than ``Child.state`` needs on any node: 2 s, 0.3 s and _PRINTED_SECONDS
_TICK_SECONDS = 0.05  # between two checks of a guard
_SAVE_SECONDS = 25.0  # a little longer than the launcher waits after SIGTERM
_LAUNCHER_SECONDS = 1.0  # the launcher asks the ranks to save within this time
_END_SECONDS = 3.0  # between SIGTERM and SIGKILL
_GUARD_SECONDS = 15.0  # a guard ends all descendants within this time after its command has ended


@dataclass(frozen=True)
class Ending:
    """How a run, or one of its processes, ended."""

    code: int
    cause: str = ""  # one line with the process and the reason; empty after success
    failed_rank: int | None = None  # the rank that failed first
    log: Path | None = None  # a log with an explanation in its last lines
    lost: Process | None = None  # the process that was lost, unless it is a trainer
    renews: bool = False  # whether ``lost`` works and is only restarted with a newer model
    error: str = ""  # the first error that the lost process wrote to its log


@dataclass(frozen=True)
class Rank:
    """A training process that has written its record."""

    record: dict[str, Any]  # processes/rank_<n>.json
    log: str
    gone: bool = False  # its process is gone, and the record contains no exit code
    code: int | None = None  # exit code of a rank that is gone, if known
    orphaned: bool = False  # its parent, accelerate, was killed by a signal


@dataclass(frozen=True)
class State:
    """The state of a process of the plan, or of all processes of a role."""

    alive: bool = True  # whether its process guard runs, and therefore the process
    pid: int | None = None  # pid of the command under the guard, after its start
    exit: int | None = None  # exit code of the command after its end, negative for a signal
    lost: Ending | None = None  # the end of the process that failed first, not of processes that it took along
    ranks: Sequence[Rank] = ()

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> State:
        """Return the state from the mapping that ``dataclasses.asdict`` made of it."""
        lost = Ending(**plain["lost"]) if plain["lost"] else None
        return cls(**{**plain, "lost": lost, "ranks": [Rank(**rank) for rank in plain["ranks"]]})


class StartedProcess:
    """A started process of the plan: a ``Child`` on this node, or a ``RemoteChild`` on another node."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.log = Path(process.log).absolute()
        self.log_begins = self.log.stat().st_size if self.log.is_file() else 0  # older lines are not ours

    def state(self) -> State:
        """Return the current state. If a process is gone, this may wait several seconds for its exit code."""
        raise NotImplementedError

    def end(self) -> None:
        """End the command and its descendants by SIGTERM, and by SIGKILL after three seconds."""
        raise NotImplementedError


class Child(StartedProcess):
    """A process of the plan, started here under its process guard; ``environment`` is shared by all processes."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch) -> None:
        super().__init__(process)
        self._run_dir = run_dir
        self._record = run_dir / "processes" / f"{process.name}.json"
        self._record.unlink(missing_ok=True)
        planned = json.dumps(
            asdict(replace(process, environment={}, log=str(self.log)))
        )  # an argv must not contain secrets
        folders = map(str, (run_dir, scratch.disk, scratch.memory))
        guard = module_command("grpo_recipes.launch.processes", *folders, str(os.getpid()), planned)
        self._popen = subprocess.Popen(
            guard,
            env=process.full_environment(environment),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=scratch.locks,
        )
        tree.OWN_CHILDREN.add(self._popen.pid)
        self.guard_pid = self._popen.pid
        self._node_suffix = f" on node {process.node}" if process.node else ""
        self._watched: dict[int, str] = {}  # pid -> name of the command and the vLLM engines, which must stay alive
        self._rank_codes: dict[int, int | None] = {}  # pid -> exit code of a rank that is gone

    def alive(self) -> bool:
        """Return whether the process guard runs."""
        return self._popen.poll() is None

    def state(self) -> State:
        """Return whether the guard runs, the command's pid and exit code, and for trainers the ranks of this node.

        For a rank that is gone without an exit code in its record, wait at most ``_PRINTED_SECONDS`` until its parent
        prints the code. If the parent was killed, do not wait.
        """
        alive, lost = self.alive(), self._find_lost()
        # Read the ranks after ``lost``: a rank records its end first.
        records = read_rank_records(self._run_dir, self.process.node) if self.process.trains else []
        gone = {record["pid"] for record in records if "exit" not in record and not tree.is_alive(record["pid"])}
        ended = gone or any(record.get("exit") == EXIT_STOPPED for record in records)
        command = rundir.read_json(self._record).get("pid")
        single = {command} & {record["pid"] for record in records}  # one rank runs in accelerate's process
        orphaned = bool(ended) and not single and (self._wait_for_exit_code(0.3) or 0) < 0
        deadline = time.monotonic() + _PRINTED_SECONDS  # for all ranks together
        for pid in gone & single - self._rank_codes.keys():
            self._rank_codes[pid] = self._wait_for_exit_code(2)
        for pid in gone - self._rank_codes.keys():
            self._rank_codes[pid] = None if orphaned else self._find_printed_code(pid, deadline)
        ranks = [
            Rank(record, str(self.log), record["pid"] in gone, self._rank_codes.get(record["pid"]), orphaned)
            for record in records
        ]
        guard_record = rundir.read_json(self._record)
        return State(alive, guard_record.get("pid"), guard_record.get("exit"), lost, ranks)

    def end(self) -> None:
        """End the command and all descendants by SIGTERM, after 3 s by SIGKILL; after 15 s more, kill the guard."""
        # If the guard was killed, its children are orphans, which this process has adopted.
        orphans = [child for child in tree.descendants() if child.pid in self._watched]
        parents = [self.guard_pid, *(orphan.pid for orphan in orphans)]
        children = [child for pid in parents for child in tree.descendants(pid)]
        tree.end_all({*orphans, *children}, _END_SECONDS)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_GUARD_SECONDS)
        self._popen.kill()

    def _wait_for_exit_code(self, seconds: float) -> int | None:
        """Wait for the command's exit code in the guard's record; return None if there is none within ``seconds``."""

        def read_code() -> int | None:
            code: int | None = rundir.read_json(self._record).get("exit")
            return code

        wait_until(lambda: read_code() is not None, seconds, pause=0.02)
        return read_code()

    def _find_lost(self) -> Ending | None:
        """Return how the first watched process that is gone ended, or None if none is gone.

        Watched are the command and, for a server, its vLLM engines: each call adds new ones. If an engine and the
        command are gone, the engine is blamed unless a signal ended the command.
        """
        command, label = rundir.read_json(self._record).get("pid"), self.process.label + self._node_suffix
        gone = [pid for pid in self._watched if not tree.is_alive(pid)]
        if gone:
            code = self._wait_for_exit_code(2) if command in gone else None
            engines = [pid for pid in gone if pid != command]
            if engines and (code is None or code >= 0):
                return ending_from_exit(f"{self._watched[engines[0]]} (pid {engines[0]})", None)
            return ending_from_exit(f"{label} (pid {command})", code)
        if command is not None and tree.is_alive(command):
            self._watched.setdefault(command, label)
            for child in tree.descendants(command) if self.process.ready == "serving" else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name().startswith("VLLM::"):
                        engine = child.name().removeprefix("VLLM::")
                        self._watched.setdefault(child.pid, f"the vLLM engine process {engine}{self._node_suffix}")
        if self.alive():
            return None
        record = rundir.read_json(self._record)
        return ending_from_exit(f"{label} (pid {record.get('pid')})", record.get("exit"))

    def _find_printed_code(self, pid: int, deadline: float) -> int | None:
        """Return the exit code of a rank that its parent prints to the log, or None if it prints none in time.

        The parent is torch's elastic agent or accelerate's launcher. Wait until ``deadline`` at most. The result is
        negative for a signal.
        """

        def find_code() -> int | None:
            text = read_last_lines(self.log, 2000)
            if match := re.search(rf"exitcode\s*:\s*(-?\d+) \(pid: {pid}\)", text):
                return int(match[1])
            if match := re.search(r"died with <Signals\.\w+: (\d+)>", text):
                return -int(match[1])
            return None

        wait_until(lambda: find_code() is not None, deadline - time.monotonic())
        return find_code()


def read_rank_records(run_dir: Path, node: int = 0) -> list[dict[str, Any]]:
    """Return the content of each ``processes/rank_<n>.json`` of a node; files without a rank and pid are skipped."""
    records = (rundir.load_json_mapping(path) or {} for path in sorted((run_dir / "processes").glob("rank_*.json")))
    return [
        record
        for record in records
        if isinstance(record.get("rank"), int) and isinstance(record.get("pid"), int) and record.get("node", 0) == node
    ]


def find_rank_pids(run_dir: Path, node: int = 0) -> dict[int, int]:
    """Return rank -> pid of the living ranks of ``node``, which must be the node of this process."""
    running = (record for record in read_rank_records(run_dir, node) if "exit" not in record)
    return {record["rank"]: record["pid"] for record in running if tree.is_alive(record["pid"])}


class Group:
    """All processes of a role, e.g. the trainers of every node."""

    def __init__(self, members: Sequence[StartedProcess]) -> None:
        self.members = list(members)
        self.process = members[0].process
        self.log = members[0].log

    def state(self) -> State:
        """Return the joint state of all members.

        It is alive while a member runs. Its exit code is None until all members have ended, then the first code that is
        not 0. It is lost by the first failure, or when all members are lost, or a server's first. If only some members
        report a failed rank, wait at most ``_NEWS_SECONDS`` for the reports of the others.
        """
        states: list[State] = []

        def is_consistent() -> bool:
            """Read the states, and return whether none or all of the members have a rank that is gone or has failed."""
            states[:] = [member.state() for member in self.members]
            failed = [
                any(rank.gone or rank.record.get("exit") not in (None, 0, EXIT_STOPPED) for rank in state.ranks)
                for state in states
            ]
            return sum(failed) in (0, len(states))

        # When a rank dies, the ranks of other nodes fail at once, and their reports may arrive first.
        wait_until(is_consistent, _NEWS_SECONDS)
        codes, pairs = [state.exit for state in states], zip(self.members, states, strict=True)
        endings = [replace(state.lost, log=member.log) for member, state in pairs if state.lost]
        failed = next((ending for ending in endings if ending.code), None)
        is_lost = len(endings) == len(states) or (endings and self.process.ready == "serving")
        return State(
            alive=any(state.alive for state in states),
            pid=states[0].pid,
            exit=None if None in codes else next((code for code in codes if code), 0),
            lost=failed or (endings[0] if is_lost else None),
            ranks=[rank for state in states for rank in state.ranks],
        )

    def find_first_error(self) -> str:
        """Return the first error of a vLLM engine in the server's logs; "" without an error and for other processes."""
        logs = [(member.log, member.log_begins) for member in self.members if member.process.ready == "serving"]
        return next(filter(None, (find_first_error(log, begin, _ENGINE_ERROR) for log, begin in logs)), "")

    def end(self) -> None:
        """End the processes of all nodes at the same time."""
        threads = [threading.Thread(target=member.end) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:  # not an executor, because a signal must be able to interrupt this wait
            thread.join()


def find_newest_model(process: Process, environment: Mapping[str, str]) -> str | None:
    """Return the folder of the newest model that the trainer has saved for the server.

    Return None if there is none yet, or if the process is not restarted with new models (``Process.renewed``).
    """
    if not process.renewed:
        return None
    link = Path(process.full_environment(environment)["GRPO_SYNC_DIR"]) / rundir.NEWEST_MODEL
    return str(link.resolve()) if link.exists() else None


def wait_for_ending(
    groups: Sequence[Group], on_tick: Callable[[], Ending | None], stopping: Callable[[], bool] = lambda: False
) -> Ending:
    """Wait until the run ends, and return how; ``on_tick`` is called several times per second and may end the wait.

    ``find_ending`` decides when the run ends. While ``stopping()`` is true, lost processes do not end the wait, because
    SIGTERM may have ended them.
    """
    while True:
        ending = on_tick()
        tree.reap()
        ending = ending or find_ending(groups, stopping())
        if ending and not (ending.lost and stopping()):  # a process that SIGTERM ended just now is not lost
            return ending
        time.sleep(_CHECK_SECONDS)


def find_ending(groups: Sequence[Group], stopping: bool) -> Ending | None:
    """Return how the run ends if a process has ended, otherwise None.

    The code is 0 if the trainers are done. If a process other than a trainer was lost, ``lost`` of the result is that
    process. Slurm sends SIGTERM to every process of a cancelled job. While the run is ``stopping``, only the ranks,
    which save, determine the ending, and their parents may end before them.
    """
    # The state of the trainers is read before the other states, but other processes are blamed first: a rank fails as
    # soon as its server is gone.
    trainers = next((group.state() for group in groups if group.process.trains), None)
    if not stopping and (trainers is None or trainers.alive or trainers.exit != 0):
        for group in groups:
            if not group.process.trains and (lost := group.state().lost):
                error = group.find_first_error()
                cause = f"{lost.cause}: {error}" if error else lost.cause
                return replace(lost, code=lost.code or 1, cause=cause, lost=group.process, error=error)
    ending = None if trainers is None else _find_rank_ending(trainers, stopping)
    if ending is not None or trainers is None or trainers.lost is None or (stopping and trainers.alive):
        return ending
    return trainers.lost if trainers.lost.code else Ending(0)


def _find_rank_ending(trainers: State, stopping: bool) -> Ending | None:
    """Return the ending of the rank that failed first, or None; a rank without a recorded exit code was killed.

    A killed rank is blamed before ranks that recorded an error, because its loss may have caused these errors. SIGABRT
    comes after them: NCCL aborts ranks that lost another rank. Ranks that SIGTERM ended (torch's elastic agent sends
    it), and ranks with an unknown exit code, are blamed last.
    Return None if accelerate was killed and a rank left no exit code, or stopped unrequested (``stopping`` false).
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
            node = f" on node {record['node']}" if record.get("node") else ""
            ending = ending_from_exit(f"rank {number} (pid {record['pid']}{node})", rank.code)
            error = find_first_error(log) if rank.code is None or rank.code > 0 else ""
            cause = f"{ending.cause}: {error}" if error else ending.cause
            ending = replace(ending, code=ending.code or 1, cause=cause, failed_rank=number, log=log)
            order = {None: 3, -signal.SIGTERM: 3, -signal.SIGABRT: 2}.get(rank.code, 0)
            failures.append((order, time.time(), ending))
    return min(failures, key=lambda failure: failure[:2])[2] if failures else None


def ending_from_exit(name: str, code: int | None) -> Ending:
    """Return the ending of the process ``name`` from its exit code, negative for a signal or None if unknown.

    The ending of signal n has the code 128+n, and an unknown code becomes 1. Other codes stay, also 0.
    """
    if code is None:
        return Ending(1, f"{name} died or was killed")
    reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
    return Ending(128 - code if code < 0 else code, f"{name} {reason}")


def read_last_lines(log: Path, lines: int = _LAST_LINES) -> str:
    """Return the last lines of a log, shortened and with masked secrets; "" if it can't be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - max(400 * lines, 60_000)))
        text = collapse_library_frames(collapse_metrics(strip_control_codes(file.read().decode(errors="replace"))))
        return mask_secrets("\n".join(text.rstrip("\n").split("\n")[-lines:]))
    return ""


def find_first_error(log: Path, start: int = 0, pattern: re.Pattern[str] = _TRACEBACK_ERROR) -> str:
    """Return the first error after byte ``start`` of a log, as one line without secrets; "" if there is no error.

    ``pattern`` has the error as its first group. The default finds the last line of Python's tracebacks.
    """
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(start)
        if match := pattern.search(strip_control_codes(file.read(_MAX_LOG_BYTES).decode(errors="replace"))):
            return mask_secrets(match[1].strip())[:_MAX_ERROR_LENGTH]
    return ""


class _Stopped(BaseException):
    """SIGTERM was received, from the launcher or from the kernel because the launcher died."""


def _raise_stopped(*_: object) -> None:
    raise _Stopped


def main() -> int:
    """Run the command of a process under this guard, end all descendants afterwards, and return the exit code.

    If the launcher died, also remove the scratch folders and write the summary of the run.
    """
    run_dir, scratch, launcher = Path(sys.argv[1]), Scratch(Path(sys.argv[2]), Path(sys.argv[3])), int(sys.argv[4])
    process = Process.of_json(json.loads(sys.argv[5]))
    hooks = AllHooks()  # imported now, because the files of the code may change during a run
    signal.signal(signal.SIGTERM, _raise_stopped)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tree.die_with_parent(launcher)
        tree.become_subreaper()
        code = _run_command(process, run_dir, scratch)
    except _Stopped:
        code = 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if process.trains:
        _wait_for_saves(run_dir, launcher)
    tree.end_descendants()
    if os.getppid() != launcher:
        if process.node:  # the node worker died, and the launcher ends the run
            scratch.remove()
        else:
            _report_dead_launcher(run_dir, scratch, launcher, hooks)
    return code


def _wait_for_saves(run_dir: Path, launcher: int) -> None:
    """Wait until the ranks have ended, at most ``_SAVE_SECONDS``, so that they can save before this guard ends them.

    Stop waiting if the launcher is dead, or if it has not asked the ranks to save within ``_LAUNCHER_SECONDS``.
    """
    started_at = time.monotonic()

    def ranks_have_ended() -> bool:
        tree.reap()
        return not tree.descendants()

    def nobody_saves() -> bool:
        is_late = time.monotonic() - started_at > _LAUNCHER_SECONDS
        return os.getppid() != launcher or (is_late and not rundir.stop_file(run_dir).exists())

    wait_until(ranks_have_ended, _SAVE_SECONDS, pause=_TICK_SECONDS, stopped=nobody_saves)


def _run_command(process: Process, run_dir: Path, scratch: Scratch) -> int:
    """Run the command of a process with its output in its log, and record its pid and exit code in ``processes/``.

    Return its exit code like a shell, with 128+n for signal n.
    """

    def set_signals() -> None:
        """Set the signal handlers of the child before its command starts, and let it die with the guard."""
        # The command inherits ignored signals. accelerate must survive the SIGTERM that every process of a cancelled
        # job gets: its end would end the rank, which still saves. With several ranks accelerate sets its own handler.
        # The ranks restore the default.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if process.trains else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

        tree.die_with_parent(guard, signal.SIGKILL)  # no other process would end the command

    guard = os.getpid()
    segments = SegmentRecorder(scratch.memory)
    with Path(process.log).open("ab") as log:
        child = subprocess.Popen(process.argv, stdout=log, stderr=log, preexec_fn=set_signals, start_new_session=True)
    tree.OWN_CHILDREN.add(child.pid)
    path, record = run_dir / "processes" / f"{process.name}.json", {"pid": child.pid, "guard": os.getpid()}
    rundir.write_json(path, record)
    while child.poll() is None:
        tree.reap()
        segments.record_new()
        time.sleep(_TICK_SECONDS)
    rundir.write_last_json(path, {**record, "exit": child.returncode})
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _report_dead_launcher(run_dir: Path, scratch: Scratch, launcher: int, hooks: AllHooks) -> None:
    """Finish the run of a dead launcher: remove the scratch folders, write the summary, and call the hooks.

    If another launch owns the run directory, only remove the scratch folders.
    """
    scratch.remove()
    with contextlib.suppress(ConfigError):  # the lock does not contain a pid
        if rundir.read_launcher(run_dir)[1] != launcher:
            return  # the next launch has started and owns the run directory
    cause = f"the launcher (pid {launcher}) died without ending the run; its process guard ended every process"
    resume = shlex.join(["grpo", "launch", "--resume", display_path(run_dir)])
    print(f"grpo: {cause}; continue with: {resume}", file=sys.stderr, flush=True)
    shutil.rmtree(run_dir / rundir.SYNC_FOLDER, ignore_errors=True)
    rundir.finish_summary(run_dir, status="failed", exit_code=128 + signal.SIGKILL, failed_rank=None, cause=cause)
    hooks.on_end(run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
