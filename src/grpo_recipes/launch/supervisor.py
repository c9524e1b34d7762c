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
from collections.abc import Callable, Sequence
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
class RankSeen:
    """A rank by its record."""

    record: dict[str, Any]  # processes/rank_<n>.json
    gone: bool  # its process is gone, and the record holds no exit
    under: Started


class Started(Protocol):
    """A process of the plan that was started: a ``Child`` here, or a ``RemoteChild`` on another node."""

    process: Process
    log: Path

    def alive(self) -> bool:
        """Return whether its process guard, and so the process, runs."""

    def command_pid(self) -> int | None:
        """Return the pid of the command under the guard, once it has started."""

    def exit_code(self) -> int | None:
        """Return the command's exit code, negative for a signal, once it has ended."""

    def lost(self) -> Lost | None:
        """Return what of it is gone: the process to blame, not those it took along."""

    def ranks(self) -> list[RankSeen]:
        """Return its ranks that have written a record."""

    def killed(self) -> bool:
        """Return whether the command itself was ended by a signal."""

    def code_of_rank(self, pid: int) -> int | None:
        """Return how a rank that is gone died, where that can be known."""

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started; after ``grace`` seconds by SIGKILL."""


class Child:
    """A process of the plan on this node, under its process guard; see ``Started``."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch):
        self.process = process
        self.log = Path(process.log).absolute()
        self._records = run_dir / "processes"
        self._record = self._records / f"{process.name}.json"
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
        self._seen: dict[int, str] = {}

    def alive(self) -> bool:
        return self._popen.poll() is None

    def command_pid(self) -> int | None:
        record = read_json(self._record)
        return int(record["pid"]) if record else None

    def exit_code(self) -> int | None:
        return read_json(self._record).get("exit")

    def lost(self) -> Lost | None:
        command = self.command_pid()
        gone = [pid for pid in self._seen if not is_alive(pid)]
        if not gone:
            self._remember(command)
            return None if self.alive() else Lost(self.command_pid(), self.process.label, self.exit_code())
        code = self._exit_code_within(2) if command in gone else None
        others = [pid for pid in gone if pid != command]
        if others and (code is None or code >= 0):
            return Lost(others[0], self._seen[others[0]], None)
        return Lost(command, self.process.label, code)

    def killed(self) -> bool:
        return (self._exit_code_within(0.3) or 0) < 0

    def ranks(self) -> list[RankSeen]:
        records = (read_json(path) for path in sorted(self._records.glob("rank_*.json")))
        return [
            RankSeen(record, "exit" not in record and not is_alive(record["pid"]), self)
            for record in records
            if record and record.get("node", 0) == self.process.node
        ]

    def code_of_rank(self, pid: int) -> int | None:
        """Wait until accelerate has printed how a rank died: only a parent learns it."""
        deadline = time.monotonic() + 5
        while (code := _code_printed_by_accelerate(self.log, pid)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return code

    def end(self, grace: float = 3.0) -> None:
        end_all(descendants(self.guard_pid), grace)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_GUARD_SECONDS)
        if self.alive():
            end_all([psutil.Process(self.guard_pid)], 0)

    def _exit_code_within(self, seconds: float) -> int | None:
        """Return the command's exit code, which its guard writes within a tick of its death."""
        deadline = time.monotonic() + seconds
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return code

    def _remember(self, command: int | None) -> None:
        """Remember the pids whose loss is the process's own: its command, and the engine processes of vLLM."""
        if command is None or not is_alive(command):
            return
        self._seen.setdefault(command, self.process.label)
        for child in descendants(command) if self.process.ready == "serving" else []:
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("VLLM::"):
                    self._seen.setdefault(child.pid, f"the vLLM engine process {child.name().removeprefix('VLLM::')}")


class Group:
    """All processes of one role, e.g. the trainers of every node."""

    def __init__(self, members: Sequence[Started]) -> None:
        self.members = list(members)
        self.process = members[0].process
        self.log = members[0].log

    def alive(self) -> bool:
        """Return whether any of them runs."""
        return any([member.alive() for member in self.members])

    def exit_code(self) -> int | None:
        """Return None while one runs, then the first code that is not 0, or 0."""
        codes = [member.exit_code() for member in self.members]
        return None if None in codes else next((code for code in codes if code), 0)

    def lost(self) -> Lost | None:
        """Return the one that failed; one that is done while others still run is not lost."""
        lost = [member.lost() for member in self.members]
        failed = next((one for one in lost if one is not None and one.code != 0), None)
        return failed or (lost[0] if None not in lost else None)

    def ranks(self) -> list[RankSeen]:
        """Return the ranks of every node."""
        return [rank for member in self.members for rank in member.ranks()]

    def end(self) -> None:
        """End them on every node at once."""
        threads = [threading.Thread(target=member.end) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def wait_for_ending(
    groups: Sequence[Group],
    on_tick: Callable[[], Ending | None],
    stopping: Callable[[], bool] = lambda: False,
    interval: float = 0.2,
) -> Ending:
    """Watch until the trainers are done or something dies; the first process found dead is the cause.

    ``on_tick`` is called every ``interval`` seconds, and an ending it returns is the run's. ``stopping`` returns
    whether the trainers were asked to save and end.
    """
    while True:
        ending = on_tick()
        reap()
        ending = ending or find_ending(groups, stopping())
        if ending is not None:
            return ending
        time.sleep(interval)


def find_ending(groups: Sequence[Group], stopping: bool) -> Ending | None:
    """Return how the run ends by what is gone of its processes, or None.

    SIGTERM comes to every process of a cancelled job: while they stop, only the ranks, which save, determine the
    ending, and what started them may end before them.
    """
    trainers = next((group for group in groups if group.process.trains), None)
    done = trainers is not None and not trainers.alive() and trainers.exit_code() == 0
    # The others first: a rank fails as soon as its server is gone, and would take the blame.
    for group in groups:
        if not group.process.trains and not stopping and not done and (lost := group.lost()):
            return Ending(shell_code(lost.code) or 1, str(lost), log=group.log, lost=group.process)
    if trainers is None:
        return None
    ending = _rank_ending(trainers, stopping)
    if ending is not None or (stopping and trainers.alive()):
        return ending
    lost = trainers.lost()
    if lost is None or lost.code == 0:
        return None if lost is None else Ending(0)
    return _rank_ending(trainers, stopping=False) or Ending(shell_code(lost.code) or 1, str(lost), log=trainers.log)


def _rank_ending(trainers: Group, stopping: bool) -> Ending | None:
    """Return the failure of the rank that failed first; a rank gone without an exit in its record was killed.

    A killed rank comes before those that recorded an error, which may have failed for the loss of it. Last come those
    that SIGTERM ended: with it torch's elastic agent ends the rest.
    """
    failures: list[tuple[int, float, Ending]] = []
    for rank in trainers.ranks():
        record, under = rank.record, rank.under
        if record.get("exit"):
            if record["exit"] == EXIT_STOPPED and not stopping and under.killed():
                return None  # nobody asked: SIGTERM by the kernel ended the rank, since accelerate was killed
            failed_rank = None if record["exit"] == EXIT_STOPPED else record["rank"]
            cause = f"rank {record['rank']}: {record['cause']}"
            failures.append((1, record["time"], Ending(record["exit"], cause, failed_rank, under.log)))
        elif rank.gone:
            if under.killed():
                return None  # accelerate was killed, and its ranks with it
            code = under.code_of_rank(record["pid"])
            where = f" on node {record['node']}" if record.get("node") else ""
            cause = f"rank {record['rank']} (pid {record['pid']}{where}) {_how(code)}"
            ending = Ending(shell_code(code) or 1, cause, record["rank"], under.log)
            failures.append((2 if code in (None, -signal.SIGTERM) else 0, time.time(), ending))
    return min(failures, key=lambda failure: failure[:2])[2] if failures else None


def _code_printed_by_accelerate(log: Path, pid: int) -> int | None:
    """Return the exit code that torch's elastic agent or accelerate's simple launcher printed for its child."""
    text = tail(log, 2000)
    if match := re.search(rf"exitcode\s*:\s*(-?\d+) \(pid: {pid}\)", text):
        return int(match[1])
    match = re.search(r"died with <Signals\.\w+: (\d+)>", text)
    return -int(match[1]) if match else None


def _how(code: int | None) -> str:
    if code is None:
        return "died or was killed"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def shell_code(code: int | None) -> int | None:
    """Return an exit code as a shell reports it: 128+n for signal n."""
    return 128 - code if code is not None and code < 0 else code


def tail(log: Path, lines: int = _LAST_LINES) -> str:
    """Return the last lines of a log, secrets masked; nothing where it cannot be read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - lines * 400))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return masked("\n".join(text.splitlines()[-lines:]))
