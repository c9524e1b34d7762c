"""Starting the plan's processes, watching them, and saying which one ended the run."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
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

_COMMAND_NAMES = {"server": "the vLLM API server", "trainer": "accelerate launch"}
_LAST_LINES = 50
_WARDEN_SECONDS = 15.0  # a warden whose command is gone ends the rest within its own grace


@dataclass(frozen=True)
class Ending:
    """How a run, or one of its processes, ended.

    Attributes:
        code: exit code.
        cause: one line: who and why; empty after success.
        failed_rank: rank that failed first, or None.
        log: log whose last lines explain it, or None.
        of_server: whether it was the server that was lost, and not a trainer.
    """

    code: int
    cause: str = ""
    failed_rank: int | None = None
    log: Path | None = None
    of_server: bool = False


@dataclass(frozen=True)
class Lost:
    """A process that is gone, what it was, and its exit code where one is known."""

    pid: int | None
    name: str
    code: int | None


@dataclass(frozen=True)
class RankSeen:
    """A rank by its record.

    Attributes:
        record: ``processes/rank_<n>.json``.
        gone: whether its process is gone without an exit in the record.
        under: what started it.
    """

    record: dict[str, Any]
    gone: bool
    under: RankStarter


class RankStarter(Protocol):
    """What runs ranks: ``accelerate launch`` here or on another node."""

    log: Path

    def killed(self) -> bool:
        """Whether the command itself was ended by a signal."""

    def code_of_rank(self, pid: int) -> int | None:
        """How a rank that is gone died, where that can be known."""


class Trainer(Protocol):
    """The trainers: one ``Child``, or those of several nodes."""

    log: Path

    def alive(self) -> bool:
        """Whether any of them runs."""

    def exit_code(self) -> int | None:
        """The exit code, once all have ended."""

    def lost(self) -> Lost | None:
        """What of it is gone."""

    def ranks(self) -> list[RankSeen]:
        """Its ranks, by their records."""

    def end(self, grace: float = 3.0) -> None:
        """End it and all it started."""


class Child:
    """One process of the plan under its warden."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch):
        self.role = process.role
        self.log = Path(process.log).absolute()
        self._node = process.node
        self._records = run_dir / "processes"
        self._record = self._records / f"{process.name}.json"
        self._record.unlink(missing_ok=True)
        warden = [
            sys.executable, "-m", "grpo_recipes.launch.process_guard", "--role", process.name,
            "--run-dir", str(run_dir), "--scratch", str(scratch.disk), str(scratch.memory),
            "--launcher", str(os.getpid()), "--log", str(self.log), "--node", str(process.node), "--", *process.argv,
        ]  # fmt: skip
        self._popen = subprocess.Popen(
            warden, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, pass_fds=scratch.locks
        )
        OWN_CHILDREN.add(self._popen.pid)
        self.warden_pid = self._popen.pid
        self._seen: dict[int, str] = {}

    def alive(self) -> bool:
        """Whether the warden, and so the process, still runs."""
        return self._popen.poll() is None

    def command_pid(self) -> int | None:
        """Pid of the command under the warden, once started."""
        record = read_json(self._record)
        return int(record["pid"]) if record else None

    def exit_code(self) -> int | None:
        """Exit code of the command as subprocess tells it (negative for a signal), once it ended."""
        return (read_json(self._record) or {}).get("exit")

    def lost(self) -> Lost | None:
        """What of this child was seen alive and is gone: the process to blame, not those it took along."""
        gone = [pid for pid in self._seen if not is_alive(pid)]
        if not gone:
            self._look()
            return None if self.alive() else Lost(self.command_pid(), _COMMAND_NAMES[self.role], self.exit_code())
        command = self.command_pid()
        code = self._settled_exit_code() if command in gone else None
        others = [pid for pid in gone if pid != command]
        if others and (code is None or code >= 0):
            return Lost(others[0], self._seen[others[0]], None)
        return Lost(command, _COMMAND_NAMES[self.role], code)

    def _settled_exit_code(self) -> int | None:
        """The command's exit code; its warden writes it within a tick of its death."""
        deadline = time.monotonic() + 2
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.exit_code()

    def killed(self) -> bool:
        """Whether the command itself was ended by a signal, given a moment for its warden to notice."""
        deadline = time.monotonic() + 0.3
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return (self.exit_code() or 0) < 0

    def end(self, grace: float = 3.0) -> None:
        """End the command and all it started, then wait for the warden to go."""
        tree = descendants(self.warden_pid)
        end_all(tree, grace)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(_WARDEN_SECONDS)
        end_all([psutil.Process(self.warden_pid)] if self.alive() else [], 0)

    def ranks(self) -> list[RankSeen]:
        """The ranks of this node that have told who they are."""
        records = (read_json(path) or {} for path in sorted(self._records.glob("rank_*.json")))
        return [
            RankSeen(record, "exit" not in record and not is_alive(record["pid"]), self)
            for record in records
            if record and record.get("node", 0) == self._node
        ]

    def code_of_rank(self, pid: int) -> int | None:
        """How a rank that is gone died: only a parent learns it, so wait until accelerate has told."""
        deadline = time.monotonic() + 5
        while (code := _code_told_by_accelerate(self.log, pid)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return code

    def _look(self) -> None:
        command = self.command_pid()
        if command is None or not is_alive(command):
            return
        self._seen.setdefault(command, _COMMAND_NAMES[self.role])
        if self.role != "server":
            return
        for child in descendants(command):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("VLLM::"):
                    self._seen.setdefault(child.pid, f"the vLLM engine process {child.name().removeprefix('VLLM::')}")


def wait_for_trainer(
    trainer: Trainer,
    server: Child | None,
    on_tick: Callable[[], Ending | None],
    stopping: Callable[[], bool] = lambda: False,
    interval: float = 0.2,
) -> Ending:
    """Watch until the trainers are done or something dies.

    Args:
        trainer: the trainers.
        server: their server, or None.
        on_tick: called every time around; an ending it returns is that of the run.
        stopping: whether the trainers are asked to save and end. SIGTERM comes to every process of a cancelled job:
            then only the ranks, which save, say how the run ends.
        interval: seconds between two looks.

    Returns:
        How it ended; the first process found dead is the cause.
    """
    while True:
        ending = on_tick()
        reap()
        # The server first: a rank fails as soon as its server is gone, and would take the blame.
        if ending is None and server is not None and not stopping():
            ending = _server_ending(server, trainer)
        ending = ending or trainer_ending(trainer, stopping())
        if ending is not None:
            return ending
        time.sleep(interval)


def trainer_ending(trainer: Trainer, stopping: bool = False) -> Ending | None:
    """How the trainers ended, or None; while they are stopping, what started the ranks may go before them."""
    ending = _rank_ending(trainer, stopping)
    if ending is None and not (stopping and trainer.alive()):
        ending = _command_ending(trainer)
    return ending


def _server_ending(server: Child, trainer: Trainer) -> Ending | None:
    lost = server.lost()
    if lost is None or (not trainer.alive() and trainer.exit_code() == 0):
        return None
    cause = f"{lost.name} (pid {lost.pid}) {_how(lost.code)}"
    return Ending(shell_code(lost.code) or 1, cause, log=server.log, of_server=True)


def _command_ending(trainer: Trainer) -> Ending | None:
    lost = trainer.lost()
    if lost is None:
        return None
    if lost.code == 0:
        return Ending(0)
    ranked = _rank_ending(trainer, stopping=False)
    if ranked is not None:
        return ranked
    return Ending(shell_code(lost.code) or 1, f"{lost.name} (pid {lost.pid}) {_how(lost.code)}", log=trainer.log)


def _rank_ending(trainer: Trainer, stopping: bool) -> Ending | None:
    """The rank that failed first, by the ranks' records; a rank that is gone without an exit in its record was killed.

    A killed rank comes before those that recorded an error, which may have failed for the loss of it; last come those
    that SIGTERM ended, with which torch's agent ends the rest.
    """
    failures: list[tuple[int, float, Ending]] = []
    for rank in trainer.ranks():
        record, under = rank.record, rank.under
        if record.get("exit"):
            if record["exit"] == EXIT_STOPPED and not stopping and under.killed():
                return None  # nobody asked: the kernel told the rank, by SIGTERM, that accelerate was killed
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


def _code_told_by_accelerate(log: Path, pid: int) -> int | None:
    """What torch's agent or accelerate's simple launcher printed of its child's death."""
    text = tail(log, 2000)
    match = re.search(rf"exitcode\s*:\s*(-?\d+) \(pid: {pid}\)", text)
    match = match or re.search(r"died with <Signals\.\w+: (\d+)>", text)
    if match is None:
        return None
    return int(match[1]) if match[1].startswith("-") or "exitcode" in match[0] else -int(match[1])


def _how(code: int | None) -> str:
    if code is None:
        return "died or was killed"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def shell_code(code: int | None) -> int | None:
    """An exit code as a shell tells it: 128+n for signal n."""
    return 128 - code if code is not None and code < 0 else code


def tail(log: Path, lines: int = _LAST_LINES) -> str:
    """The last lines of a log, secrets masked."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - lines * 400))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return masked("\n".join(text.splitlines()[-lines:]))
