"""Monitor an attempt while it runs: signals, requests to stop, the time limit, progress, and stalled processes.

``StopSignals`` turns signals into requests to save. ``Monitor.tick`` prints progress and runs the periodic checks. The
two detectors find a rank that stays in a phase for too long, and a server that generates nothing.
"""

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

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.attempt import Attempt
from grpo_recipes.launch.nodes import NodeWorkers
from grpo_recipes.launch.processes import Child, Ending, Group, find_newest_model, find_rank_pids
from grpo_recipes.launch.readiness import Activity, read_activity
from grpo_recipes.launch.walltime import Walltime, read_signal_lead
from grpo_recipes.paths import display_path
from grpo_recipes.plan.time_limits import SAVE_MULTIPLE
from grpo_recipes.process.listeners import OwnListener
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.process.terminal import OUTPUT, WIDTH, columns
from grpo_recipes.process.tree import descendants, is_stopped, request_stacks
from grpo_recipes.runs.health import Health
from grpo_recipes.runs.progress import (
    Phase,
    Progress,
    RowReader,
    find_current_activity,
    format_evaluation,
    format_sample,
    read_phases,
)
from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.slurm.client import read_job_end_time

_PHASE_SECONDS = 1.0  # between two checks of the ranks' phases
_SERVER_SECONDS = 5.0  # maximum time between two requests to the server
_DUMP_SECONDS = 1.0  # until the processes have written their stacks
_HOOK_SECONDS, _HOOK_SHARE = 30.0, 0.02  # minimum time between two calls of the hooks, and their maximum share of time
SYNC_PHASES = ("connect", "sync")  # phases with the limit `weight_sync_timeout`: the rendezvous and each transfer
# Multiples of `stall_timeout` for a save to a slow disk, a whole evaluation, and benchmarks at the end.
_MULTIPLES = {"save": SAVE_MULTIPLE, "evaluate": 6, "end": 24}


class StoppedAtOnce(BaseException):
    """A request that ends the attempt at once: the signal ``signum``, or None for the file in the run directory."""

    def __init__(self, signum: int | None = None):
        self.signum = signum

    def ending(self) -> Ending:
        """Return how the attempt ended: exit code 75 after a request to save, or 128+n after signal n.

        USR1 and the stop file are requests to save. They end the attempt at once only if there is nothing to save yet.
        """
        if self.signum is None or self.signum == signal.SIGUSR1:
            return Ending(EXIT_STOPPED, "stopped on request before this attempt had anything to save")
        return Ending(128 + self.signum, f"stopped by {signal.Signals(self.signum).name}")


class StopSignals:
    """Handle the signals that stop a run: install handlers in its block, and remove them afterwards.

    USR1 requests a save and a new attempt. SIGTERM, SIGHUP, SIGINT (Ctrl-C) and SIGQUIT request a save and the end.
    Signals other than USR1 that this process ignores already, as under nohup, stay ignored.

    If the trainers have something to save, a signal creates the file ``request``, which they check. Otherwise it ends
    the attempt at once: the handler raises StoppedAtOnce.
    The same signal a second time does so, too, except USR1, which Slurm may send after our own request. Two signals
    within a second count as a single signal, because `timeout` sends SIGTERM to its child and then to its group. After
    SIGTERM, the trainers have only the time that Slurm usually leaves before SIGKILL.
    """

    _signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
    _term_grace_seconds = 20.0
    _same_signal_seconds = 1.0

    def __init__(self) -> None:
        self.request: Path | None = None  # the file that asks the trainers; None before there is a run directory
        self._can_save: Callable[[], bool] = lambda: False
        self._old_handlers: dict[signal.Signals, Any] = {}
        self.received: list[int] = []  # received signals; USR1 also represents the end of the job's time
        self._is_deferred = False
        self._last_times: dict[int, float] = {}  # time of each signal's last arrival
        self._deadline = float("inf")
        self._messages: list[str] = []  # to be printed later, since a handler may have interrupted a print

    def __enter__(self) -> StopSignals:
        """Handle the stop signals, except ignored ones; USR1 is always handled."""
        for signum in self._signals:
            # nohup and background jobs ignore signals on purpose. training.sh ignores USR1 until this line handles it.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                self._old_handlers[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the earlier handlers."""
        for signum, handler in self._old_handlers.items():
            signal.signal(signum, handler)

    @property
    def requested(self) -> bool:
        """Whether the stop file exists, with which this process or `grpo stop` asks the trainers to save and end."""
        return self.request is not None and self.request.exists()

    @property
    def wants_requeue(self) -> bool:
        """Whether the run should continue in a new attempt: only USR1 was received, or the time limit is near.

        A time limit counts as USR1 (``request_requeue``). After any other signal, the run does not continue.
        """
        return set(self.received) == {signal.SIGUSR1}

    def set_save_condition(self, can_save: Callable[[], bool]) -> None:
        """Set the function that decides whether the trainers have something to save when a signal arrives.

        If ``can_save()`` is false, a signal ends the attempt at once.
        """
        self._can_save = can_save

    def _handle(self, signum: int, _: object) -> None:
        """Record a signal, and create the stop file if the trainers can save, or else raise StoppedAtOnce.

        The same signal again raises StoppedAtOnce too, except USR1. A repetition within a second, and any signal while
        signals are deferred, is only recorded. SIGTERM and SIGHUP set a deadline for the save, in 20 seconds.
        """
        now, is_repeated = time.monotonic(), signum in self.received and signum != signal.SIGUSR1
        is_same = now - self._last_times.get(signum, -math.inf) < self._same_signal_seconds
        self._last_times[signum] = now
        self.received.append(signum)
        if self._is_deferred or (is_repeated and is_same):
            return
        if self.request is None or is_repeated or not self._can_save():
            self._is_deferred = True  # another signal must not interrupt the clean-up that follows
            raise StoppedAtOnce(signum)
        if signum in (signal.SIGTERM, signal.SIGHUP):  # Slurm ends this process soon
            self._deadline = min(self._deadline, time.monotonic() + self._term_grace_seconds)
        self._request_save(signal.Signals(signum).name)

    def _request_save(self, reason: str) -> None:
        """Create the stop file if it does not exist, and keep a message about it for ``check``."""
        if not self.requested and self.request is not None:
            self.request.touch()
            self._messages.append(f"{reason}: saving, then ending")

    def request_requeue(self, reason: str) -> None:
        """Create the stop file because the job's time is nearly over, so that the trainers save and end.

        A new attempt then continues the run, as after the signal USR1. ``reason`` is printed.
        """
        self.received.append(signal.SIGUSR1)
        self._request_save(reason)

    def check(self) -> None:
        """Print messages about new requests to stop; raise StoppedAtOnce if a request can't be met.

        This is the case if the trainers have nothing to save, or still save 20 seconds after SIGTERM or SIGHUP.
        """
        while self._messages:
            say(self._messages.pop(0))
        if time.monotonic() > self._deadline:
            raise StoppedAtOnce(signal.SIGTERM)
        if self.requested and not self._can_save():
            raise StoppedAtOnce()

    def defer(self) -> None:
        """Stop acting on signals and only record them, until ``resume``.

        The launcher creates the run directory in this time, so a signal can't leave it incomplete.
        """
        self._is_deferred = True

    def resume(self, request: Path) -> None:
        """Act on signals again; raise StoppedAtOnce if a signal has arrived in this process before.

        ``request`` is the path of the stop file in the new run directory.
        """
        self.request = request
        self._is_deferred = False
        if self.received:
            raise StoppedAtOnce(self.received[-1])

    def ignore(self) -> None:
        """Ignore signals from now on, so that they can't interrupt the clean-up."""
        for signum in self._signals:
            signal.signal(signum, signal.SIG_IGN)


class RankStallDetector:
    """Find a rank that stays in a phase for longer than ``limit`` seconds, or longer than the limit of this phase."""

    def __init__(self, limit: float, sync_limit: float = math.inf) -> None:
        self._limits = {name: limit * multiple for name, multiple in _MULTIPLES.items()}
        self._limits |= dict.fromkeys(SYNC_PHASES, min(limit, sync_limit))
        self._limit = limit
        self._entered: dict[Phase, float] = {}

    def find_stall(self, phases: list[Phase], now: float, stopped: Collection[int] = ()) -> tuple[Phase, float] | None:
        """Return the phase of a stalled rank and its seconds in this phase, or None if no rank is stalled.

        Times are measured from call to call: a phase begins with the first call that has it. ``phases`` are the phases
        of all ranks at the time ``now`` (monotonic). If several ranks stall, the result is a rank in ``stopped``
        (stopped by a signal), or the rank that is furthest behind. Until a rank has written its phase, rank 0 is
        assumed to be in ``start`` since the first call.
        """
        phases = phases or [Phase(0, "start", 0, 0.0)]
        self._entered = {phase: self._entered.get(phase, now) for phase in phases}
        late = [phase for phase in phases if now - self._entered[phase] > self._limits.get(phase.name, self._limit)]
        if not late:
            return None
        # The other ranks wait for the stalled rank, in phases that they entered later.
        stalled = min(late, key=lambda phase: (phase.rank not in stopped, phase.step, self._entered[phase], phase.rank))
        return stalled, now - self._entered[stalled]


class ServerStallDetector:
    """Find a server that for ``limit`` seconds does not answer, or generates no token although it has a request."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._last_state: object = None
        self._moved_at: float | None = None

    def find_stall(self, activity: Activity | None, phases: list[Phase], now: float) -> float | None:
        """Return the seconds since the server's last progress if they exceed the limit, else None.

        ``activity`` is None if the server did not answer. New tokens, a new phase of a rank, and a server without
        requests count as progress. ``now`` is a monotonic time.
        """
        if self._moved_at is None:
            self._moved_at = now
        if activity is not None:
            # A new phase of a rank counts as progress, because a load of weights generates no tokens.
            state = (activity.tokens, phases) if activity.requests else None
            if state is None or state != self._last_state:
                self._moved_at = now
            self._last_state = state
        return now - self._moved_at if now - self._moved_at > self._limit else None


class Monitor:
    """Check an attempt periodically, and print its progress from the files in the run directory.

    The constructor sets the save condition of ``stop``.
    """

    def __init__(self, attempt: Attempt, stop: StopSignals) -> None:
        self.groups: dict[str, Group] = {}  # processes that are ready, by role
        self._attempt = attempt
        self._stop = stop
        self._folder = attempt.run.folder
        self._walltime = Walltime(lambda: read_job_end_time(os.environ), read_signal_lead(os.environ))
        self._started_at = time.time()
        self._next_phases = self._next_server = self._next_hooks = 0.0
        self._hooks = threading.Thread()  # calls the hooks
        self._activity, self._active_since = ("", 0.0), time.monotonic()  # see ``find_current_activity``
        self._printed_step = -1  # step of the last printed completion
        self._printed_samples = 0
        self._stop_was_sent = False  # whether the other nodes know about the request to stop
        stop.set_save_condition(lambda: any(phase.name not in ("start", "connect") for phase in self._read_phases()))
        self.reset()

    def reset(self) -> None:
        """Start the monitor again after processes were restarted.

        Forget the phases of the earlier processes, and compute health and speed again from all rows that were not moved
        aside. Rows that exist already are not printed again.
        """
        self.stepped = False  # whether a step was completed since the last reset
        self._last_step = ""
        self._progress = Progress(self._folder)
        files = (self._folder / f"{name}.jsonl" for name in ("prompts", "eval", "samples"))
        self._prompts, self._evaluations, self._samples = map(RowReader, files)
        self._health = Health(self._attempt.recipe.__getitem__)
        for row in read_metrics(self._folder):
            self._health.add(row)
            self._walltime.observe(row)
        recipe = self._attempt.recipe
        self._rank_stalls = RankStallDetector(recipe.processes.stall_timeout, recipe.server.weight_sync_timeout)
        self._server_stalls = ServerStallDetector(self._attempt.recipe.server.stall_timeout)

    def tick(self) -> Ending | None:
        """Print progress and run all checks that are due; return an ending, or None if the run continues.

        An ending means that a rank or the server has stalled, or that the server must restart to load a newer model.
        Near the time limit, request a stop with a requeue. Pass a requested stop on to the workers of other nodes.
        Raise StoppedAtOnce if the attempt must end at once. Must be called several times per second.
        """
        self.print_progress()
        now = time.monotonic()
        ending = None
        if now >= self._next_phases:
            self._next_phases = now + _PHASE_SECONDS
            phases = self._read_phases()
            self._show_activity(now)
            self._call_hooks(now)
            for failure in self._attempt.hooks.take_failures():
                say(f"note: {failure}")
            if note := self._walltime.take_warning():
                say(note)
            if not self._stop.requested and (reason := self._walltime.find_stop_reason()):
                self._stop.request_requeue(reason)
            if trainers := self._find_trainers():
                ending = self._find_server_stall(phases, now) or self._find_rank_stall(trainers, phases, now)
        ending = ending or self._find_renewal()
        self._stop.check()
        if self._stop.requested and not self._stop_was_sent:
            self._stop_was_sent = True
            self._attempt.workers.send("stop")
        return ending

    def print_progress(self) -> None:
        """Print a line for each new step and evaluation, notes on them, and sampled completions."""
        width = min(WIDTH, columns())
        for row in self._prompts.read_new():
            for text in row.get("said") or ():
                say(str(text))
        for row in self._progress.rows.read_new():
            self.stepped = True
            self._last_step = f"step {row['step']}/{row.get('max_steps', '?')} done"
            print_line(self._progress.line(row, width))
            self._walltime.observe(row)
            for notice in self._health.add(row):
                say(f"note: {notice}")
        for row in self._evaluations.read_new():
            print_line(format_evaluation(row))
        interval = self._attempt.recipe.run.show_completion_steps
        for row in self._samples.read_new():
            if interval and (self._printed_step < 0 or row["step"] >= self._printed_step + interval):
                for line in format_sample(row, self._printed_samples):
                    print_line(line)
                self._printed_step, self._printed_samples = row["step"], self._printed_samples + 1

    def _show_activity(self, now: float) -> None:
        """Show what the run does now (``find_current_activity``) and for how long, as the live line of a terminal.

        Until the first step, also print a line for each change.
        """
        (previous, previous_start), seconds = self._activity, now - self._active_since
        activity, start = self._activity = find_current_activity(self._folder)
        if activity != previous and not self.stepped:
            say(f"now {activity}" + (f" ({previous} took {seconds:.0f} s)" if previous else ""))
        if activity != previous or (self.stepped and start != previous_start):
            self._active_since, seconds = now, 0.0
        OUTPUT.show_live(f"{activity} {seconds:.0f} s" + (f", {self._last_step}" if self.stepped else ""))

    def _call_hooks(self, now: float) -> None:
        """Call ``on_progress`` of the hooks in a thread if the run has trained a step and the last call is long ago.

        The pause is at least 30 seconds, and long enough for the calls to take at most 2 % of the time.
        """

        def call() -> None:
            """Call the hooks, and set the time of the next call."""
            self._attempt.hooks.on_progress(self._folder)
            self._next_hooks = now + max(_HOOK_SECONDS, (time.monotonic() - now) / _HOOK_SHARE)

        if self.stepped and now >= self._next_hooks and not self._hooks.is_alive():
            self._hooks = threading.Thread(target=call, daemon=True)
            self._hooks.start()

    def _find_trainers(self) -> Group | None:
        """Return the group of the trainers; None while they have not started."""
        return next((group for group in self.groups.values() if group.process.trains), None)

    def _find_server(self) -> Group | None:
        """Return the group of the vLLM server; None without a server that is ready."""
        return next((group for group in self.groups.values() if group.process.ready == "serving"), None)

    def _read_phases(self) -> list[Phase]:
        """Return the phases that the ranks have written; [] while the trainers have not started."""
        return read_phases(self._folder) if self._find_trainers() else []

    def _find_server_stall(self, phases: list[Phase], now: float) -> Ending | None:
        """Request the server's activity; return an ending if the server makes no tokens for too long, else None.

        A stalled server also writes its stacks. Send a request only every few seconds, and none after a stop request.
        """
        limit, server = self._attempt.recipe.server.stall_timeout, self._find_server()
        if server is None or self._stop.requested or now < self._next_server:
            return None
        self._next_server = now + min(_SERVER_SECONDS, limit / 5)
        host, port, token = self._attempt.server_address()
        child = server.members[0]
        owner = OwnListener(host, port, lambda: child.guard_pid) if isinstance(child, Child) else None
        activity = read_activity(host, port, token, owner)
        seconds = self._server_stalls.find_stall(activity, phases, time.monotonic())
        if seconds is None:
            return None
        stacks = dump_stacks(self._folder, None, server, self._attempt.workers)
        cause = f"the vLLM server has made no token for {seconds:.0f} s (server_stall_timeout {limit:g}){stacks}"
        return Ending(1, cause, log=server.log, lost=server.process)

    def _find_renewal(self) -> Ending | None:
        """Return an ending that restarts the server with the trainer's newest model; None if it has this model already.

        The result is also None for servers that get new weights in another way, and after a request to stop.
        """
        server = self._find_server()
        if server is None or self._stop.requested:
            return None
        newest = find_newest_model(server.process, self._attempt.environment)
        if newest is None or newest in server.process.argv:
            return None
        return Ending(0, lost=server.process, renews=True)

    def _find_rank_stall(self, trainers: Group, phases: list[Phase], now: float) -> Ending | None:
        """If a rank stalls, let all ranks and the server write their stacks and return an ending, else None.

        While there is no server, phases in which ranks wait for a server are not limited.
        """
        ranks = find_rank_pids(self._folder)
        if self._attempt.plan.mode == "server" and self._find_server() is None:  # start and sync wait for it
            phases = [phase for phase in phases if phase.name not in ("start", *SYNC_PHASES)]
            if not phases:
                return None
        stall = self._rank_stalls.find_stall(phases, now, [rank for rank, pid in ranks.items() if is_stopped(pid)])
        if stall is None:
            return None
        phase, seconds = stall
        cause = f"rank {phase.rank} has been in phase {phase.name} after step {phase.step} for {seconds:.0f} s"
        limits = {"stall_timeout": self._attempt.recipe.processes.stall_timeout}
        if phase.name in SYNC_PHASES:
            limits["weight_sync_timeout"] = self._attempt.recipe.server.weight_sync_timeout
        key = min(limits, key=lambda name: limits[name])
        cause += f" ({key} {limits[key]:g})"
        if phase.name in SYNC_PHASES and (bridge := self._attempt.plan.bridge):
            cause += f" in the '{bridge}' bridge"
        extensions = Path(self._attempt.environment.get("TORCH_EXTENSIONS_DIR", ""))
        lock = stale_compile_lock(extensions, self._started_at) if phase.name == "start" else None
        cause += dump_stacks(self._folder, ranks.values(), self._find_server(), self._attempt.workers)
        return Ending(1, cause + (f"; {lock}" if lock else ""), phase.rank, trainers.log)


def dump_stacks(
    run_dir: Path, ranks: Iterable[int] | None, server: Group | None = None, workers: NodeWorkers | None = None
) -> str:
    """Let ranks and the server write the stacks of their threads, and return the end of a sentence about the result.

    ``ranks`` are pids of this node, or None to leave out the ranks. With ``workers``, other nodes do the same. The text
    names the new files in ``stacks/`` and the processes that are stopped by a signal; it is empty without both.
    Processes without a handler of SIGUSR2 end, so call this only before all processes are ended.
    """
    # The signal ends processes without a handler. That is acceptable, because all of them are ended afterwards.
    start, pids = time.time(), list(ranks or ())
    stopped = workers.request_stacks(with_ranks=ranks is not None) if workers else []
    if server and (command := server.state().pid):
        pids += [*(process.pid for process in descendants(command)), command]  # engine and workers before the command
    stopped = request_stacks(pids) + stopped
    time.sleep(_DUMP_SECONDS)
    folder = run_dir / "stacks"
    written = sorted(path.name for path in folder.glob("*.txt") if path.stat().st_mtime >= start - 1)
    stacks = f"; stacks of {', '.join(written)} in {display_path(folder)}" if written else ""
    return stacks + (f"; stopped by a signal (SIGSTOP): pid {', '.join(stopped)}" if stopped else "")


def stale_compile_lock(folder: Path, start: float) -> str | None:
    """Describe a lock in TORCH_EXTENSIONS_DIR that may block a rank, with the fix; None if there is no such lock.

    A lock blocks a rank if it is older than ``start``, the Unix time of the launch: a killed compilation has left it.
    """
    for lock in [*folder.glob("*/lock"), *folder.glob("*/*/lock")]:
        with contextlib.suppress(OSError):
            if lock.stat().st_mtime < start:
                return f"it probably waits for the lock of a killed compilation; remove it: rm {display_path(lock)}"
    return None
