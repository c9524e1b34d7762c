"""The child processes of a pool: starting, listening, replacing and ending them."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator
from typing import Any

from grpo_recipes.rewards.children.child import Child


class Crew:
    """Children that load the same rewards.

    Args:
        workers: how many; one more stands by after the first was replaced.
        setup: their first request: rewards and limits.

    Attributes:
        members: those that work, or load.
    """

    def __init__(self, workers: int, setup: dict[str, Any]):
        self.members: list[Child] = []
        self._wanted = workers
        self._workers = workers
        self._setup = setup
        self._ending: list[Child] = []

    def fill(self) -> None:
        """Start those that are missing; they load while others work."""
        while len(self.members) < self._wanted:
            self.members.append(Child(self._setup))

    def replace(self, child: Child) -> None:
        """End a child, and start another."""
        self._dismiss(child)
        self._wanted = self._workers + 1
        self.fill()

    def _dismiss(self, child: Child) -> None:
        self.members.remove(child)
        child.end()
        self._ending.append(child)

    def sweep(self) -> None:
        """Look after those that are ending."""
        self._ending = [child for child in self._ending if not child.ended()]

    def close(self) -> None:
        """End all, and return when nothing of them is left."""
        for child in list(self.members):
            self._dismiss(child)
        while self._ending:
            self.sweep()
            time.sleep(0.005)

    def idle(self) -> list[Child]:
        """Those that may be given rows: never more than ``workers`` are busy."""
        busy = sum(bool(child.rows) for child in self.members)
        return [child for child in self.members if child.idle][: self._workers - busy]

    def listen(self, seconds: float) -> Iterator[tuple[Child, dict[str, Any]]]:
        """Replies of the next ``seconds``, up to the first moment in which there are any."""
        with selectors.DefaultSelector() as selector:
            for child in self.members:
                selector.register(child.stdout, selectors.EVENT_READ, child)
                if child.sending:
                    selector.register(child.stdin, selectors.EVENT_WRITE, child)
            ready = {key.data: None for key, _ in selector.select(seconds)}
        for child in ready:
            if child.sending:
                child.push()
            for reply in child.replies():
                if child in self.members:  # not replaced by what it said before
                    yield child, reply
