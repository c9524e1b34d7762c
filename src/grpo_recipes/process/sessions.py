"""Bounded HTTP for the library requests: one deadline and a maximum size for each response (see ``answers.py``).

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
    """Configure a session to use ``adapter``, the bearer ``token`` and no proxy for all requests; return the session.

    Proxies of the environment (``http_proxy``) are ignored, because they must not see requests to our own hosts.
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

    def raise_size_limit(self, size: int) -> None:
        """Raise the maximum size of a response to ``size`` bytes; a smaller ``size`` changes nothing."""
        self._max_bytes = max(self._max_bytes, size)

    def compute_time_limit(self, timeout: Any) -> float:
        """Return the seconds that a whole request may take: ``timeout``, but at most the limit of this adapter.

        ``timeout`` is an argument of requests: the seconds, a pair of connect and read seconds, or None.
        """
        read_timeout = timeout[-1] if isinstance(timeout, tuple) else timeout
        return min(self._timeout, read_timeout or self._timeout)

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Create the pools of urllib3, with connections that bound whole responses and check their listener."""
        super().init_poolmanager(*args, **options)
        pools = {"http": HTTPConnectionPool, "https": HTTPSConnectionPool}
        self.poolmanager.pool_classes_by_scheme = {
            name: _make_bounded_pool(pool, self.owner) for name, pool in pools.items()
        }

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send the request, read the whole response, and return it.

        Raise RejectedResponse if the response redirects or is too large, and an error of requests if it is late or
        another process listens.
        """
        limit = self.compute_time_limit(options.get("timeout"))
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


def _make_bounded_pool(pool: Any, owner: OwnListener | None) -> Any:
    """Return a subclass of urllib3's pool class ``pool``, for connections that bound whole responses.

    With ``owner``, its connections raise ForeignListener instead of reaching a process outside the run.
    """

    class Connection(pool.ConnectionCls):
        """A connection of ``pool`` that checks its listener, with one deadline for a whole response."""

        response_class = TimedResponse

        def connect(self) -> None:
            """Connect. With ``owner``, close the connection and raise an error if a process outside the run listens."""
            with contextlib.ExitStack() as close_on_error:
                close_on_error.callback(self.close)
                with owner.connecting() if owner else contextlib.nullcontext():
                    super().connect()
                close_on_error.pop_all()

    return type(f"Bounded{pool.__name__}", (pool,), {"ConnectionCls": Connection})
