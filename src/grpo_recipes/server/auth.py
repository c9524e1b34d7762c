"""Every request to the run's server must carry the run's token.

vLLM's own ``--api-key`` does not cover the development endpoints that change weights, so an ASGI middleware does.
"""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from grpo_recipes.server.asgi import Application, Receive, Scope, Send


class RequireToken:
    """ASGI middleware: 401 unless the request says ``Authorization: Bearer <token of GRPO_TOKEN_FILE>``."""

    def __init__(self, app: Application):
        self._app = app
        self._expected = f"Bearer {Path(os.environ['GRPO_TOKEN_FILE']).read_text().strip()}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 401."""
        if scope["type"] == "websocket" and not self._authorized(scope):
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not self._authorized(scope):
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"this server belongs to a run; its token is missing"})
            return
        await self._app(scope, receive, send)

    def _authorized(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)
