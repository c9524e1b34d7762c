"""When the time of our Slurm job is over, and how early the trainers must be asked to save."""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

# How long before the limit Slurm sends USR1, by the header of training.sh (`--signal=B:USR1@300`).
SIGNAL_LEAD_SECONDS = 300.0
_MARGIN_SECONDS = 30.0
_PHASES = tuple(f"seconds/{phase}" for phase in ("sample", "score", "sync", "update", "evaluate"))
EndTime = Callable[[], float | None]


class Walltime:
    """Asks for the stop itself where the lead of Slurm's signal is short, or the signal does not come at all.

    The lead is twice the longest phase seen plus the longest save, and half a minute.

    Args:
        end_time: tells when the job ends, in seconds since the epoch; None: it does not.
    """

    def __init__(self, end_time: EndTime) -> None:
        self._end_time = end_time
        self._end = end_time()
        self._longest = 0.0
        self._save = 0.0
        self._noted = False

    @property
    def lead(self) -> float:
        """Seconds before the job's end at which the trainers are asked."""
        return 2 * self._longest + (self._save or self._longest) + _MARGIN_SECONDS

    def observe(self, row: Mapping[str, Any]) -> None:
        """Learn from a row of ``metrics.jsonl`` how long phases take."""
        self._longest = max(self._longest, *(float(row.get(phase) or 0.0) for phase in _PHASES))
        self._save = max(self._save, float(row.get("seconds/save") or 0.0))

    def note(self) -> str | None:
        """What the user should know when phases are longer than the signal's lead allows, once."""
        if self._noted or self._end is None or self.lead <= SIGNAL_LEAD_SECONDS:
            return None
        self._noted = True
        return (
            f"note: with phases of {self._longest:.0f} s the signal {SIGNAL_LEAD_SECONDS:.0f} s before the time limit "
            f"may come too late; the launcher stops {self.lead:.0f} s before the limit"
        )

    def due(self, now: float | None = None) -> str | None:
        """Why it is time to stop, or None.

        Args:
            now: seconds since the epoch; the clock's by default.
        """
        now = time.time() if now is None else now
        if self._end is None or now < self._end - self.lead:
            return None
        self._end = self._end_time()  # the limit may have been raised meanwhile
        if self._end is None or now < self._end - self.lead:
            return None
        return f"the job's time limit comes in {max(0.0, self._end - now):.0f} s"


def job_end_time(environment: Mapping[str, str] | None = None) -> float | None:
    """The end of our Slurm job in seconds since the epoch, as the controller knows it now.

    Slurm's own variable stands in where the controller does not answer; it does not follow a changed limit.
    """
    environment = os.environ if environment is None else environment
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    given = environment.get("SLURM_JOB_END_TIME", "")
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", job, "-o"], capture_output=True, text=True, timeout=20, check=False
        )
        text = done.stdout
    except (OSError, subprocess.TimeoutExpired):
        text = ""
    match = re.search(r"\sEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text)
    if match is not None:
        return datetime.datetime.fromisoformat(match[1]).timestamp()
    return float(given) if given.isdigit() and not text else None
