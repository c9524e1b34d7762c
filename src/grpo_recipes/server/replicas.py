"""Calls of every replica: their seeds, and endpoints that return an answer of each (worker methods, end of a sync).

vLLM's own endpoints (``/collective_rpc``, ``/reset_prefix_cache``) call every replica too, but return only the result
of the first replica. The trainer could not see that another replica still has old weights.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from vllm.v1.engine.exceptions import EngineDeadError

from grpo_recipes.server.middleware import SYNCED_PATH
from grpo_recipes.server.wire import WORKERS_PATH

router = APIRouter()


async def seed_replicas(app: FastAPI) -> None:
    """Give every replica its own random state. A server without replicas keeps vLLM's.

    vLLM starts all of them with the same seed. Each would draw the same noise for its n-th request, and two completions
    of a prompt would be equal.
    """
    if len(app.state.engine_client.engine_core.core_engines) > 1:
        await _call_replicas(app, "collective_rpc", "grpo_seed", None, (), {})


@router.post(WORKERS_PATH)
async def call_workers(raw_request: Request) -> JSONResponse:
    """Call a method of every worker, as ``/collective_rpc`` does.

    The request is ``{"method": NAME, "kwargs": {}}``. The answer's ``results`` have a list for each replica, with the
    result of each of its workers. Raise RuntimeError if the method fails in a replica, and EngineDeadError if a replica
    is dead.
    """
    body = await raw_request.json()
    results = await _call_replicas(raw_request.app, "collective_rpc", body["method"], None, (), body.get("kwargs", {}))
    return JSONResponse({"results": results})


@router.post(SYNCED_PATH)
async def reset_prefix_cache(raw_request: Request, reset_running_requests: bool = False) -> JSONResponse:
    """Empty the prefix cache of every replica. ``success`` is true if all of them did.

    A replica does not empty its cache while a request uses a part of it, unless ``reset_running_requests`` is true.
    ``emptied`` has the success of each replica.
    """
    emptied = await _call_replicas(raw_request.app, "reset_prefix_cache", reset_running_requests, False)
    return JSONResponse({"success": all(emptied), "emptied": emptied})


async def _call_replicas(app: FastAPI, method: str, *arguments: Any) -> list[Any]:
    """Call a method of every replica's engine at the same time; return a result for each replica, in order.

    Raise EngineDeadError if a replica is dead, and RuntimeError with the number of a replica if its method failed.
    """
    client = app.state.engine_client.engine_core
    calls = [client._call_utility_async(method, *arguments, engine=engine) for engine in client.core_engines]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for index, result in enumerate(results):
        if isinstance(result, EngineDeadError):
            raise result
        if isinstance(result, BaseException):
            raise RuntimeError(f"replica {index}: {result}" if len(results) > 1 else str(result)) from result
    return list(results)
