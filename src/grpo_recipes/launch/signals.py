"""Signals to the launcher, and its own wish to stop in time: a request to save and end, or the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.processes import Ending
from grpo_recipes.process.reports import say


class StoppedAtOnce(BaseException):
    """A request that ends the attempt where it stands; without ``signum`` it came as the file in the run directory."""

    def __init__(self, signum: int | None = None):
        self.signum = signum

    def ending(self) -> Ending:
        """Return code 75 for a request to save that came while there was nothing new to save, else 128+n."""
        if self.signum is None or self.signum == signal.SIGUSR1:
            return Ending(EXIT_STOPPED, "stopped on request before this attempt had anything to save")
        return Ending(128 + self.signum, f"stopped by {signal.Signals(self.signum).name}")


class StopSignals(AbstractContextManager["StopSignals"]):
    """USR1 asks to save and run on in a new attempt; SIGTERM, SIGHUP and SIGINT (Ctrl-C) to save and end.

    While trainers have something to save they are asked by the file ``request``; before that a signal ends the attempt
    at once, and so does the same signal a second time, except USR1: Slurm sends that too where we have asked already.
    SIGTERM leaves the trainers only as long as Slurm usually leaves us before SIGKILL.
    """

    _signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    _term_grace_seconds = 20.0

    def __init__(self) -> None:
        self.request: Path | None = None  # the file that asks the trainers, once there is a run directory
        # Asked in the signal handler, since a step may have begun a moment ago.
        self.can_save: Callable[[], bool] = lambda: False
        self._before: dict[signal.Signals, Any] = {}
        self._seen: list[int] = []
        self._held = False
        self._out_of_time = False
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
    def terminated(self) -> bool:
        """Whether SIGTERM came, as it does to every process of a job that is cancelled."""
        return signal.SIGTERM in self._seen

    @property
    def wants_requeue(self) -> bool:
        """Whether the run is to go on in a new attempt: USR1 or the time limit came, and no signal to end it."""
        asked = self._out_of_time or signal.SIGUSR1 in self._seen
        return asked and set(self._seen) <= {signal.SIGUSR1}

    def _handle(self, signum: int, _: object) -> None:
        again = signum in self._seen and signum != signal.SIGUSR1
        self._seen.append(signum)
        if self._held:
            return
        if self.request is None or again or not self.can_save():
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
        self._out_of_time = True
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
        if self._seen:
            raise StoppedAtOnce(self._seen[-1])

    def ignore(self) -> None:
        """Ignore signals from now on: only the clean-up counts."""
        for signum in self._signals:
            signal.signal(signum, signal.SIG_IGN)
