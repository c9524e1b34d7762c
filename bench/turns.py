"""Several trainings in one process, one step of each in turn: they share the machine's good and bad moments.

Medians of whole runs, one after another, differ by a tenth on a busy or a shared machine; neighbouring steps do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback


class Turns:
    """Hands one turn around: forth and back, so that no training always comes first.

    Args:
        count: number of trainings.
    """

    def __init__(self, count: int) -> None:
        self._round = [*range(count), *reversed(range(count))]
        self._place = 0
        self._left = set(range(count))
        self._changed = threading.Condition()
        self.failed = False

    def wait(self, own: int) -> None:
        """Until it is the turn of training ``own``.

        Raises:
            RuntimeError: another training has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self._round[self._place] == own)
            if self.failed:
                raise RuntimeError("another training has failed")

    def hand_on(self, own: int, *, done: bool = False, failed: bool = False) -> None:
        """The turn of ``own`` is over; ``done`` if it was the last one."""
        with self._changed:
            self.failed |= failed
            if done:
                self._left.discard(own)
            for _ in self._round:
                self._place = (self._place + 1) % len(self._round)
                if self._round[self._place] in self._left:
                    break
            self._changed.notify_all()


class OneOfTurns(TrainerCallback):
    """A training's part in it: its steps begin in its turn, with its own random state."""

    def __init__(self, turns: Turns, own: int) -> None:
        self._turns, self._own = turns, own
        self._began: float | None = None
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note how long the step before took, and let the others take theirs."""
        if self._began is not None:
            self.seconds.append(time.perf_counter() - self._began)
        state = torch.get_rng_state()
        self._turns.hand_on(self._own)
        self._turns.wait(self._own)
        torch.set_rng_state(state)
        self._began = time.perf_counter()


def step_by_step(makers: dict[str, Callable[[TrainerCallback], Any]]) -> dict[str, list[float]]:
    """Train all, a step of each in turn, on one thread each.

    Args:
        makers: name -> a function that builds the trainer with the callback it is given.

    Returns:
        Seconds of every step but the last, of each training.
    """
    turns = Turns(len(makers))
    parts = [OneOfTurns(turns, own) for own in range(len(makers))]
    trainers = [make(part) for make, part in zip(makers.values(), parts, strict=True)]

    def train(own: int) -> None:
        torch.set_num_threads(1)
        try:
            turns.wait(own)
            torch.manual_seed(0)
            trainers[own].train()
            turns.hand_on(own, done=True)
        except BaseException:
            turns.hand_on(own, done=True, failed=True)
            raise

    threads = [threading.Thread(target=train, args=(own,)) for own in range(len(makers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if turns.failed:
        raise RuntimeError("a training has failed; its traceback is above")
    return {name: part.seconds for name, part in zip(makers, parts, strict=True)}
