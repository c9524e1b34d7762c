"""What the launcher looks at while an attempt runs: progress, requests to stop, the time limit, stalled processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.processes import Ending, Group, rank_pids
from grpo_recipes.launch.signals import StopSignals
from grpo_recipes.paths import shown
from grpo_recipes.plan.ports import Activity, generated_tokens
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.process.tree import descendants
from grpo_recipes.runs.health import Health
from grpo_recipes.runs.rundir import Progress, json_mapping, read_metrics
from grpo_recipes.slurm.client import Walltime, job_end_time

_PHASE_SECONDS = 1.0  # between two looks at the ranks' phases
_SERVER_SECONDS = 5.0  # between two requests to the server, at most
_DUMP_SECONDS = 1.0
# Phases that may last longer than `stall_timeout`: a whole evaluation, a save to a slow disk, benchmarks at the end.
_MULTIPLES = {"save": 2, "evaluate": 6, "end": 24}


@dataclass(frozen=True)
class Phase:
    """What a rank does, by ``processes/phase_<rank>.json``."""

    rank: int
    name: str  # start, sample, score, sync, update, save, evaluate or end
    step: int  # optimizer steps done
    since: float  # by the rank's clock; only compared with itself, since clocks jump and differ

    def __str__(self) -> str:
        return f"phase {self.name} after step {self.step}"


def read_phases(run_dir: Path) -> list[Phase]:
    """Return the phase of every rank that has written one, by rank."""
    records = {path: json_mapping(path) for path in (run_dir / "processes").glob("phase_*.json")}
    phases = [
        Phase(int(path.stem.removeprefix("phase_")), record["phase"], record["step"], record["since"])
        for path, record in records.items()
        if record
    ]
    return sorted(phases, key=lambda phase: phase.rank)


class RankStallDetector:
    """Finds a rank that stays in one phase for longer than ``limit`` seconds, or the phase's multiple of it."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._entered: dict[Phase, float] = {}

    def look(self, phases: list[Phase], now: float, stopped: Collection[int] = ()) -> tuple[Phase, float] | None:
        """Return the stalled rank's phase and its seconds in it, by the phases of all ranks at ``now`` (monotonic).

        Of several it is one of ``stopped``, the ranks that a signal stopped, or the one that is furthest behind. Before
        any rank has written a phase, rank 0 counts as in ``start`` since the first look.
        """
        phases = phases or [Phase(0, "start", 0, 0.0)]
        self._entered = {phase: self._entered.get(phase, now) for phase in phases}
        late = [phase for phase in phases if now - self._entered[phase] > self._limit * _MULTIPLES.get(phase.name, 1)]
        if not late:
            return None
        # The others have come as far as they could without it, and entered the phase they wait in later.
        first = min(late, key=lambda phase: (phase.rank not in stopped, phase.step, self._entered[phase], phase.rank))
        return first, now - self._entered[first]


class ServerStallDetector:
    """Finds a server that does not answer, or makes no token while a request is out, for ``limit`` seconds.

    A rank that begins a phase counts as movement: a load of weights makes no token, and is followed by sampling.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seen: object = None
        self._moved: float | None = None

    def look(self, activity: Activity | None, phases: list[Phase], now: float) -> float | None:
        """Return the seconds since it last moved, once they exceed the limit.

        ``activity`` is None where the server did not answer; ``phases`` are those of all ranks at ``now`` (monotonic).
        """
        if self._moved is None:
            self._moved = now
        if activity is not None:
            seen = (activity.tokens, phases) if activity.requests else None
            if seen is None or seen != self._seen:
                self._moved = now
            self._seen = seen
        return now - self._moved if now - self._moved > self._limit else None


class Monitor:
    """Everything that is looked at again and again, for one attempt."""

    def __init__(self, attempt: Attempt, stop: StopSignals) -> None:
        self.groups: dict[str, Group] = {}  # the processes that are ready, by role
        self._attempt = attempt
        self._stop = stop
        self._folder = attempt.run.folder
        self._walltime = Walltime(lambda: job_end_time(os.environ))
        for row in read_metrics(self._folder):
            self._walltime.observe(row)
        self._began = time.time()
        self._next_phases = self._next_server = 0.0
        self._stop_passed_on = False
        stop.can_save = lambda: any(phase.name != "start" for phase in self._phases())
        self.start_again()

    def start_again(self) -> None:
        """Forget what was seen of processes that are gone, and of rows that were moved aside."""
        self.stepped = False  # whether a step was completed since then
        self._progress = Progress(self._folder)
        self._health = Health(self._attempt.recipe.__getitem__)
        for row in read_metrics(self._folder):
            self._health.add(row)
        self._rank_stalls = RankStallDetector(self._attempt.recipe["stall_timeout"])
        self._server_stalls = ServerStallDetector(self._attempt.recipe["server_stall_timeout"])

    def stopping(self) -> bool:
        """Return whether the trainers were asked to save and end."""
        return self._stop.requested

    def tick(self) -> Ending | None:
        """Look at everything that is due; return the ending that a stalled process causes, or raise StoppedAtOnce."""
        self.show_progress()
        if self._attempt.publisher:
            self._attempt.publisher.tick()
        now = time.monotonic()
        ending = None
        if now >= self._next_phases:
            self._next_phases = now + _PHASE_SECONDS
            phases = self._phases()
            if not self._stop.requested and (why := self._walltime.due()):
                self._stop.out_of_time(why)
            if trainers := self._trainers():
                ending = self._server_stall(phases, now) or self._rank_stall(trainers, phases, now)
        self._stop.look()
        if self._stop.requested and not self._stop_passed_on:
            self._stop_passed_on = True
            self._attempt.workers.send("stop")
        return ending

    def show_progress(self) -> None:
        """Print a line for each step that was completed, and a note where its metrics give reason to."""
        for row in self._progress.new_rows():
            self.stepped = True
            print_line(self._progress.line(row))
            self._walltime.observe(row)
            for notice in self._health.add(row):
                say(f"note: {notice}")

    def _trainers(self) -> Group | None:
        return next((group for group in self.groups.values() if group.process.trains), None)

    def _server(self) -> Group | None:
        return next((group for group in self.groups.values() if group.process.ready == "serving"), None)

    def _phases(self) -> list[Phase]:
        return read_phases(self._folder) if self._trainers() else []

    def _server_stall(self, phases: list[Phase], now: float) -> Ending | None:
        limit, server = self._attempt.recipe["server_stall_timeout"], self._server()
        if server is None or self._stop.requested or now < self._next_server:
            return None
        self._next_server = now + min(_SERVER_SECONDS, limit / 5)
        activity = generated_tokens(*self._attempt.server_address())
        seconds = self._server_stalls.look(activity, phases, time.monotonic())
        if seconds is None:
            return None
        stacks = self._dump_stacks([])
        cause = f"the vLLM server has made no token for {seconds:.0f} s (server_stall_timeout {limit:g}){stacks}"
        return Ending(1, cause, log=server.log, lost=server.process)

    def _rank_stall(self, trainers: Group, phases: list[Phase], now: float) -> Ending | None:
        ranks = rank_pids(self._folder)
        late = self._rank_stalls.look(phases, now, [rank for rank, pid in ranks.items() if is_stopped(pid)])
        if late is None:
            return None
        phase, seconds = late
        limit = f"stall_timeout {self._attempt.recipe['stall_timeout']:g}"
        cause = f"rank {phase.rank} has been in {phase} for {seconds:.0f} s ({limit})"
        extensions = Path(self._attempt.environment.get("TORCH_EXTENSIONS_DIR", ""))
        lock = stale_compile_lock(extensions, self._began) if phase.name == "start" else None
        self._attempt.workers.send("stacks")
        cause += self._dump_stacks(ranks.values())
        return Ending(1, cause + (f"; {lock}" if lock else ""), phase.rank, trainers.log)

    def _dump_stacks(self, pids: Iterable[int]) -> str:
        """Dump the stacks of processes, and those of the server, its engine and workers before its command."""
        server = self._server()
        command = server.state().pid if server else None
        of_server = [*(process.pid for process in descendants(command)), command] if command else []
        return dump_stacks(self._folder, [*pids, *of_server])


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def dump_stacks(run_dir: Path, pids: Iterable[int]) -> str:
    """Have processes add the stacks of their threads to ``stacks/``; return where, and which of them are stopped.

    A process that has not registered for the signal is ended by it: this is for processes that are about to be ended.
    """
    began = time.time()
    pids = list(pids)
    stopped = [str(pid) for pid in pids if is_stopped(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(_DUMP_SECONDS)
    folder = run_dir / "stacks"
    written = sorted(path.name for path in folder.glob("*.txt") if path.stat().st_mtime >= began - 1)
    where = f"; stacks of {', '.join(written)} in {shown(folder)}" if written else ""
    return where + (f"; stopped by a signal (SIGSTOP): pid {', '.join(stopped)}" if stopped else "")


def stale_compile_lock(folder: Path, before: float) -> str | None:
    """Return what a rank that stays in its start most likely waits for: the lock of a compilation that was killed.

    ``folder`` is TORCH_EXTENSIONS_DIR; nobody holds a lock from ``before`` this attempt began (``time.time()``).
    """
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime < before:
                return f"most likely it waits for the lock of a compilation that was killed: rm {shown(lock)}"
    return None
