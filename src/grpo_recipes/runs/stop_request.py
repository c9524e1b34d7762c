"""Requests to stop: a file in the run directory, since signals of a group do not reach ranks, or SIGTERM."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from grpo_recipes.attributes import replaced
from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.runs.rundir import stop_file

POLL_SECONDS = 0.1  # between two looks at the file; it may be on a network disk


class Stopped(BaseException):
    """Raised on every rank at the same place; no ``except Exception`` of rewards and callbacks may catch it."""


class CutShort(BaseException):
    """Raised in a call of the user's code, which cannot be asked to look at the request."""


class StoppedOnRequest(SystemExit):
    """Training ended on request; the text says what is saved."""

    def __init__(self, what: str):
        super().__init__(EXIT_STOPPED)
        self._what = what

    def __str__(self) -> str:
        return f"stopped on request {self._what}"


class StopRequest:
    """Whether the run is asked to stop; work that would be thrown away polls ``cuts`` inside ``cutting_short``."""

    def __init__(self, run_dir: Path):
        self._file = stop_file(run_dir)
        self._found = self._signalled = self._listens = self._cutting = self._raises = False
        self._looks_next = 0.0
        self._pid = os.getpid()

    def listen(self) -> None:
        """Take SIGTERM and USR1 for a request, too: Slurm can send them to every process of a job.

        It must not end the process by itself: accelerate also sends it to ranks that are still saving.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._listens = True

    def _on_signal(self, signum: int, _: object) -> None:
        if os.getpid() != self._pid:  # a forked worker, which its pool ends so
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._signalled = True
        if self._raises:
            self._raises = False
            raise CutShort

    def requested(self) -> bool:
        """Look at the file; return whether a request has come."""
        self._found = self._found or self._signalled or self._file.exists()
        self._looks_next = time.monotonic() + POLL_SECONDS
        return self._found

    def cutting_short(self) -> AbstractContextManager[None]:
        """Mark work whose result is worthless once a request comes."""
        return replaced(self, _cutting=True)

    @property
    def may_cut(self) -> bool:
        """Whether a request would end the work under way."""
        return self._cutting

    def cuts(self) -> bool:
        """Return whether to end the work under way; cheap: the file is looked at ten times a second."""
        known = self._found or self._signalled
        return self._cutting and (known or (time.monotonic() >= self._looks_next and self.requested()))

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """While inside ``cutting_short`` too, raise CutShort in this thread, the main one, when a request comes.

        Code that never returns to Python bytecode is not interrupted.
        """
        if not (self._cutting and self._listens):
            yield
            return
        left = threading.Event()
        self._raises = True
        try:
            threading.Thread(target=self._signal_when_requested, args=(left,), daemon=True).start()
            yield
        finally:
            self._raises = False
            left.set()

    def _signal_when_requested(self, left: threading.Event) -> None:
        while not self.requested():
            if left.wait(POLL_SECONDS):
                return
        if not left.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
