"""Stop a run before the time limit of its Slurm job, early enough to finish a step and save a checkpoint.

walltime = Walltime(lambda: read_job_end_time(os.environ), read_signal_lead(os.environ))
walltime.observe(row)                  # durations of phases and saves
reason = walltime.find_stop_reason()   # "the job's time limit comes in 115 s", or None
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_recipes.recipe.keys import SIGNAL_LEAD

_SIGNAL_LEAD_SECONDS = 300.0  # when Slurm sends USR1, by the header of training.sh (`--signal=B:USR1@300`)
_MARGIN_SECONDS = 30.0
_PHASES = tuple(f"seconds/{phase}" for phase in ("sample", "score", "sync", "update", "evaluate"))


class Walltime:
    """Decide when to stop a run before the time limit, even if Slurm's signal comes too late or not at all.

    The run stops ``lead`` seconds before the limit: twice its longest phase (sampling, scoring, weight sync, update or
    evaluation), plus its longest save, plus half a minute.
    ``end_time`` returns the end of the job in seconds since the epoch, or None for a job without a time limit.
    ``signal_lead`` is the number of seconds between Slurm's signal and the limit.
    """

    def __init__(self, end_time: Callable[[], float | None], signal_lead: float) -> None:
        self._signal_lead = signal_lead
        self._end_time = end_time
        self._end = end_time()
        self._longest = 0.0
        self._save = 0.0
        self._has_warned = False

    @property
    def lead(self) -> float:
        """Time between the request to the trainers to stop and the job's end, in seconds."""
        return 2 * self._longest + (self._save or self._longest) + _MARGIN_SECONDS

    def observe(self, row: Mapping[str, Any]) -> None:
        """Record the durations of phases and saves from a row of ``metrics.jsonl``."""
        self._longest = max(self._longest, *(float(row.get(phase) or 0.0) for phase in _PHASES))
        self._save = max(self._save, float(row.get("seconds/save") or 0.0))

    def take_warning(self) -> str | None:
        """Return a warning if Slurm's signal may come too late, because ``lead`` is longer than the signal's lead.

        Return None otherwise, without a time limit, and after the first warning.
        """
        if self._has_warned or self._end is None or self.lead <= self._signal_lead:
            return None
        self._has_warned = True
        return (
            f"note: phases take up to {self._longest:.0f} s, so the signal {self._signal_lead:.0f} s before the time "
            f"limit may come too late; the launcher stops the run {self.lead:.0f} s before the limit"
        )

    def find_stop_reason(self, now: float | None = None) -> str | None:
        """Return a text with the seconds to the time limit if the run must stop at ``now``, otherwise None.

        ``now`` is in seconds since the epoch. Only when the known limit is near, it is read again, because it may
        have been raised. A limit that was lowered, or set later, is not noticed.
        """
        now = time.time() if now is None else now
        if self._end is not None and now >= self._end - self.lead:
            self._end = self._end_time()  # the limit may have been raised since
        if self._end is None or now < self._end - self.lead:
            return None
        return f"the job's time limit comes in {max(0.0, self._end - now):.0f} s"


def read_signal_lead(environment: Mapping[str, str]) -> float:
    """Read from GRPO_SIGNAL_LEAD how many seconds before the time limit Slurm sends its signal.

    The batch script sets this variable. Return 300, as in the header of training.sh, if it is not a whole number.
    """
    seconds = environment.get(SIGNAL_LEAD, "")
    return float(seconds) if seconds.isdecimal() else _SIGNAL_LEAD_SECONDS
