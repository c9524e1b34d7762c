"""What a rank is doing, and where all its threads are: for the launcher, which tells a hung run from a slow one."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path


class PhaseFile:
    """``processes/phase_<rank>.json``: ``phase``, ``since`` (``time.time()``) and ``step``, replaced at each change.

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
        self._temporary = str(folder / f".phase_{rank}.json")
        self.phase = "start"

    def enter(self, phase: str, step: int) -> str:
        """Note that a phase begins, or goes on with the next batch, after ``step`` optimizer steps.

        Returns:
            The phase before.
        """
        before, self.phase = self.phase, phase
        content = json.dumps({"phase": phase, "since": time.time(), "step": step})
        # Without the layers of pathlib and text files: this comes several times a step.
        descriptor = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.write(descriptor, content.encode())
        os.close(descriptor)
        os.replace(self._temporary, self._path)
        return before


def dump_stacks_on_signal(run_dir: Path, name: str) -> None:
    """From now on SIGUSR2 adds the stacks of all threads to ``stacks/<name>.txt``, whatever Python is waiting for."""
    folder = run_dir / "stacks"
    folder.mkdir(mode=0o700, exist_ok=True)
    faulthandler.register(signal.SIGUSR2, file=(folder / f"{name}.txt").open("a"), all_threads=True)
