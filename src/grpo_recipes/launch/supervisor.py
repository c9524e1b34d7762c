"""Starting the plan's processes, watching them, and saying which one ended the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_recipes.launch.descendants import OWN_CHILDREN, is_alive, reap
from grpo_recipes.launch.environment import Scratch
from grpo_recipes.launch.plan import Process
from grpo_recipes.launch.rundir import read_json
from grpo_recipes.secrets import masked

_COMMAND_NAMES = {"server": "the vLLM API server", "trainer": "accelerate launch"}
_LAST_LINES = 20


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


class Child:
    """One process of the plan under its warden."""

    def __init__(self, process: Process, environment: dict[str, str], run_dir: Path, scratch: Scratch):
        self.role = process.role
        self.log = Path(process.log).absolute()
        self._record = run_dir / "processes" / f"{self.role}.json"
        self._record.unlink(missing_ok=True)
        warden = [
            sys.executable, "-m", "grpo_recipes.launch.warden", "--role", self.role, "--run-dir", str(run_dir),
            "--scratch", str(scratch.disk), str(scratch.memory), "--launcher", str(os.getpid()), "--", *process.argv,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self._popen = subprocess.Popen(
                warden, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
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

    def lost(self) -> tuple[int, str] | None:
        """A process of this child that was seen alive and is gone, with what it was; the command itself last."""
        gone = [(pid, name) for pid, name in self._seen.items() if not is_alive(pid)]
        command = self.command_pid()
        record = read_json(self._record) or {}
        if command and record.get("exit", 0) < 0 and any(pid == command for pid, _ in gone):
            return command, _COMMAND_NAMES[self.role]  # killed itself, it took the others along
        gone.sort(key=lambda item: item[0] == command)
        self._look()
        return gone[0] if gone else None

    def exit_code(self) -> int | None:
        """Exit code of the command as subprocess tells it (negative for a signal), once it ended."""
        return (read_json(self._record) or {}).get("exit")

    def _look(self) -> None:
        command = self.command_pid()
        if command is None or not is_alive(command):
            return
        self._seen.setdefault(command, _COMMAND_NAMES[self.role])
        if self.role != "server":
            return
        for child in psutil.Process(command).children(recursive=True):
            try:
                if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                    self._seen.setdefault(child.pid, "the vLLM engine process")
            except psutil.NoSuchProcess:
                continue


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
        ending = _rank_ending(trainer, run_dir) or _trainer_ending(trainer, run_dir)
        if ending is not None:
            return ending
        if server is not None:
            ending = _server_ending(server, trainer)
            if ending is not None:
                return ending
        time.sleep(interval)


def _server_ending(server: Child, trainer: Child) -> Ending | None:
    lost = server.lost()
    if lost is None and server.alive():
        return None
    if not trainer.alive() and trainer.exit_code() == 0:
        return None
    code = server.exit_code()
    who = f"{lost[1]} (pid {lost[0]})" if lost else "the vLLM server"
    return Ending(
        _shell_code(code) or 1,
        f"{who} {_how(code if lost is None or lost[0] == server.command_pid() else None)}",
        log=server.log,
    )


def _trainer_ending(trainer: Child, run_dir: Path) -> Ending | None:
    lost = trainer.lost()
    if trainer.alive() and lost is None:
        return None
    code = trainer.exit_code()
    if code is None:
        deadline = time.monotonic() + 5  # the warden writes it within a tick
        while trainer.alive() and trainer.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code = trainer.exit_code()
    if code == 0:
        return Ending(0)
    if code is not None and code > 0:
        ranked = _rank_ending(trainer, run_dir)
        if ranked is not None:
            return ranked
    return Ending(
        _shell_code(code) or 1, f"accelerate launch (pid {trainer.command_pid()}) {_how(code)}", log=trainer.log
    )


def _rank_ending(trainer: Child, run_dir: Path) -> Ending | None:
    """The first rank that failed, by its record; a rank that is gone without an exit in its record was killed."""
    if (trainer.exit_code() or 0) < 0:
        return None  # accelerate itself was killed; its ranks followed
    failures = []
    for path in sorted((run_dir / "processes").glob("rank_*.json")):
        record = read_json(path) or {}
        rank = int(path.stem.removeprefix("rank_"))
        if record.get("exit"):
            failures.append(
                (record["time"], Ending(record["exit"], f"rank {rank}: {record['cause']}", rank, trainer.log))
            )
        elif "exit" not in record and not is_alive(record["pid"]):
            failures.append((time.time(), _killed_rank(rank, record["pid"], trainer, run_dir)))
    return min(failures, key=lambda failure: failure[0])[1] if failures else None


def _killed_rank(rank: int, pid: int, trainer: Child, run_dir: Path) -> Ending:
    deadline = time.monotonic() + 3
    code = None
    while code is None and time.monotonic() < deadline:
        if "exit" in (read_json(run_dir / "processes" / f"rank_{rank}.json") or {}):
            break
        code = _code_told_by_accelerate(trainer.log, pid)
        time.sleep(0.1)
    return Ending(_shell_code(code) or 1, f"rank {rank} (pid {pid}) {_how(code)}", rank, trainer.log)


def _code_told_by_accelerate(log: Path, pid: int) -> int | None:
    """Only a parent learns an exit code: torch's agent and accelerate's simple launcher print theirs."""
    text = tail(log, 400)
    match = re.search(rf"exitcode\s*:\s*(-?\d+) \(pid: {pid}\)", text)
    match = match or re.search(r"died with <Signals\.\w+: (\d+)>", text)
    if match is None:
        return None
    return int(match[1]) if match[1].startswith("-") or "exitcode" in match[0] else -int(match[1])


def _how(code: int | None) -> str:
    if code is None:
        return "was killed or died"
    return f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"


def _shell_code(code: int | None) -> int | None:
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
