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

import psutil

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.commands import Process
from grpo_recipes.launch.descendants import OWN_CHILDREN, descendants, is_alive, reap
from grpo_recipes.launch.environment import Scratch
from grpo_recipes.launch.rundir import read_json
from grpo_recipes.secrets import masked

_COMMAND_NAMES = {"server": "the vLLM API server", "trainer": "accelerate launch"}
_LAST_LINES = 50


@dataclass(frozen=True)
class Ending:
    """How a run, or one of its processes, ended.

    Attributes:
        code: exit code.
        cause: one line: who and why; empty after success.
        failed_rank: rank that failed first, or None.
        log: log whose last lines explain it, or None.
    """

    code: int
    cause: str = ""
    failed_rank: int | None = None
    log: Path | None = None


@dataclass(frozen=True)
class Lost:
    """A process that is gone, what it was, and its exit code where one is known."""

    pid: int | None
    name: str
    code: int | None


class Child:
    """One process of the plan under its warden."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch):
        self.role = process.role
        self.log = Path(process.log).absolute()
        self._record = run_dir / "processes" / f"{self.role}.json"
        self._record.unlink(missing_ok=True)
        warden = [
            sys.executable, "-m", "grpo_recipes.launch.warden", "--role", self.role, "--run-dir", str(run_dir),
            "--scratch", str(scratch.disk), str(scratch.memory), "--launcher", str(os.getpid()),
            "--log", str(self.log), "--", *process.argv,
        ]  # fmt: skip
        self._popen = subprocess.Popen(warden, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
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
    trainer: Child, server: Child | None, run_dir: Path, on_tick: Callable[[], None], interval: float = 0.2
) -> Ending:
    """Watch until the trainers are done or something dies.

    Returns:
        How it ended; the first process found dead is the cause.
    """
    while True:
        on_tick()
        reap()
        # The server first: a rank fails as soon as its server is gone, and would take the blame.
        ending = _server_ending(server, trainer) if server is not None else None
        ending = ending or _rank_ending(trainer, run_dir) or _trainer_ending(trainer, run_dir)
        if ending is not None:
            return ending
        time.sleep(interval)


def _server_ending(server: Child, trainer: Child) -> Ending | None:
    lost = server.lost()
    if lost is None or (not trainer.alive() and trainer.exit_code() == 0):
        return None
    return Ending(shell_code(lost.code) or 1, f"{lost.name} (pid {lost.pid}) {_how(lost.code)}", log=server.log)


def _trainer_ending(trainer: Child, run_dir: Path) -> Ending | None:
    lost = trainer.lost()
    if lost is None:
        return None
    if lost.code == 0:
        return Ending(0)
    ranked = _rank_ending(trainer, run_dir)
    if ranked is not None:
        return ranked
    return Ending(shell_code(lost.code) or 1, f"{lost.name} (pid {lost.pid}) {_how(lost.code)}", log=trainer.log)


def _rank_ending(trainer: Child, run_dir: Path) -> Ending | None:
    """The rank that failed first, by the ranks' records; a rank that is gone without an exit in its record was killed.

    A killed rank comes before those that recorded an error, which may have failed for the loss of it; last come those
    that SIGTERM ended, with which torch's agent ends the rest.
    """
    failures: list[tuple[int, float, Ending]] = []
    for path in sorted((run_dir / "processes").glob("rank_*.json")):
        record = read_json(path) or {}
        if record.get("exit"):
            failed_rank = None if record["exit"] == EXIT_STOPPED else record["rank"]
            cause = f"rank {record['rank']}: {record['cause']}"
            failures.append((1, record["time"], Ending(record["exit"], cause, failed_rank, trainer.log)))
        elif "exit" not in record and not is_alive(record["pid"]):
            if trainer.killed():
                return None  # accelerate was killed, and its ranks with it
            code = _code_of_killed(record["pid"], trainer)
            cause = f"rank {record['rank']} (pid {record['pid']}) {_how(code)}"
            ending = Ending(shell_code(code) or 1, cause, record["rank"], trainer.log)
            failures.append((2 if code in (None, -signal.SIGTERM) else 0, time.time(), ending))
    return min(failures, key=lambda failure: failure[:2])[2] if failures else None


def _code_of_killed(pid: int, trainer: Child) -> int | None:
    """Only a parent learns how a process died: wait until accelerate has told."""
    deadline = time.monotonic() + 5
    while (code := _code_told_by_accelerate(trainer.log, pid)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return code


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
