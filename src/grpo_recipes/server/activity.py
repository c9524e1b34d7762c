"""What the server is doing, from the process that takes its requests: the engine's own metrics stand while it hangs."""

from __future__ import annotations

import json

from grpo_recipes.server.asgi import Application, Receive, Scope, Send

ACTIVITY_PATH = "/grpo/activity"


class ReportActivity:
    """ASGI middleware that answers ``GET /grpo/activity`` with what is under way.

    ``requests``: POST requests without an answer so far, weight loads and pauses included. ``completions``: completions
    that the engine was given and has not finished; while it is paused, its queue, which vLLM's metrics do not show.
    """

    def __init__(self, app: Application):
        self._app = app
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the one question, and pass on and count everything else."""
        kind, method = scope["type"], scope.get("method")
        if kind == "http" and method == "GET" and scope["path"] == ACTIVITY_PATH:
            await self._answer(scope, send)
            return
        counted = kind == "http" and method == "POST"
        self._requests += counted
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= counted

    async def _answer(self, scope: Scope, send: Send) -> None:
        # Counted before a completion is sent to the engine, in one go with sending it: what is counted here reaches the
        # engine before a request that comes later.
        completions = scope["app"].state.engine_client.get_num_unfinished_requests()
        body = json.dumps({"requests": self._requests, "completions": completions}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})
