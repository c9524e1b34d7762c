"""Sampling that can be done again bit for bit: a seed per prompt, and batches that do not depend on arrival times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from grpo_recipes.weights.restarts import GenerationAborted
from grpo_recipes.weights.transport import ServerLost

REQUESTS = 256  # at a time: each holds a thread and a connection until it is answered
_LOOK_SECONDS = 0.005

Answer = dict[str, Any]


def sample_each(sample: Callable[[int], Answer], prompts: int, hold: Hold | None) -> Answer:
    """Make one request per prompt, many at a time.

    Args:
        sample: makes the request of one prompt, by its index.
        prompts: how many there are.
        hold: keeps the engine from starting before it has all requests of a moment, or None.

    Returns:
        The answers, joined in the order of prompts.
    """
    answers: list[Answer] = []
    for start in range(0, prompts, REQUESTS):
        share = range(start, min(start + REQUESTS, prompts))
        executor = ThreadPoolExecutor(max_workers=len(share))
        try:
            if hold is not None:
                hold.begin()
            futures = [executor.submit(sample, index) for index in share]
            if hold is not None:
                hold.end(futures)
            answers += [future.result() for future in futures]
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
    return {
        key: None if answers[0][key] is None else [row for answer in answers for row in answer[key]]
        for key in answers[0]
    }


class Engine(Protocol):
    """The engine of a server, as far as sampling again bit for bit needs it."""

    @property
    def aborted(self) -> bool:
        """Whether the generation was given up."""

    def pause(self, mode: str) -> None:
        """Stop taking up requests."""

    def resume(self) -> None:
        """Go on."""

    def completions_under_way(self) -> int:
        """Return the completions that were asked for and are not finished."""


class Hold:
    """The engine is paused until it has all requests of a moment.

    Which completions share a forward pass decides the last bits of their log-probs, and that depends on when each
    arrives. Pausing also empties the engine's prefix cache, so that nothing depends on what it sampled before.

    Args:
        engine: of the server.
        n: completions of a request.
        limit: longest wait in seconds.
    """

    def __init__(self, engine: Engine, n: int, limit: float):
        self._engine = engine
        self._limit = limit
        self._n = n

    def begin(self) -> None:
        """Pause the engine once it has finished or dropped everything else."""
        self._wait_for(0, [])
        self._engine.pause("keep")

    def end(self, futures: Sequence[Future[Answer]]) -> None:
        """Let the engine go on when it has the requests, or when one of them has failed."""
        try:
            self._wait_for(len(futures) * self._n, futures)
        finally:
            self._engine.resume()

    def _wait_for(self, completions: int, futures: Sequence[Future[Answer]]) -> None:
        deadline = time.monotonic() + self._limit
        while self._engine.completions_under_way() != completions:
            if any(future.done() for future in futures):
                return
            if self._engine.aborted:
                raise GenerationAborted
            if time.monotonic() > deadline:
                raise ServerLost(f"the vLLM server did not take up {completions} completions within {self._limit:g} s")
            time.sleep(_LOOK_SECONDS)
