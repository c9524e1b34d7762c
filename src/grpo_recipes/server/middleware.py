"""ASGI middleware of the run's server: it asks for the run's token, and reports what is under way.

vLLM's own ``--api-key`` does not cover the development endpoints that change weights. The engine's own metrics do not
change while it hangs, so activity is counted in the process that takes requests.
"""

from __future__ import annotations

import hmac
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

ACTIVITY_PATH = "/grpo/activity"


async def _answer(send: Send, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequireToken:
    """Answer 401 unless the request says ``Authorization: Bearer <token of GRPO_TOKEN_FILE>``."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._expected = f"Bearer {Path(os.environ['GRPO_TOKEN_FILE']).read_text().strip()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] not in ("http", "websocket") or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, b"text/plain", b"this server belongs to a run; its token is missing")


class ReportActivity:
    """Answer ``GET /grpo/activity`` with what is under way: ``requests`` by POST, weight loads and pauses included.

    ``completions`` are those that the engine was given and has not finished; while it is paused, its queue, which
    vLLM's metrics do not show.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer that question; pass on and count everything else."""
        kind, method = scope["type"], scope.get("method")
        if kind == "http" and method == "GET" and scope["path"] == ACTIVITY_PATH:
            # Counted before a completion is sent to the engine, in one go with sending it: what is counted here reaches
            # the engine before a request that comes later.
            completions = scope["app"].state.engine_client.get_num_unfinished_requests()
            body = json.dumps({"requests": self._requests, "completions": completions}).encode()
            await _answer(send, 200, b"application/json", body)
            return
        counted = kind == "http" and method == "POST"
        self._requests += counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= counted
