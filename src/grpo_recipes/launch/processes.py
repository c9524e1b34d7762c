"""The plan's processes as they run, and which of them ended the run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.plan.types import Process
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.process.tree import OWN_CHILDREN, descendants, end_all, is_alive, reap
from grpo_recipes.runs.rundir import read_json
from grpo_recipes.secrets import masked

_LAST_LINES = 50
_PRINTED_SECONDS = 5.0  # within which a parent has printed how its ranks died
_NEWS_SECONDS = (
    8.0  # longer than one look of a node at what is gone: 2 s, 0.3 s and _PRINTED_SECONDS in ``Child.state``
)
_GUARD_SECONDS = 15.0  # a process guard whose command is gone ends the rest within its own grace


@dataclass(frozen=True)
class Ending:
    """How a run, or one of its processes, ended."""

    code: int
    cause: str = ""  # one line: who and why; empty after success
    failed_rank: int | None = None  # the rank that failed first
    log: Path | None = None  # its last lines explain the ending
    lost: Process | None = None  # the process that was lost, where it is not a trainer


@dataclass(frozen=True)
class Lost:
    """A process that is gone, what it was, and its exit code where one is known."""

    pid: int | None
    name: str
    code: int | None

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}) {_how(self.code)}"


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
    lost: Lost | None = None  # what of it is gone: the process to blame, not those it took along
    ranks: Sequence[Rank] = ()

    def has_failed_rank(self) -> bool:
        """Return whether a rank is gone, or has recorded an error."""
        return any(rank.gone or rank.record.get("exit") not in (None, 0, EXIT_STOPPED) for rank in self.ranks)

    @classmethod
    def of_json(cls, plain: Mapping[str, Any]) -> State:
        """Return the state that ``dataclasses.asdict`` made plain."""
        lost = Lost(**plain["lost"]) if plain["lost"] else None
        return cls(**{**plain, "lost": lost, "ranks": [Rank(**rank) for rank in plain["ranks"]]})


class Started(Protocol):
    """A process of the plan that was started: a ``Child`` here, or a ``RemoteChild`` on another node."""

    process: Process
    log: Path

    def state(self) -> State:
        """Return what is seen of it now."""

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started; after ``grace`` seconds by SIGKILL."""


class Child:
    """A process of the plan on this node, under its process guard; see ``Started``."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch):
        self.process = process
        self.log = Path(process.log).absolute()
        self._run_dir = run_dir
        self._record = run_dir / "processes" / f"{process.name}.json"
        self._record.unlink(missing_ok=True)
        guard = [
            sys.executable, "-m", "grpo_recipes.launch.process_guard", "--name", process.name,
            *(["--saves"] if process.trains else []),
            "--run-dir", str(run_dir), "--scratch", str(scratch.disk), str(scratch.memory),
            "--launcher", str(os.getpid()), "--log", str(self.log), "--node", str(process.node), "--", *process.argv,
        ]  # fmt: skip
        self._popen = subprocess.Popen(
            guard, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=scratch.locks
        )
        OWN_CHILDREN.add(self._popen.pid)
        self.guard_pid = self._popen.pid
        self._where = f" on node {process.node}" if process.node else ""
        self._seen: dict[int, str] = {}  # names of the processes whose loss is this one's loss, by pid
        self._rank_codes: dict[int, int | None] = {}  # of ranks that are gone, by pid

    def alive(self) -> bool:
        """Return whether its process guard runs."""
        return self._popen.poll() is None

    def state(self) -> State:
        """Return what is seen of it now; where something is gone, wait for seconds until its exit code is known."""
        alive, lost = self.alive(), self._lost()
        ranks = self._ranks() if self.process.trains else ()  # after the loss: a rank records its end before that
        record = self._read()
        return State(alive, record.get("pid"), record.get("exit"), lost, ranks)

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started; after ``grace`` seconds by SIGKILL."""
        end_all(descendants(self.guard_pid), grace)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_GUARD_SECONDS)
        self._popen.kill()

    def _read(self) -> dict[str, Any]:
        return read_json(self._record)

    def _exit_code_within(self, seconds: float) -> int | None:
        """Return the command's exit code, which its guard writes within a tick of its death."""
        deadline = time.monotonic() + seconds
        while (code := self._read().get("exit")) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def _lost(self) -> Lost | None:
        """Return the process to blame where one is gone; else remember the command and the engines of vLLM."""
        command, label = self._read().get("pid"), self.process.label + self._where
        gone = [pid for pid in self._seen if not is_alive(pid)]
        if gone:
            code = self._exit_code_within(2) if command in gone else None
            others = [pid for pid in gone if pid != command]
            if others and (code is None or code >= 0):
                return Lost(others[0], self._seen[others[0]], None)
            return Lost(command, label, code)
        if command is not None and is_alive(command):
            self._seen.setdefault(command, label)
            for child in descendants(command) if self.process.ready == "serving" else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name().startswith("VLLM::"):
                        engine = child.name().removeprefix("VLLM::")
                        self._seen.setdefault(child.pid, f"the vLLM engine process {engine}")
        return None if self.alive() else Lost(self._read().get("pid"), label, self._read().get("exit"))

    def _ranks(self) -> list[Rank]:
        records = rank_records(self._run_dir, self.process.node)
        gone = {record["pid"] for record in records if "exit" not in record and not is_alive(record["pid"])}
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
    records = (read_json(path) for path in sorted((run_dir / "processes").glob("rank_*.json")))
    return [record for record in records if record and record.get("node", 0) == node]


def rank_pids(run_dir: Path, node: int = 0) -> dict[int, int]:
    """Return the pids of the ranks that live on a node, by rank; only that node's own processes can ask."""
    running = (record for record in rank_records(run_dir, node) if "exit" not in record)
    return {record["rank"]: record["pid"] for record in running if is_alive(record["pid"])}


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
        failed = next((one for one in lost if one is not None and one.code != 0), None)
        return State(
            alive=any(state.alive for state in states),
            pid=states[0].pid,
            exit=None if None in codes else next((code for code in codes if code), 0),
            lost=failed or (lost[0] if None not in lost else None),
            ranks=[rank for state in states for rank in state.ranks],
        )

    def end(self) -> None:
        """End them on every node at once."""
        threads = [threading.Thread(target=member.end) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:  # not an executor: a signal must be able to interrupt the wait
            thread.join()


def wait_for_ending(
    groups: Sequence[Group],
    on_tick: Callable[[], Ending | None],
    stopping: Callable[[], bool] = lambda: False,
    interval: float = 0.2,
) -> Ending:
    """Wait until the trainers are done, something dies, or ``on_tick`` returns an ending.

    ``stopping`` returns whether the trainers were asked to save and end.
    """
    while True:
        ending = on_tick()
        reap()
        if ending := ending or find_ending(groups, stopping()):
            return ending
        time.sleep(interval)


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
                return Ending(shell_code(lost.code) or 1, str(lost), log=group.log, lost=group.process)
    if trainers is None:
        return None
    ending = _rank_ending(trainers, stopping)
    if ending is not None or trainers.lost is None or (stopping and trainers.alive):
        return ending
    if trainers.lost.code == 0:
        return Ending(0)
    log = next(group.log for group in groups if group.process.trains)
    return Ending(shell_code(trainers.lost.code) or 1, str(trainers.lost), log=log)


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
            cause = f"rank {number} (pid {record['pid']}{where}) {_how(rank.code)}"
            ended_with_others = rank.code in (None, -signal.SIGTERM)
            ending = Ending(shell_code(rank.code) or 1, cause, number, log)
            failures.append((2 if ended_with_others else 0, time.time(), ending))
    return min(failures, key=lambda failure: failure[:2])[2] if failures else None


def _how(code: int | None) -> str:
    if code is None:
        return "died or was killed"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def shell_code(code: int | None) -> int | None:
    """Return an exit code as a shell reports it: 128+n for signal n."""
    return 128 - code if code is not None and code < 0 else code


def tail(log: Path, lines: int = _LAST_LINES) -> str:
    """Return the last lines of a log, secrets masked; nothing where it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - lines * 400))
        return masked("\n".join(file.read().decode(errors="replace").splitlines()[-lines:]))
    return ""
