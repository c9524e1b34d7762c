"""What a rank is doing, and where all its threads are: for the launcher, which tells a hung run from a slow one."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path

_LENGTH = 120  # characters; longer than any content


class PhaseFile:
    """``processes/phase_<rank>.json``: ``phase``, ``since`` (``time.time()``) and ``step``, rewritten at each change.

    Args:
        run_dir: the run directory.
        rank: of this process.

    Attributes:
        phase: start, sample, score, sync, update, save, evaluate or end.
    """

    def __init__(self, run_dir: Path, rank: int):
        folder = run_dir / "processes"
        folder.mkdir(exist_ok=True)
        self._path = str(folder / f"phase_{rank}.json")
        self.phase = "start"
        temporary = folder / f".phase_{rank}.json"  # a reader never sees it empty
        temporary.write_text(_content("start", 0))
        temporary.replace(self._path)

    def enter(self, phase: str, step: int) -> str:
        """Note that a phase begins, or goes on with the next batch, after ``step`` optimizer steps.

        Returns:
            The phase before.
        """
        before, self.phase = self.phase, phase
        # One write of one length over the last: on ext4 a rename over a file, or truncating it, flushes it to disk, a
        # millisecond several times a step. Closed each time, for readers on other nodes.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.write(descriptor, _content(phase, step).encode())
        os.close(descriptor)
        return before


def _content(phase: str, step: int) -> str:
    return json.dumps({"phase": phase, "since": time.time(), "step": step}).ljust(_LENGTH)


def dump_stacks_on_signal(run_dir: Path, name: str) -> None:
    """From now on SIGUSR2 adds the stacks of all threads to ``stacks/<name>.txt``, whatever Python is waiting for."""
    folder = run_dir / "stacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"{name}.txt").open("a"), all_threads=True)
