"""Run several trainings in one process, one step of each in turn, so that all see the same load of the machine.

Medians of whole runs, one after another, differ by a tenth on a busy or a shared machine. Neighboring steps do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback


class Interleaver:
    """Give each of ``count`` trainings its turn, forth and back, so that none always comes first."""

    def __init__(self, count: int) -> None:
        self._round = [*range(count), *reversed(range(count))]
        self._place = 0
        self._left = set(range(count))
        self._changed = threading.Condition()
        self.failed = False

    def wait(self, index: int) -> None:
        """Wait for the turn of training ``index``; raise a RuntimeError if another training has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.failed or self._round[self._place] == index)
            if self.failed:
                raise RuntimeError("another training has failed")

    def hand_on(self, index: int, *, done: bool = False, failed: bool = False) -> None:
        """End the turn of training ``index``. After ``done`` it gets no other turn."""
        with self._changed:
            self.failed |= failed
            if done:
                self._left.discard(index)
            for _ in self._round:
                self._place = (self._place + 1) % len(self._round)
                if self._round[self._place] in self._left:
                    break
            self._changed.notify_all()


class InterleavedTraining(TrainerCallback):
    """Start each step of a training in its turn, with the training's random state."""

    def __init__(self, order: Interleaver, index: int) -> None:
        self._order, self._own = order, index
        self._began: float | None = None
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note how long the step before took, and let the others take theirs."""
        if self._began is not None:
            self.seconds.append(time.perf_counter() - self._began)
        state = torch.get_rng_state()
        self._order.hand_on(self._own)
        self._order.wait(self._own)
        torch.set_rng_state(state)
        self._began = time.perf_counter()


def interleave(makers: dict[str, Callable[[TrainerCallback], Any]]) -> dict[str, list[float]]:
    """Train all, a step of each in turn, on one thread each; return the seconds of every step but the last.

    Each maker builds a trainer with the callback it is given.
    """
    order = Interleaver(len(makers))
    parts = [InterleavedTraining(order, index) for index in range(len(makers))]
    trainers = [make(part) for make, part in zip(makers.values(), parts, strict=True)]

    def train(index: int) -> None:
        torch.set_num_threads(1)
        try:
            order.wait(index)
            torch.manual_seed(0)
            trainers[index].train()
            order.hand_on(index, done=True)
        except BaseException:
            order.hand_on(index, done=True, failed=True)
            raise

    threads = [threading.Thread(target=train, args=(index,)) for index in range(len(makers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if order.failed:
        raise RuntimeError("a training has failed; its traceback is above")
    return {name: part.seconds for name, part in zip(makers, parts, strict=True)}
