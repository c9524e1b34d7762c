"""Test the endpoints that ask every replica, with vLLM's own client code and fakes of its engines."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import FastAPI

pytest.importorskip("vllm")

from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError

from grpo_recipes.server.completions import AddServerEndpoints
from grpo_recipes.server.plugin import WeightReport
from grpo_recipes.server.replicas import call_workers, reset_prefix_cache


class FakeEngines(DPLBAsyncMPClient):
    """vLLM's client of several engines, without sockets: an engine's answer is a value or an exception."""

    def __init__(self, *answers: Any) -> None:
        self.core_engines = [index.to_bytes(2, "little") for index in range(len(answers))]
        self.core_engine, self.answers = self.core_engines[0], answers
        self.asked: list[tuple[Any, ...]] = []

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.asked.append((int.from_bytes(engine, "little"), method, *args))
        answer = self.answers[self.core_engines.index(engine)]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: the fake has no processes."""


def ask(endpoint: Any, engines: FakeEngines, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
    async def read() -> dict[str, Any]:
        return body or {}

    state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=engines))
    request = SimpleNamespace(app=SimpleNamespace(state=state), json=read)
    answer: dict[str, Any] = json.loads(asyncio.run(endpoint(request, **query)).body)
    return answer


def test_vllm_returns_the_first_replicas_result_and_our_endpoint_all() -> None:
    engines = FakeEngines([{"sync": 4}], [{"sync": 3}])
    assert asyncio.run(engines.call_utility_async("collective_rpc")) == [{"sync": 4}]
    engines.asked.clear()
    body = {"method": "grpo_load", "kwargs": {"folder": "f"}}
    assert ask(call_workers, engines, body) == {"results": [[{"sync": 4}], [{"sync": 3}]]}
    assert engines.asked == [(index, "collective_rpc", "grpo_load", None, (), {"folder": "f"}) for index in (0, 1)]


def test_pauses_and_adapters_wait_for_every_replica() -> None:
    """They are vLLM's own requests: one of them fails if a replica fails."""
    with pytest.raises(ValueError, match="not me"):
        asyncio.run(FakeEngines(None, ValueError("not me")).pause_scheduler_async("keep"))
    engines = FakeEngines(True, True, True)
    asyncio.run(engines.resume_scheduler_async())
    asyncio.run(engines.add_lora_async("adapter"))
    assert [index for index, *_ in engines.asked] == [0, 1, 2] * 2


def test_a_replica_that_fails_is_named() -> None:
    with pytest.raises(RuntimeError, match="replica 1: no such method"):
        ask(call_workers, FakeEngines([1], ValueError("no such method"), [1]), {"method": "x"})
    with pytest.raises(RuntimeError, match=r"^no such method$"):
        ask(call_workers, FakeEngines(ValueError("no such method")), {"method": "x"})
    with pytest.raises(EngineDeadError):  # vLLM ends the server after it
        ask(call_workers, FakeEngines([1], EngineDeadError()), {"method": "x"})


def test_a_sync_ends_when_every_prefix_cache_is_empty() -> None:
    engines = FakeEngines(True, False)
    assert ask(reset_prefix_cache, engines) == {"success": False, "emptied": [True, False]}
    assert ask(reset_prefix_cache, FakeEngines(True, True), reset_running_requests=True)["success"] is True
    assert engines.asked == [(index, "reset_prefix_cache", False, False) for index in (0, 1)]


def test_replicas_are_seeded_at_the_start() -> None:
    async def ignore(*_: Any) -> None:
        """Stand for the application behind the middleware."""

    def start(engines: FakeEngines) -> list[tuple[Any, ...]]:
        app = FastAPI()
        app.state.engine_client = SimpleNamespace(engine_core=engines)
        asyncio.run(AddServerEndpoints(ignore)({"type": "lifespan", "app": app}, ignore, ignore))
        return engines.asked

    assert start(FakeEngines(None)) == []
    assert start(FakeEngines([None], [None])) == [
        (index, "collective_rpc", "grpo_seed", None, (), {}) for index in (0, 1)
    ]


def test_replicas_draw_distinct_seeds_for_requests_and_their_workers_equal_ones() -> None:
    """On GPUs, vLLM draws a request's seed from NumPy, or its noise from torch."""

    def draw(replica: int) -> tuple[int, int]:
        worker = WeightReport()
        parallel = SimpleNamespace(data_parallel_index=replica)
        worker.vllm_config = SimpleNamespace(model_config=SimpleNamespace(seed=0), parallel_config=parallel)
        worker.grpo_seed()
        return np.random.randint(1 << 62), int(torch.randint(1 << 62, ()))

    (seed, noise), (other_seed, other_noise) = draw(0), draw(1)
    assert draw(0) == (seed, noise)
    assert seed != other_seed
    assert noise != other_noise
