"""ASGI middleware of the run's server: it checks tokens, and reports pending requests and the step of the weights.

vLLM's own ``--api-key`` does not cover the development endpoints that change weights. The engine's own metrics do not
change while it hangs, so activity is counted in the process that accepts requests.

Two tokens exist. The run's token (``GRPO_TOKEN_FILE``) opens everything. Environments that a user starts in other
terminals have their own token (``ENVIRONMENT_TOKEN_VARIABLE``), which only samples.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACTIVITY_PATH = "/grpo/activity"
# The optimizer step of the server's weights: the trainer sends it with the request that ends a sync, and from then on
# every answer has it, as it was when the request came. An answer of a server that was never told does not.
POLICY_HEADER = "X-Grpo-Policy"
SYNCED_PATH = "/reset_prefix_cache"  # of the request that ends a sync
_POLICY = POLICY_HEADER.lower().encode()  # as ASGI has names of headers
GENERATE_PATH = "/generate"  # where environments in other terminals sample with token ids
ENVIRONMENT_PATHS = ("/health", GENERATE_PATH, "/v1/models", "/v1/completions", "/v1/chat/completions")
# Variables of a server that environments in other terminals sample from: the file of their token, and the recipe's
# sampling parameters as JSON, for requests that do not give them.
ENVIRONMENT_TOKEN_VARIABLE = "GRPO_ENVIRONMENT_TOKEN_FILE"
SAMPLING_VARIABLE = "GRPO_SAMPLING"
_FROM_ENVIRONMENT = "grpo_from_environment"  # in the scope of a request with the environments' token


async def _answer(send: Send, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequireToken:
    """Answer 401 unless the request has ``Authorization: Bearer TOKEN``, with a token that opens its path."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._run = _bearer(os.environ["GRPO_TOKEN_FILE"])
        file = os.environ.get(ENVIRONMENT_TOKEN_VARIABLE)
        self._environment = _bearer(file) if file else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 and count it in ``app.state.refused``."""
        if scope["type"] not in ("http", "websocket") or self._admits(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            if "app" in scope:
                state = scope["app"].state
                state.refused = getattr(state, "refused", 0) + 1
            await _answer(send, 401, b"text/plain", b"this server belongs to a run; its token is missing or wrong")

    def _admits(self, scope: Scope) -> bool:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(given, self._run):
            return True
        if self._environment is None or not hmac.compare_digest(given, self._environment):
            return False
        scope[_FROM_ENVIRONMENT] = True
        return scope["type"] == "http" and scope["path"] in ENVIRONMENT_PATHS


def _bearer(token_file: str) -> bytes:
    return f"Bearer {Path(token_file).read_text().strip()}".encode()


class ReportActivity:
    """Answer ``GET /grpo/activity`` with what is under way: ``requests`` by POST, weight loads and pauses included.

    ``completions`` are those that the engine was given and has not finished; while it is paused, its queue, which
    vLLM's metrics do not show. ``refused`` counts requests with a missing or wrong token. Every answer has the step of
    the weights (``POLICY_HEADER``). Before the first sync, environments in other terminals get 503: the server has
    other weights than the trainer, for example after a restart.
    """

    def __init__(self, app: ASGIApp):
        self._app = app
        self._requests = 0
        self._policy: bytes | None = None  # the number of the last sync that was completed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer that question; pass on and count everything else."""
        kind, method = scope["type"], scope.get("method")
        if kind == "http" and self._policy is not None:
            send = _with_header(send, self._policy)
        if kind == "http" and method == "GET" and scope["path"] == ACTIVITY_PATH:
            # Counted before a completion is sent to the engine, in one go with sending it: what is counted here reaches
            # the engine before a request that comes later.
            state = scope["app"].state
            completions = state.engine_client.get_num_unfinished_requests()
            refused = getattr(state, "refused", 0)
            activity = {"requests": self._requests, "completions": completions, "refused": refused}
            await _answer(send, 200, b"application/json", json.dumps(activity).encode())
            return
        if scope.get(_FROM_ENVIRONMENT) and self._policy is None:
            await _answer(send, 503, b"text/plain", b"the server waits for the trainer's weights")
            return
        counted = kind == "http" and method == "POST"
        told = dict(scope.get("headers", ())).get(_POLICY) if counted and scope["path"] == SYNCED_PATH else None
        answer = _Answer(send)
        self._requests += counted
        try:
            await self._app(scope, receive, answer.send if told else send)
        finally:
            self._requests -= counted
        if told and told.isdigit() and answer.says_success():
            self._policy = told


def _with_header(send: Send, policy: bytes) -> Send:
    async def send_with_header(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (_POLICY, policy)]}
        await send(message)

    return send_with_header


class _Answer:
    """Pass a small answer on and keep it."""

    def __init__(self, send: Send):
        self._send, self._body = send, b""

    async def send(self, message: Message) -> None:
        self._body += message.get("body", b"")
        await self._send(message)

    def says_success(self) -> bool:
        """Return whether the cache is empty now: it is not while a request has a part of it, and then stays as it was.

        An answer that is not vLLM's own tells nothing about it.
        """
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(self._body).get("success") is True
        return False
