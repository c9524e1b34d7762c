"""Slurm's time limits: how they are written, when that of our job is over, and how early to have the trainers save."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_recipes.slurm.client import NoAnswer, ask

# How long before the limit Slurm sends USR1, by the header of training.sh (`--signal=B:USR1@300`).
SIGNAL_LEAD_SECONDS = 300.0
_MARGIN_SECONDS = 30.0
_PHASES = tuple(f"seconds/{phase}" for phase in ("sample", "score", "sync", "update", "evaluate"))
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")


class Walltime:
    """Ask for the stop where the lead of Slurm's signal is short, or the signal does not come at all.

    The lead is twice the longest phase seen plus the longest save, and half a minute. ``end_time`` returns when the
    job ends in seconds since the epoch, or None for a job without an end.
    """

    def __init__(self, end_time: Callable[[], float | None]) -> None:
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
        """Return, once, what the user should know when phases are longer than the signal's lead allows."""
        if self._noted or self._end is None or self.lead <= SIGNAL_LEAD_SECONDS:
            return None
        self._noted = True
        return (
            f"note: with phases of {self._longest:.0f} s the signal {SIGNAL_LEAD_SECONDS:.0f} s before the time limit "
            f"may come too late; the launcher stops {self.lead:.0f} s before the limit"
        )

    def due(self, now: float | None = None) -> str | None:
        """Return why it is time to stop at ``now``, in seconds since the epoch, or None."""
        now = time.time() if now is None else now
        if self._end is None or now < self._end - self.lead:
            return None
        self._end = self._end_time()  # the limit may have been raised meanwhile
        if self._end is None or now < self._end - self.lead:
            return None
        return f"the job's time limit comes in {max(0.0, self._end - now):.0f} s"


def job_end_time(environment: Mapping[str, str] | None = None) -> float | None:
    """Return the end of our Slurm job in seconds since the epoch, as the controller knows it now.

    Slurm's own variable stands in where the controller does not answer; it does not follow a changed limit.
    """
    environment = os.environ if environment is None else environment
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    try:
        shown = ask("scontrol", "show", "job", job, "-o", seconds=20)
    except NoAnswer:
        shown = None
    match = re.search(r"\sEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown or "")
    if match is not None:
        return datetime.datetime.fromisoformat(match[1]).timestamp()
    given = environment.get("SLURM_JOB_END_TIME", "")
    return float(given) if given.isdigit() and not shown else None


def walltime_seconds(text: str) -> int | None:
    """Return the seconds of a time limit as Slurm writes it; None where it is not one."""
    if not _TIME.fullmatch(text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
