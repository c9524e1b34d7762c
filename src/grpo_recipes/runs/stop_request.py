"""Detect requests to stop a run: a file in the run directory, or a signal.

The file is needed because a signal to the launcher's process group does not reach the ranks. Some work is useless once
the run stops, for example a generation without a following step. That work runs inside ``cutting_short``: it polls
``cuts`` and ends itself early. Inside ``interrupting``, a request raises CutShort in the user's code, which cannot
poll.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.runs.rundir import NO_REQUEUE, remove_files, stop_file

POLL_SECONDS = 0.1  # between two checks of the file, which may be on a network disk


def read_request_times(run_dir: Path) -> dict[Path, int]:
    """Return the files of `grpo stop` in a run directory, with the time of their last change in nanoseconds."""
    files = (stop_file(run_dir), run_dir / NO_REQUEUE)
    return {path: path.stat().st_mtime_ns for path in files if path.exists()}


def remove_old_requests(run_dir: Path, old_times: Mapping[Path, int]) -> None:
    """Remove requests to an earlier attempt: the files of `grpo stop` that have not changed since ``old_times``."""
    remove_files(*(path for path, time_ns in read_request_times(run_dir).items() if old_times.get(path) == time_ns))


class Stopped(BaseException):
    """Raised on every rank at the same point; a BaseException, so that rewards and callbacks do not catch it."""


class CutShort(BaseException):
    """Raised inside a call of the user's code, which cannot check for a request itself."""


class StoppedOnRequest(SystemExit):
    """Training ended on request; the message gives the step and the saved state."""

    def __init__(self, state: str):
        super().__init__(EXIT_STOPPED)
        self._state = state

    def __str__(self) -> str:
        """Return the message."""
        return f"stopped on request {self._state}"


class StopRequest:
    """Detect a request to stop the run in ``run_dir``: its stop file exists, or a signal arrived.

    A caller polls ``requested``. Work that would be thrown away polls ``cuts`` inside ``cutting_short``.
    """

    def __init__(self, run_dir: Path):
        self._file = stop_file(run_dir)
        self._is_requested = False
        self._has_signal = False
        self._handles_signals = False  # ``listen`` was called
        self.may_cut = False  # the current work runs inside ``cutting_short``, so that a request would end it
        self._raises = False  # the next signal raises CutShort
        self._next_check = 0.0  # as ``time.monotonic()``
        self._pid = os.getpid()

    def listen(self) -> None:
        """Handle SIGTERM and SIGUSR1 as requests too: Slurm can send them to every process of a job.

        The signal must not end the process, because accelerate also sends it to ranks that are still saving.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGUSR1, self._on_signal)
        self._handles_signals = True

    def _on_signal(self, signum: int, _: object) -> None:
        """Record the signal, and raise CutShort inside ``interrupting``. A forked worker is ended by the signal."""
        if os.getpid() != self._pid:  # a forked worker, which its pool ends with this signal
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self._has_signal = True
        if self._raises:
            self._raises = False
            raise CutShort

    def requested(self) -> bool:
        """Return whether a request has arrived; the file is checked at every call. A request is never withdrawn."""
        self._is_requested = self._is_requested or self._has_signal or self._file.exists()
        self._next_check = time.monotonic() + POLL_SECONDS
        return self._is_requested

    @contextmanager
    def cutting_short(self) -> Iterator[None]:
        """Mark the block as work that is useless after a request, so that ``cuts`` may be true inside it."""
        could_cut = self.may_cut
        self.may_cut = True
        try:
            yield
        finally:
            self.may_cut = could_cut

    def cuts(self) -> bool:
        """Return whether the current work should end: it runs inside ``cutting_short``, and a request has arrived.

        The call is cheap, because the file is checked at most ten times per second.
        """
        if not self.may_cut:
            return False
        return self._is_requested or self._has_signal or (time.monotonic() >= self._next_check and self.requested())

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise CutShort in the block when a request arrives, if ``cutting_short`` is active and ``listen`` was called.

        Call it from the main thread. Code that never returns to Python bytecode is not interrupted.
        """
        if not (self.may_cut and self._handles_signals):
            yield
            return
        block_ended = threading.Event()
        self._raises = True
        try:
            threading.Thread(target=self._signal_when_requested, args=(block_ended,), daemon=True).start()
            yield
        finally:
            self._raises = False
            block_ended.set()

    def _signal_when_requested(self, block_ended: threading.Event) -> None:
        """Poll until a request arrives, then send SIGTERM to the main thread; return if the block ends first."""
        while not self.requested():
            if block_ended.wait(POLL_SECONDS):
                return
        if not block_ended.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
