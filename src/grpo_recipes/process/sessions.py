"""Bounded HTTP for requests: see ``answers.py``.

session.mount("http://", BoundedAdapter(30.0, owner=owner))
"""

import contextlib
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, Timeout

from grpo_recipes.process.answers import MOST_BYTES, TimedResponse
from grpo_recipes.process.listeners import OwnListener

_CONNECT_SECONDS = 10.0
_PIECE = 1 << 14  # compressed bytes at a time, which may be a thousand times as many afterwards


class UnwantedAnswer(requests.RequestException):
    """An answer that is too large, or a redirect, which is not followed."""


class BoundedAdapter(HTTPAdapter):
    """Read every answer whole within the request's time limit, at most ``timeout`` seconds.

    ``connections`` are kept at most. Nothing is repeated.
    """

    def __init__(
        self, timeout: float, most_bytes: int = MOST_BYTES, owner: OwnListener | None = None, connections: int = 1
    ) -> None:
        self._timeout, self._most_bytes, self.owner = timeout, most_bytes, owner
        super().__init__(pool_maxsize=connections, max_retries=0)

    def allow(self, size: int) -> None:
        """Accept answers of so many bytes from now on."""
        self._most_bytes = max(self._most_bytes, size)

    def limit_of(self, timeout: Any) -> float:
        """Return the seconds that a request with this ``timeout`` may take in all."""
        given = timeout[-1] if isinstance(timeout, tuple) else timeout
        return min(self._timeout, given or self._timeout)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Make connections that limit whole answers and look for their listener."""
        super().init_poolmanager(*args, **options)
        pools = {"http": HTTPConnectionPool, "https": HTTPSConnectionPool}
        self.poolmanager.pool_classes_by_scheme = {name: _bounded(pool, self.owner) for name, pool in pools.items()}

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send the request and read the whole answer."""
        limit = self.limit_of(options.get("timeout"))
        options["timeout"] = Timeout(connect=min(limit, _CONNECT_SECONDS), read=limit, total=limit)
        answer = super().send(request, *args, **options)
        with contextlib.ExitStack() as refused:
            refused.callback(answer.close)
            if answer.is_redirect:
                raise UnwantedAnswer(f"redirects to {answer.headers['location'][:200]}, which is not followed")
            body = bytearray()
            for piece in answer.iter_content(_PIECE):
                body += piece
                if len(body) > self._most_bytes:
                    raise UnwantedAnswer(f"sends more than {self._most_bytes / 1e6:.0f} MB")
            answer._content = bytes(body)
            refused.pop_all()
        return answer


def _bounded(pool: Any, owner: OwnListener | None) -> Any:
    """Return a class of urllib3's pools whose connections read with a deadline and send to ``owner`` only."""

    class Connection(pool.ConnectionCls):
        response_class = TimedResponse

        def connect(self) -> None:
            with contextlib.ExitStack() as refused:
                refused.callback(self.close)
                with owner.connecting() if owner else contextlib.nullcontext():
                    super().connect()
                refused.pop_all()

    return type(f"Bounded{pool.__name__}", (pool,), {"ConnectionCls": Connection})
