"""A run-api client with groups made by a test, for steps that must know each token of the groups."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from grpo_recipes.extensions.atropos.client import WaitAborted
from grpo_recipes.extensions.atropos.group import Group


class ScriptedClient:
    """Return the groups of ``make(step)``. If they are None, wait until the run stops.

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
        """Return the step's groups. Their number must match the request."""
        self.asked.append({"groups": count, **how})
        groups = self._make(how["step"])
        while groups is None:
            if self._stopped():
                raise WaitAborted
            time.sleep(0.01)
        assert len(groups) == count
        self.counts["batches"] += 1
        return groups

    def count_waiting_groups(self, size: int) -> int:
        """Report three waiting groups."""
        return 3
