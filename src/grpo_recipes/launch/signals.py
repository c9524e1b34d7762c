"""Signals to the launcher: a request to save and end, or the end."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from grpo_recipes.launch.say import say


class StoppedBySignal(BaseException):
    """A signal that ends the run at once."""

    def __init__(self, signum: int):
        self.signum = signum


class StopSignals:
    """While trainers run the first signal asks them to save and end; before, or the second time, it ends the run.

    SIGTERM leaves them only as long as Slurm usually leaves us before SIGKILL.
    """

    _signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    _term_grace_seconds = 20.0

    def __init__(self, request: Path) -> None:
        self._request = request
        self._deadline = float("inf")
        self.trainers_run = False
        self.seen: int | None = None
        for signum in self._signals:
            # nohup, or a shell's background job, has a signal ignored on purpose; training.sh has USR1 for us.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: object) -> None:
        self.seen = signum
        if not self.trainers_run or self._request.exists():
            raise StoppedBySignal(signum)
        self._request.touch()
        if signum != signal.SIGUSR1 and signum != signal.SIGINT:
            self._deadline = time.monotonic() + self._term_grace_seconds
        say(f"{signal.Signals(signum).name}: saving after the step in flight, then ending (again: end at once)")

    def check_deadline(self) -> None:
        """End the run when the trainers took too long to save after SIGTERM."""
        if time.monotonic() > self._deadline:
            raise StoppedBySignal(signal.SIGTERM)

    def ignore(self) -> None:
        """From now on only the clean-up counts."""
        for signum in self._signals:
            signal.signal(signum, signal.SIG_IGN)
