"""A class for TRL's ``environment_factory``: it has state, and fails in several ways."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

PRICES = {"pear": 3, "fig": 4}


class Shop:
    """A basket that tools fill."""

    def __init__(self, currency: str = "EUR"):
        self.currency, self.total, self.luck = currency, 0, 0.0
        self.lock = threading.Lock()

    def reset(self, prompt: list[dict[str, str]], answer: str, **columns: Any) -> str:
        if answer == "broken":
            raise ValueError("no such shop")
        self.prompt, self.luck = prompt, random.random()
        return f" in {self.currency}"

    async def buy(self, item: str, count: int = 1) -> int:
        """
        Put an item into the basket.

        Args:
            item: Name of the item.
            count: Number of pieces.

        Returns:
            The total so far.
        """
        self.total += PRICES[item] * count
        return self.total

    def misbehave(self, how: str) -> str:
        """
        Fail in a way, after a change.

        Args:
            how: What to do.
        """
        self.total += 1000
        if how == "sleep":
            time.sleep(60)
        if how == "die":
            os._exit(3)
        return how

    def get_reward(self) -> float:
        return self.total / 10 + self.luck / 1000

    def _hidden(self) -> None: ...


class Vague:
    def reset(self, **columns: Any) -> None: ...

    def call(self, item):  # type: ignore[no-untyped-def]
        return item


class Silent:
    def reset(self, **columns: Any) -> str:
        return "x"


class Slotted:
    __slots__ = ("total",)

    def reset(self, **columns: Any) -> None: ...
