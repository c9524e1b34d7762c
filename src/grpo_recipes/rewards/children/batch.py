"""The rows of one call of ``ChildRewards.score``, and how long rows take."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from grpo_recipes.rewards.children.child import Child
from grpo_recipes.rewards.children.score import Verdict

TIME_LIMIT = "time limit"
GIVEN_UP = "not called: too many without a verdict before it, or the run was stopped"
_FIRST_CALL_SECONDS = 10.0
_CHUNK_SECONDS, _CHUNK_ROWS = 0.05, 64  # work handed out at once


class Pace:
    """What calls of one reward were seen to take.

    Args:
        timeout: seconds for one call.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._row_seconds: float | None = None
        self._slowest_first = 0.0
        self._first_call = _FIRST_CALL_SECONDS

    def saw(self, verdict: Verdict, first: bool) -> None:
        """Learn from a call; the first one of a process may import what the reward needs."""
        if not first:
            before = self._row_seconds
            self._row_seconds = verdict.seconds if before is None else 0.8 * before + 0.2 * verdict.seconds
        elif verdict.reason == TIME_LIMIT:
            self._first_call /= 2  # probably no import
        else:
            self._slowest_first = max(self._slowest_first, verdict.seconds)
            self._first_call = min(_FIRST_CALL_SECONDS, 2 * self._slowest_first)

    def limit(self, first: bool) -> float:
        """Seconds a call may take."""
        return self._timeout + (self._first_call if first else 0.0)

    def chunk(self, first: bool) -> int:
        """Rows to hand out at once."""
        if first or self._row_seconds is None:
            return 1
        return max(1, min(_CHUNK_ROWS, int(_CHUNK_SECONDS / max(self._row_seconds, 1e-6))))


class Batch:
    """Rows to hand out, and the verdicts so far.

    Args:
        reward: index of the reward that is called.
        rows: (number, columns) of each row; numbers rise.
        pace: of this reward.
        workers: children that share the rows.

    Attributes:
        missing: rows that should have a verdict by now and have none.
    """

    def __init__(self, reward: int, rows: list[tuple[int, dict[str, Any]]], pace: Pace, workers: int):
        self._reward = reward
        self._pace = pace
        self.missing = 0
        self._rows = dict(rows)
        self._todo = deque(self._rows)
        self._workers = workers
        self._verdicts: dict[int, Verdict] = {}

    @property
    def done(self) -> bool:
        """Whether every row has its verdict."""
        return len(self._verdicts) == len(self._rows)

    def hand_to(self, child: Child) -> None:
        """Give a child the next rows: fewer towards the end, so that all end together."""
        share = -(-len(self._todo) // self._workers)
        count = min(share, self._pace.chunk(self._first(child)))
        numbers = [self._todo.popleft() for _ in range(count)]
        if numbers:
            child.give(self._reward, [(number, self._rows[number]) for number in numbers])

    def take_back(self, child: Child) -> None:
        """Take the rows that a child was given and did not come to."""
        self._todo.extendleft(reversed(child.rows))
        child.rows = []

    def deadline(self, child: Child) -> float:
        """When a child must have answered the row it is at; ``time.monotonic()``."""
        return child.since + self._pace.limit(self._first(child))

    def settle(self, child: Child, verdict: Verdict) -> None:
        """Enter the verdict on the row that a child was at."""
        self._verdicts[child.rows.pop(0)] = verdict
        self.missing += verdict.missing
        self._pace.saw(verdict, self._first(child))
        child.called.add(self._reward)
        child.since = time.monotonic()

    def _first(self, child: Child) -> bool:
        return self._reward not in child.called

    def give_up(self) -> None:
        """Leave what has no verdict yet without one."""
        for number in self._rows:
            self._verdicts.setdefault(number, Verdict(None, GIVEN_UP))

    def verdicts(self) -> list[Verdict]:
        """In the order of the rows."""
        return [self._verdicts[number] for number in self._rows]
