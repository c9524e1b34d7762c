"""The durations of a reward's calls, which decide the time limit of a first call and the rows sent at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_recipes.rewards.child import TIME_LIMIT
from grpo_recipes.rewards.score import Score

_FIRST_CALL_SECONDS = 10.0
_CHUNK_SECONDS, _CHUNK_ROWS = 0.05, 64  # target duration and maximum size of a chunk of rows


@dataclass
class Pace:
    """The durations of a reward's calls: they decide the extra time for first calls and the rows sent at a time."""

    # Seconds that a first call may exceed the time limit.
    extra_for_first: float = field(default_factory=lambda: _FIRST_CALL_SECONDS)
    most_extra: float = field(default_factory=lambda: _FIRST_CALL_SECONDS)
    slowest_first: float = 0.0  # seconds
    seconds: float | None = None  # moving average of a call's duration
    rows: int = 1  # rows per chunk

    def add(self, score: Score, first: bool) -> None:
        """Update the extra time for first calls, or the rows per chunk, with the duration of another call.

        ``first`` means the first call of a process, which may include imports.
        """
        if not first:
            self.seconds = score.seconds if self.seconds is None else 0.8 * self.seconds + 0.2 * score.seconds
            self.rows = max(1, min(_CHUNK_ROWS, int(_CHUNK_SECONDS / max(self.seconds, 1e-6))))
        elif score.reason == TIME_LIMIT:
            self.extra_for_first /= 2  # probably a call that hangs, not an import
        else:
            self.slowest_first = max(self.slowest_first, score.seconds)
            self.extra_for_first = min(self.most_extra, 2 * self.slowest_first)

    def allow_imports(self, seconds: float) -> None:
        """Give first calls at least this many seconds beyond the time limit."""
        self.most_extra = self.extra_for_first = max(self.most_extra, seconds)
