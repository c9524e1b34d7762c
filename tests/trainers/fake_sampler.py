"""A fake of the run's server. Its completions depend only on the received weights and the seed."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any

from weights.fake_server import FakeServer

from grpo_recipes.server.wire import flatten_completions, pack_completions

LOGPROB = -5.5  # close to a random model with 260 tokens


class FakeSampler(FakeServer):
    """A fake server that also records the weights behind each request.

    Attributes:
        weights: a number that represents the current weights.
        sampled_with: prompt, number of completions, seed, and the weights before and after sampling, by request.
        loaded_during: how many completions were being sampled when weights came, by load.
        updates: None, or the number of finished updates. Four requests are a generation; generation k waits for k.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = 0
        self.sampled_with: list[tuple[tuple[int, ...], int, int, int, int]] = []
        self.loaded_during: list[int] = []
        self.updates: int | None = None
        self._requests = 0

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | bytes | None:
        if body.get("method") == "grpo_load":
            self.loaded_during.append(self.under_way)
            content = Path(body["kwargs"]["folder"], "model.safetensors").read_bytes()
            header = int.from_bytes(content[:8], "little")  # it holds the number of the sync
            self.weights = int.from_bytes(hashlib.sha256(content[8 + header :]).digest()[:4], "big")
        return super().post(path, body)

    def _completions(self, body: dict[str, Any]) -> bytes:
        before, count = self.weights, body["n"]
        with self._lock:
            self.under_way += count
            generation, self._requests = self._requests // 4, self._requests + 1
        self._running.wait(10)
        while self.updates is not None and self.updates < generation:
            time.sleep(0.005)
        time.sleep(self.sampling_seconds)
        ids: list[list[int]] = []
        for number in range(count):
            seed = body["seed"] + number
            drawn = [hashlib.sha256(f"{before}/{seed}/{place}".encode()).digest()[0] % 97 for place in range(4)]
            ids.append(drawn[: 1 + drawn[0] % min(4, body["max_tokens"])])
        with self._lock:
            self.under_way -= count
            self.sampled_with.append((tuple(body["prompt"]), count, body["seed"], before, self.weights))
        return pack_completions(flatten_completions(ids, [[LOGPROB] * len(row) for row in ids]))
