"""What the launcher heeds while an attempt runs: signals, requests to stop, the time limit, progress, stalls."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import psutil

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.processes import Child, Ending, Group, newest_model, rank_pids
from grpo_recipes.paths import display_path
from grpo_recipes.plan.ports import Activity, read_activity
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.process.terminal import OUTPUT, WIDTH, columns
from grpo_recipes.process.tree import descendants
from grpo_recipes.runs.health import Health
from grpo_recipes.runs.progress import (
    Phase,
    Progress,
    RowReader,
    current_activity,
    evaluation_line,
    read_phases,
    sample_lines,
)
from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.slurm.client import Walltime, job_end_time, signal_lead

_PHASE_SECONDS = 1.0  # between two looks at the ranks' phases
_SERVER_SECONDS = 5.0  # between two requests to the server, at most
_DUMP_SECONDS = 1.0
_HOOK_SECONDS, _HOOK_SHARE = 30.0, 0.02  # between two calls of the hooks of a running run, and their most time
SYNC_PHASES = ("connect", "sync")  # `weight_sync_timeout`: the rendezvous for the weights, and each transfer
# Phases that may last longer than `stall_timeout`: a whole evaluation, a save to a slow disk, benchmarks at the end.
_MULTIPLES = {"save": 2, "evaluate": 6, "end": 24}


class StoppedAtOnce(BaseException):
    """A request that ends the attempt where it stands; without ``signum`` it came as the file in the run directory."""

    def __init__(self, signum: int | None = None):
        self.signum = signum

    def ending(self) -> Ending:
        """Return code 75 for a request to save that came while there was nothing new to save, else 128+n."""
        if self.signum is None or self.signum == signal.SIGUSR1:
            return Ending(EXIT_STOPPED, "stopped on request before this attempt had anything to save")
        return Ending(128 + self.signum, f"stopped by {signal.Signals(self.signum).name}")


class StopSignals:
    """USR1 asks to save and run on in a new attempt; SIGTERM, SIGHUP, SIGINT (Ctrl-C) and SIGQUIT to save and end.

    While trainers have something to save they are asked by the file ``request``; before that a signal ends the attempt
    at once, and so does the same signal a second time, except USR1: Slurm sends that too where we have asked already.
    Within a second it counts as one: `timeout` sends SIGTERM to its child and then to its group.
    SIGTERM leaves the trainers only as long as Slurm usually leaves us before SIGKILL.
    """

    _signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    _term_grace_seconds = 20.0
    _one_signal_seconds = 1.0

    def __init__(self) -> None:
        self.request: Path | None = None  # the file that asks the trainers, once there is a run directory
        # Asked in the signal handler, since a step may have begun a moment ago.
        self.can_save: Callable[[], bool] = lambda: False
        self._before: dict[signal.Signals, Any] = {}
        self.seen: list[int] = []  # what came; USR1 also stands for the end of the job's time
        self._held = False
        self._came: dict[int, float] = {}  # when each signal came last
        self._deadline = float("inf")
        self._unsaid: list[str] = []  # a handler must not print: it may have interrupted a print

    def __enter__(self) -> StopSignals:
        for signum in self._signals:
            # nohup, or a shell's background job, has a signal ignored on purpose; training.sh has USR1 for us.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @property
    def requested(self) -> bool:
        """Whether the trainers are asked to save and end, by whomever."""
        return self.request is not None and self.request.exists()

    @property
    def wants_requeue(self) -> bool:
        """Whether the run is to go on in a new attempt: USR1 or the time limit came, and no signal to end it."""
        return set(self.seen) == {signal.SIGUSR1}

    def _handle(self, signum: int, _: object) -> None:
        now, again = time.monotonic(), signum in self.seen and signum != signal.SIGUSR1
        recent = now - self._came.get(signum, -math.inf) < self._one_signal_seconds
        self._came[signum] = now
        self.seen.append(signum)
        if self._held or (again and recent):
            return
        if self.request is None or again or not self.can_save():
            self._held = True  # another signal must not interrupt the clean-up that follows
            raise StoppedAtOnce(signum)
        if signum in (signal.SIGTERM, signal.SIGHUP):  # Slurm ends us soon
            self._deadline = min(self._deadline, time.monotonic() + self._term_grace_seconds)
        self._ask(signal.Signals(signum).name)

    def _ask(self, why: str) -> None:
        if not self.requested and self.request is not None:
            self.request.touch()
            self._unsaid.append(f"{why}: saving, then ending")

    def out_of_time(self, why: str) -> None:
        """Ask the trainers to save since the job's time is nearly over, as USR1 does."""
        self.seen.append(signal.SIGUSR1)
        self._ask(why)

    def look(self) -> None:
        """Print what was asked for; raise StoppedAtOnce when trainers take too long, or have nothing to save."""
        while self._unsaid:
            say(self._unsaid.pop(0))
        if time.monotonic() > self._deadline:
            raise StoppedAtOnce(signal.SIGTERM)
        if self.requested and not self.can_save():
            raise StoppedAtOnce()

    def hold(self) -> None:
        """From now on a signal only waits: a run directory is made whole, or not at all."""
        self._held = True

    def release(self, request: Path) -> None:
        """Act on signals again, and on one held back: the run directory is there, and ``request`` will be in it."""
        self.request = request
        self._held = False
        if self.seen:
            raise StoppedAtOnce(self.seen[-1])

    def ignore(self) -> None:
        """Ignore signals from now on: only the clean-up counts."""
        for signum in self._signals:
            signal.signal(signum, signal.SIG_IGN)


class RankStallDetector:
    """Finds a rank that stays in one phase for longer than ``limit`` seconds, or the phase's own limit."""

    def __init__(self, limit: float, sync_limit: float = math.inf) -> None:
        self._limits = {name: limit * many for name, many in _MULTIPLES.items()}
        self._limits |= dict.fromkeys(SYNC_PHASES, min(limit, sync_limit))
        self._limit = limit
        self._entered: dict[Phase, float] = {}

    def look(self, phases: list[Phase], now: float, stopped: Collection[int] = ()) -> tuple[Phase, float] | None:
        """Return the stalled rank's phase and its seconds in it, by the phases of all ranks at ``now`` (monotonic).

        Of several it is one of ``stopped``, the ranks that a signal stopped, or the one that is furthest behind. Before
        any rank has written a phase, rank 0 counts as in ``start`` since the first look.
        """
        phases = phases or [Phase(0, "start", 0, 0.0)]
        self._entered = {phase: self._entered.get(phase, now) for phase in phases}
        late = [phase for phase in phases if now - self._entered[phase] > self._limits.get(phase.name, self._limit)]
        if not late:
            return None
        # The others have come as far as they could without it, and entered the phase they wait in later.
        first = min(late, key=lambda phase: (phase.rank not in stopped, phase.step, self._entered[phase], phase.rank))
        return first, now - self._entered[first]


class ServerStallDetector:
    """Finds a server that does not answer, or makes no token while a request is out, for ``limit`` seconds."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._seen: object = None
        self._moved: float | None = None

    def look(self, activity: Activity | None, phases: list[Phase], now: float) -> float | None:
        """Return the seconds since it last moved, once that is too long; without ``activity`` it did not answer."""
        if self._moved is None:
            self._moved = now
        if activity is not None:
            # A rank that begins a phase counts as movement: a load of weights makes no token, and sampling follows it.
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
        self._walltime = Walltime(lambda: job_end_time(os.environ), signal_lead(os.environ))
        self._began = time.time()
        self._next_phases = self._next_server = self._next_hooks = 0.0
        self._hooks = threading.Thread()  # calls the hooks
        self._activity, self._active_since = ("", 0.0), time.monotonic()
        self._shown = -1  # the step of the sampled completion that was shown last, and how many there were
        self._samples = 0
        self._stop_passed_on = False
        stop.can_save = lambda: any(phase.name not in ("start", "connect") for phase in self._phases())
        self.start_again()

    def start_again(self) -> None:
        """Forget what was seen of processes that are gone, and of rows that were moved aside."""
        self.stepped = False  # whether a step was completed since then
        self._last = ""
        self._progress = Progress(self._folder)
        files = (self._folder / f"{name}.jsonl" for name in ("prompts", "eval", "samples"))
        self._prompts, self._evaluations, self._sampled = map(RowReader, files)
        self._health = Health(self._attempt.recipe.__getitem__)
        for row in read_metrics(self._folder):
            self._health.add(row)
            self._walltime.observe(row)
        recipe = self._attempt.recipe
        self._rank_stalls = RankStallDetector(recipe["stall_timeout"], recipe["weight_sync_timeout"])
        self._server_stalls = ServerStallDetector(self._attempt.recipe["server_stall_timeout"])

    def tick(self) -> Ending | None:
        """Look at everything that is due; return the ending that a stalled process causes, or raise StoppedAtOnce."""
        self.show_progress()
        now = time.monotonic()
        ending = None
        if now >= self._next_phases:
            self._next_phases = now + _PHASE_SECONDS
            phases = self._phases()
            self._show_activity(now)
            self._call_hooks(now)
            if note := self._walltime.note():
                say(note)
            if not self._stop.requested and (why := self._walltime.due()):
                self._stop.out_of_time(why)
            if trainers := self._trainers():
                ending = self._server_stall(phases, now) or self._rank_stall(trainers, phases, now)
        ending = ending or self._renewal()
        self._stop.look()
        if self._stop.requested and not self._stop_passed_on:
            self._stop_passed_on = True
            self._attempt.workers.send("stop")
        return ending

    def show_progress(self) -> None:
        """Print a line for each step and evaluation, notes where they give reason to, and a completion at times."""
        width = min(WIDTH, columns())
        for row in self._prompts.read_new():
            for text in row.get("said") or ():
                say(str(text))
        for row in self._progress.rows.read_new():
            self.stepped = True
            self._last = f"step {row['step']}/{row.get('max_steps', '?')} done"
            print_line(self._progress.line(row, width))
            self._walltime.observe(row)
            for notice in self._health.add(row):
                say(f"note: {notice}")
        for row in self._evaluations.read_new():
            print_line(evaluation_line(row))
        every = self._attempt.recipe["show_completion_steps"]
        for row in self._sampled.read_new():
            if every and (self._shown < 0 or row["step"] >= self._shown + every):
                for line in sample_lines(row, self._samples):
                    print_line(line)
                self._shown, self._samples = row["step"], self._samples + 1

    def _show_activity(self, now: float) -> None:
        """Print where the start of the run has come to; on a terminal show what goes on, and for how long."""
        (before, entered), seconds = self._activity, now - self._active_since
        what, since = self._activity = current_activity(self._folder)
        if what != before and not self.stepped:
            say(f"now {what}" + (f" ({before} took {seconds:.0f} s)" if before else ""))
        if what != before or (self.stepped and since != entered):
            self._active_since, seconds = now, 0.0
        OUTPUT.live(f"{what} {seconds:.0f} s" + (f", {self._last}" if self.stepped else ""))

    def _call_hooks(self, now: float) -> None:
        """Call the hooks of the running run from time to time, in a thread: a report can take seconds."""

        def call() -> None:
            self._attempt.hooks.on_progress(self._folder)
            self._next_hooks = now + max(_HOOK_SECONDS, (time.monotonic() - now) / _HOOK_SHARE)

        if self.stepped and now >= self._next_hooks and not self._hooks.is_alive():
            self._hooks = threading.Thread(target=call, daemon=True)
            self._hooks.start()

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
        host, port, token = self._attempt.server_address()
        child = server.members[0]
        owner = OwnListener(host, port, lambda: child.guard_pid) if isinstance(child, Child) else None
        activity = read_activity(host, port, token, owner)
        seconds = self._server_stalls.look(activity, phases, time.monotonic())
        if seconds is None:
            return None
        stacks = dump_stacks(self._folder, (), server)
        cause = f"the vLLM server has made no token for {seconds:.0f} s (server_stall_timeout {limit:g}){stacks}"
        return Ending(1, cause, log=server.log, lost=server.process)

    def _renewal(self) -> Ending | None:
        """Return the end of a server that is to be started again with a newer model."""
        server = self._server()
        if server is None or self._stop.requested:
            return None
        newest = newest_model(server.process, self._attempt.environment)
        if newest is None or newest in server.process.argv:
            return None
        return Ending(0, lost=server.process, renews=True)

    def _rank_stall(self, trainers: Group, phases: list[Phase], now: float) -> Ending | None:
        ranks = rank_pids(self._folder)
        if self._attempt.plan.mode == "server" and self._server() is None:  # which a start, or a sync, waits for
            phases = [phase for phase in phases if phase.name not in ("start", *SYNC_PHASES)]
            if not phases:
                return None
        late = self._rank_stalls.look(phases, now, [rank for rank, pid in ranks.items() if is_stopped(pid)])
        if late is None:
            return None
        phase, seconds = late
        cause = f"rank {phase.rank} has been in phase {phase.name} after step {phase.step} for {seconds:.0f} s"
        key = "weight_sync_timeout" if phase.name in SYNC_PHASES else "stall_timeout"
        cause += f" ({key} {self._attempt.recipe[key]:g})"
        if phase.name in SYNC_PHASES and (bridge := self._attempt.plan.bridge):
            cause += f" in the '{bridge}' bridge"
        extensions = Path(self._attempt.environment.get("TORCH_EXTENSIONS_DIR", ""))
        lock = stale_compile_lock(extensions, self._began) if phase.name == "start" else None
        self._attempt.workers.send("stacks")
        cause += dump_stacks(self._folder, ranks.values(), self._server())
        return Ending(1, cause + (f"; {lock}" if lock else ""), phase.rank, trainers.log)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped by a signal (SIGSTOP)."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def dump_stacks(run_dir: Path, ranks: Iterable[int], server: Group | None = None) -> str:
    """Have processes add the stacks of their threads to ``stacks/``; return where, and which of them are stopped."""
    # A process that has not registered for the signal is ended by it: all of them are about to be ended.
    began, pids = time.time(), list(ranks)
    if server and (command := server.state().pid):
        pids += [*(process.pid for process in descendants(command)), command]  # engine and workers before the command
    stopped = [str(pid) for pid in pids if is_stopped(pid)]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(_DUMP_SECONDS)
    folder = run_dir / "stacks"
    written = sorted(path.name for path in folder.glob("*.txt") if path.stat().st_mtime >= began - 1)
    where = f"; stacks of {', '.join(written)} in {display_path(folder)}" if written else ""
    return where + (f"; stopped by a signal (SIGSTOP): pid {', '.join(stopped)}" if stopped else "")


def stale_compile_lock(folder: Path, before: float) -> str | None:
    """Return which lock in TORCH_EXTENSIONS_DIR, older than this attempt (``time.time()``), a rank may wait for."""
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime < before:
                return f"most likely it waits for the lock of a compilation that was killed: rm {display_path(lock)}"
    return None
