"""Environments with the shapes of TRL's examples for ``environment_factory``, and a function that makes one."""

from __future__ import annotations

import random
from typing import Any


class Increment:
    """The environment makes the prompt and the reward, as in TRL's guide."""

    def reset(self, **kwargs: Any) -> str | None:
        self.total = 0
        self.target = random.randint(1, 6)
        return f"Increment the counter by {self.target}."

    def get_reward(self) -> float:
        return float(self.total == self.target)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.

        Returns:
            The updated counter value.
        """
        self.total += step
        return self.total


class Target(Increment):
    """The task comes from a column of the dataset, and the reward is async."""

    def reset(self, target: int, **kwargs: Any) -> None:  # type: ignore[override]
        self.total, self.target = 0, target

    async def get_reward(self) -> float:  # type: ignore[override]
        return float(self.total == self.target)


class Board:
    """A game with static and private methods, which raises errors after its end, and whose reward a function reads."""

    def reset(self, **kwargs: Any) -> str:
        self.cells, self.total, self.done = [2, 2], 0, False
        return self._render()

    def move(self, direction: str) -> str:
        """
        Play a move.

        Args:
            direction: One of "left", "right".

        Returns:
            The board after the move.
        """
        if self.done:
            raise ValueError("Game over.")
        self.cells, gained = self._merge(self.cells)
        self.total += gained
        self.done = len(self.cells) < 2
        return self._render()

    @staticmethod
    def _merge(cells: list[int]) -> tuple[list[int], int]:
        return [sum(cells)], sum(cells)

    def _render(self) -> str:
        return f"score={self.total} {self.cells} done={self.done}"


def make_increment() -> Increment:
    return Increment()


def read_score(environments: list[Any], **kwargs: Any) -> list[float]:
    return [environment.total for environment in environments]
