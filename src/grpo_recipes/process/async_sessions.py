"""An async HTTP client for openai that limits the total time and the size of each response.

    openai.AsyncOpenAI(http_client=bounded_client(600.0, owner), max_retries=0, ...)  # 600 seconds

openai uses the library httpx2. ``process/answers.py`` explains why a time limit for each read is not enough. With
``owner``, no request is sent to the listener of another process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from grpo_recipes.errors import translate_errors
from grpo_recipes.process.answers import MAX_BYTES
from grpo_recipes.process.listeners import ForeignListener, OwnListener


def bounded_client(
    timeout: float, owner: OwnListener | None = None, max_bytes: int = MAX_BYTES
) -> openai.DefaultAsyncHttpxClient:
    """Return a client without proxies and redirects that receives each whole response within ``timeout`` seconds.

    The client raises an error of httpx2 if a response is late or larger than ``max_bytes``. With ``owner``, it also
    raises an error if another process listens, and sends nothing to it.
    """
    transport = _BoundedTransport(timeout, owner, max_bytes)
    return openai.DefaultAsyncHttpxClient(trust_env=False, follow_redirects=False, transport=transport)


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    """Sends requests uncompressed, checks the listener of each new connection, and bounds each response."""

    def __init__(self, timeout: float, owner: OwnListener | None, max_bytes: int) -> None:
        self._timeout, self._owner, self._max_bytes = timeout, owner, max_bytes
        super().__init__(trust_env=False, limits=openai.DEFAULT_CONNECTION_LIMITS)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request and return its response, whose body raises an error at the deadline or after too many bytes.

        Raise ReadTimeout at the deadline, ConnectError if another process listens, DecodingError if it is compressed.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        request.headers["Accept-Encoding"] = "identity"  # httpx2 cannot limit the decompressed size
        if self._owner is not None:
            request.extensions = {**request.extensions, "trace": _make_listener_trace(self._owner)}
        # openai only handles errors of httpx2, and ``_make_listener_trace`` raises ConnectionError.
        as_httpx2_error = translate_errors(
            ConnectionError, lambda error: httpx2.ConnectError(str(error), request=request)
        )
        async with _time_limit(deadline, self._timeout, request):
            with as_httpx2_error:
                response = await super().handle_async_request(request)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.DecodingError("the response is compressed, but the request did not allow it", request=request)
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, deadline, self._timeout, self._max_bytes, request)
        return response


@contextlib.asynccontextmanager
async def _time_limit(deadline: float, seconds: float, request: httpx2.Request) -> AsyncIterator[None]:
    """Cancel the block at ``deadline`` (time of the event loop) and raise ReadTimeout, which mentions ``seconds``."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise httpx2.ReadTimeout(f"the response was not complete within {seconds:g} s", request=request) from error


@dataclass(eq=False)
class _BoundedStream(httpx2.AsyncByteStream):
    """The body of a response; raises ReadTimeout at the deadline and RemoteProtocolError after ``max_bytes``."""

    stream: httpx2.AsyncByteStream
    deadline: float
    """As time of the event loop."""
    seconds: float
    """The time limit of the request, for the message."""
    max_bytes: int
    request: httpx2.Request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the parts of the body; raise ReadTimeout or RemoteProtocolError beyond a limit."""
        size, chunks = 0, aiter(self.stream)
        while True:
            async with _time_limit(self.deadline, self.seconds, self.request):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            size += len(chunk)
            if size > self.max_bytes:
                text = f"the response is larger than {self.max_bytes / 1e6:.0f} MB"
                raise httpx2.RemoteProtocolError(text, request=self.request)
            yield chunk

    async def aclose(self) -> None:
        """Close the stream that this one reads."""
        await self.stream.aclose()


def _make_listener_trace(owner: OwnListener) -> Callable[[str, dict[str, Any]], Awaitable[None]]:
    """Return a trace function for httpcore that raises ForeignListener if a connection reaches another process.

    It checks the listening sockets before each connection attempt and compares them with the sockets after it.
    """
    sockets_before: list[frozenset[int]] = []

    async def trace(event: str, _: dict[str, Any]) -> None:
        """Store the listening sockets at the start of a connection, and compare them at its end."""
        if event == "connection.connect_tcp.started":
            sockets_before[:] = [owner.find_own_sockets()]
        elif event == "connection.connect_tcp.complete" and [owner.find_own_sockets()] != sockets_before:
            raise ForeignListener("the listener changed: nothing was sent to it")

    return trace
