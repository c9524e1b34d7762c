"""Bounded HTTP for the library requests (see ``answers.py``).

    session = secure_session(requests.Session(), BoundedAdapter(30.0, owner=owner), token)

All clients that use requests build their session here. Clients that use openai's package build theirs with
``async_sessions.bounded_client``, which has the same limits.
"""

import contextlib
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, Timeout

from grpo_recipes.process.answers import MAX_BYTES, TimedResponse
from grpo_recipes.process.listeners import OwnListener

_CONNECT_SECONDS = 10.0
_CHUNK_BYTES = 1 << 14  # compressed bytes per read; they may expand a thousandfold


def secure_session(session: requests.Session, adapter: "BoundedAdapter", token: str | None = None) -> requests.Session:
    """Let all requests of a session use ``adapter`` and the bearer ``token``, and no proxy; return the session.

    A proxy of the environment (``http_proxy``) must not see, or swallow, requests to our own hosts.
    """
    session.trust_env = False
    if token:
        session.headers["Authorization"] = f"Bearer {token}"
    for scheme in ("http://", "https://"):
        session.mount(scheme, adapter)
    return session


class RejectedResponse(requests.RequestException):
    """A response that is too large or redirects."""


class BoundedAdapter(HTTPAdapter):
    """Receive each response completely within the request's time limit, at most ``timeout`` seconds.

    The adapter keeps up to ``connections`` open and never repeats a request.
    """

    def __init__(
        self, timeout: float, max_bytes: int = MAX_BYTES, owner: OwnListener | None = None, connections: int = 1
    ) -> None:
        self._timeout, self._max_bytes, self.owner = timeout, max_bytes, owner
        super().__init__(pool_maxsize=connections, max_retries=0)

    def allow(self, size: int) -> None:
        """Accept responses of up to ``size`` bytes from now on."""
        self._max_bytes = max(self._max_bytes, size)

    def limit_of(self, timeout: Any) -> float:
        """Return the seconds that a whole request may take.

        ``timeout`` is the timeout argument of requests: a number, a pair, or None. The adapter's own limit still
        applies.
        """
        read_timeout = timeout[-1] if isinstance(timeout, tuple) else timeout
        return min(self._timeout, read_timeout or self._timeout)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Create connections that limit whole responses and check their listener."""
        super().init_poolmanager(*args, **options)
        pools = {"http": HTTPConnectionPool, "https": HTTPSConnectionPool}
        self.poolmanager.pool_classes_by_scheme = {name: _bounded(pool, self.owner) for name, pool in pools.items()}

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send the request, read the whole response, and return it.

        Raise RejectedResponse if the response redirects or is too large, and an error of requests if it is late.
        """
        limit = self.limit_of(options.get("timeout"))
        options["timeout"] = Timeout(connect=min(limit, _CONNECT_SECONDS), read=limit, total=limit)
        response = super().send(request, *args, **options)
        with contextlib.ExitStack() as close_on_error:
            close_on_error.callback(response.close)
            if response.is_redirect:
                raise RejectedResponse(f"redirects to {response.headers['location'][:200]}, which is not followed")
            body = bytearray()
            for chunk in response.iter_content(_CHUNK_BYTES):
                body += chunk
                if len(body) > self._max_bytes:
                    raise RejectedResponse(f"sends more than {self._max_bytes / 1e6:.0f} MB")
            response._content = bytes(body)
            close_on_error.pop_all()
        return response


def _bounded(pool: Any, owner: OwnListener | None) -> Any:
    """Subclass a connection pool of urllib3 so that connections have a deadline and only send to ``owner``."""

    class Connection(pool.ConnectionCls):
        response_class = TimedResponse

        def connect(self) -> None:
            with contextlib.ExitStack() as close_on_error:
                close_on_error.callback(self.close)
                with owner.connecting() if owner else contextlib.nullcontext():
                    super().connect()
                close_on_error.pop_all()

    return type(f"Bounded{pool.__name__}", (pool,), {"ConnectionCls": Connection})
