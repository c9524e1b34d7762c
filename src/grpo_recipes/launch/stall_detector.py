"""Who stands still: a rank that stays in one phase, a server that makes no token while it is waited for."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_recipes.paths import shown
from grpo_recipes.plan.server import Activity
from grpo_recipes.process.tree import descendants, is_alive
from grpo_recipes.runs.rundir import dump_request, read_json

# Phases that may last longer than `stall_timeout`: a whole evaluation, a save to a slow disk, benchmarks at the end.
_MULTIPLES = {"save": 2, "evaluate": 6, "end": 24}
_DUMP_SECONDS = 1.0


@dataclass(frozen=True)
class Phase:
    """What a rank does, by ``processes/phase_<rank>.json``.

    Attributes:
        rank: its number.
        name: start, sample, score, sync, update, save, evaluate or end.
        step: optimizer steps done.
        since: when it began, by the rank's clock; only compared with itself, since clocks jump and differ.
    """

    rank: int
    name: str
    step: int
    since: float

    def __str__(self) -> str:
        return f"phase {self.name} after step {self.step}"


def read_phases(run_dir: Path) -> list[Phase]:
    """The phase of every rank that has told one, by rank."""
    found = []
    for path in (run_dir / "processes").glob("phase_*.json"):
        record = read_json(path)
        if record is not None:
            rank = int(path.stem.removeprefix("phase_"))
            found.append(Phase(rank, record["phase"], record["step"], record["since"]))
    return sorted(found, key=lambda phase: phase.rank)


class StandingRank:
    """Notices a rank that stays in one phase for longer than ``limit`` seconds, or the phase's multiple of it.

    A rank that has told no phase yet is in ``start`` since the first look.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._entered: dict[Phase, float] = {}

    def look(self, phases: list[Phase], now: float, stopped: Collection[int] = ()) -> tuple[Phase, float] | None:
        """The rank that stands, and for how many seconds.

        Of several it is one that is stopped by a signal, or the one that is furthest behind.

        Args:
            phases: of all ranks, now.
            now: monotonic seconds.
            stopped: ranks whose processes are stopped.
        """
        phases = phases or [Phase(0, "start", 0, 0.0)]
        self._entered = {phase: self._entered.get(phase, now) for phase in phases}
        late = [phase for phase in phases if now - self._entered[phase] > self._limit * _MULTIPLES.get(phase.name, 1)]
        if not late:
            return None
        # The others have come as far as they could without it, and entered the phase they wait in later.
        first = min(late, key=lambda phase: (phase.rank not in stopped, phase.step, self._entered[phase], phase.rank))
        return first, now - self._entered[first]


class StandingServer:
    """Notices a server that does not answer, or makes no token while a request is out, for ``limit`` seconds.

    A rank that begins a phase counts as movement: a load of weights makes no token, and is followed by sampling.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seen: object = None
        self._moved: float | None = None

    def look(self, activity: Activity | None, phases: list[Phase], now: float) -> float | None:
        """For how many seconds it has stood still, once that is too long.

        Args:
            activity: its counters, None where it gave no answer.
            phases: of all ranks, now.
            now: monotonic seconds.
        """
        if self._moved is None:
            self._moved = now
        if activity is not None:
            seen = (activity.tokens, phases) if activity.requests else None
            if seen is None or seen != self._seen:
                self._moved = now
            self._seen = seen
        return now - self._moved if now - self._moved > self._limit else None


def dump_stacks(run_dir: Path, pids: Iterable[int]) -> str:
    """Have processes add the stacks of their threads to ``stacks/`` in the run directory.

    A process that has not registered for the signal is ended by it, and one that is stopped cannot answer: this is for
    processes that are about to be ended.

    Returns:
        Where the stacks are, for the end of a sentence; which processes are stopped.
    """
    dump_request(run_dir).touch()  # for the agents of other nodes
    began = time.time()
    stopped = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            if is_stopped(pid):
                stopped.append(pid)
            os.kill(pid, signal.SIGUSR2)
    time.sleep(_DUMP_SECONDS)
    folder = run_dir / "stacks"
    written = sorted(path.name for path in folder.glob("*.txt") if path.stat().st_mtime >= began - 1)
    said = f"; stacks of {', '.join(written)} in {shown(folder)}" if written else ""
    names = ", ".join(str(pid) for pid in stopped)
    return said + (f"; stopped by a signal (SIGSTOP): pid {names}" if stopped else "")


def rank_pids(run_dir: Path) -> dict[int, int]:
    """Pids of the ranks that live on this node, by rank."""
    records = (read_json(path) or {} for path in sorted((run_dir / "processes").glob("rank_*.json")))
    here = (record for record in records if "exit" not in record and record.get("node", 0) == 0)
    return {record["rank"]: record["pid"] for record in here if is_alive(record["pid"])}


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal (SIGSTOP)."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def server_pids(command: int | None) -> list[int]:
    """Pids of the server's processes, engine and workers first."""
    if command is None:
        return []
    return [*(process.pid for process in descendants(command)), command]


def stale_compile_lock(folder: Path, before: float) -> str | None:
    """What a rank that does not come past its start most likely waits for: another compilation that was killed.

    Args:
        folder: TORCH_EXTENSIONS_DIR.
        before: when this attempt began, in seconds since the epoch: an older lock is nobody's.
    """
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime < before:
                return f"most likely it waits for the lock of a compilation that was killed: rm {shown(lock)}"
    return None
