"""A client of run-api whose groups a test makes: for steps at which the groups must be known token by token."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grpo_recipes.extensions.atropos.client import WaitAborted
from grpo_recipes.extensions.atropos.group import Group


class ScriptedClient:
    """Gives what ``make(step)`` makes, and nothing at all, until the run stops, where that is None.

    Attributes:
        asked: the arguments of each ``take_groups``.
    """

    def __init__(self, make: Callable[[int], list[Group] | None], stopped: Callable[[], bool] = lambda: False):
        self._make, self._stopped = make, stopped
        names = "batches groups rejected stale lost_batches stolen_batches unknown_version"
        self.counts = dict.fromkeys(names.split(), 0)
        self.seconds = {"/batch": 0.25}
        self.asked: list[dict[str, Any]] = []

    def take_groups(self, count: int, **how: Any) -> list[Group]:
        """Give the step's groups, as many as are asked for."""
        self.asked.append({"groups": count, **how})
        found = self._make(how["step"])
        while found is None:
            if self._stopped():
                raise WaitAborted
            time.sleep(0.01)
        assert len(found) == count
        self.counts["batches"] += 1
        return found

    def count_waiting_groups(self, size: int) -> int:
        """Say that three groups wait."""
        return 3
