"""ASGI middleware of the run's server: it checks tokens, and reports pending requests and the step of the weights.

vLLM's own ``--api-key`` does not protect the development endpoints that change weights. The engine's metrics do not
change while the engine hangs, so activity is counted in the process that accepts requests.

Two tokens exist. The run's token (``GRPO_TOKEN_FILE``) opens every path. Environments that a user starts in other
terminals have their own token (``ENVIRONMENT_TOKEN_VARIABLE``), which only opens sampling.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

ACTIVITY_PATH = "/grpo/activity"
# Header with the optimizer step of the server's weights. The trainer sends it with the request that ends a sync. From
# then on every answer carries the step that was current when its request arrived.
POLICY_HEADER = "X-Grpo-Policy"
SYNCED_PATH = "/grpo/reset_prefix_cache"  # a request to this path ends a sync
_POLICY = POLICY_HEADER.lower().encode()  # ASGI uses lower-case bytes for names of headers
GENERATE_PATH = "/generate"  # environments in other terminals sample here with token ids
ENVIRONMENT_PATHS = ("/health", GENERATE_PATH, "/v1/models", "/v1/completions", "/v1/chat/completions")
# Variables of a server for environments in other terminals: the file of their token, and the recipe's sampling
# parameters as JSON, which are defaults for their requests.
ENVIRONMENT_TOKEN_VARIABLE = "GRPO_ENVIRONMENT_TOKEN_FILE"
SAMPLING_VARIABLE = "GRPO_SAMPLING"
_FROM_ENVIRONMENT = "grpo_from_environment"  # scope key that marks a request with the environments' token


async def _send_answer(send: Send, status: int, kind: bytes, body: bytes) -> None:
    """Send a complete ASGI response with this status, content type and body."""
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequireToken:
    """Answer 401 unless the request has ``Authorization: Bearer TOKEN`` with a token that opens its path.

    The tokens are read from their files once, in the constructor.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._run = _read_authorization(os.environ["GRPO_TOKEN_FILE"])
        file = os.environ.get(ENVIRONMENT_TOKEN_VARIABLE)
        self._environment = _read_authorization(file) if file else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401 and count it in ``app.state.refused``. Close an unauthorized WebSocket."""
        if scope["type"] not in ("http", "websocket") or self._is_authorized(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            if "app" in scope:
                state = scope["app"].state
                state.refused = getattr(state, "refused", 0) + 1
            await _send_answer(send, 401, b"text/plain", b"this server belongs to a run; its token is missing or wrong")

    def _is_authorized(self, scope: Scope) -> bool:
        """Return whether the token in the request's Authorization header opens its path.

        The run's token opens every path. The environments' token opens only ``ENVIRONMENT_PATHS``, and only over HTTP.
        A request with it is marked in ``scope``.
        """
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        if hmac.compare_digest(authorization, self._run):
            return True
        if self._environment is None or not hmac.compare_digest(authorization, self._environment):
            return False
        scope[_FROM_ENVIRONMENT] = True
        return scope["type"] == "http" and scope["path"] in ENVIRONMENT_PATHS


def _read_authorization(token_file: str) -> bytes:
    """Return the Authorization header, ``Bearer TOKEN``, with the token in a file."""
    return f"Bearer {Path(token_file).read_text().strip()}".encode()


@dataclass(eq=False)
class ReportActivity:
    """Answer ``GET /grpo/activity``, and add the step of the weights (``POLICY_HEADER``) to every answer.

    The activity has three counts. ``requests`` are unfinished POST requests, including weight loads and pauses.
    ``completions`` are unfinished completions of the engine, including the queue of a paused engine, which vLLM's
    metrics do not contain. ``refused`` are requests with a missing or wrong token. Before the first sync, environments
    in other terminals get 503, since the server may have other weights than the trainer, for example after a restart.
    """

    app: ASGIApp
    _requests: int = field(default=0, init=False)
    _policy: bytes | None = field(default=None, init=False)
    """Optimizer step of the last completed sync."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer requests for the activity; pass on all others, and count POST requests while they run.

        A successful request to ``SYNCED_PATH`` sets the step that later answers carry. Before the first, a request of
        an environment gets 503.
        """
        kind, method = scope["type"], scope.get("method")
        counted = kind == "http" and method == "POST"
        ends_sync = counted and scope["path"] == SYNCED_PATH
        answer = _Answer(send, self._policy, keeps_body=ends_sync)
        if kind == "http":
            send = answer.send
        if kind == "http" and method == "GET" and scope["path"] == ACTIVITY_PATH:
            # The engine client counts a completion in the same call that sends it to the engine. So each counted
            # completion reaches the engine before any later request.
            state = scope["app"].state
            completions = state.engine_client.get_num_unfinished_requests()
            refused = getattr(state, "refused", 0)
            activity = {"requests": self._requests, "completions": completions, "refused": refused}
            await _send_answer(send, 200, b"application/json", json.dumps(activity).encode())
            return
        if scope.get(_FROM_ENVIRONMENT) and self._policy is None:
            await _send_answer(send, 503, b"text/plain", b"the server waits for the trainer's weights")
            return
        self._requests += counted
        try:
            await self.app(scope, receive, send)
        finally:
            self._requests -= counted
        step = dict(scope.get("headers", ())).get(_POLICY) if ends_sync else None
        if step and step.isdigit() and answer.is_success():
            self._policy = step


@dataclass(eq=False)
class _Answer:
    """Send a response's messages on with the optimizer step of the weights as a header."""

    send_on: Send
    policy: bytes | None
    """The optimizer step; None before the first sync, without a header."""
    keeps_body: bool
    """Whether the body is kept for ``is_success``."""
    body: bytes = b""

    async def send(self, message: Message) -> None:
        """Send a message on. Add the header to the start of the response, and keep the body."""
        if message["type"] == "http.response.start" and self.policy is not None:
            message = {**message, "headers": [*message.get("headers", ()), (_POLICY, self.policy)]}
        if self.keeps_body:
            self.body += message.get("body", b"")
        await self.send_on(message)

    def is_success(self) -> bool:
        """Return whether the body is JSON with ``success: true``: every replica has emptied its prefix cache.

        A replica does not empty it while a request uses a part of it.
        """
        with contextlib.suppress(ValueError, AttributeError):
            return json.loads(self.body).get("success") is True
        return False
