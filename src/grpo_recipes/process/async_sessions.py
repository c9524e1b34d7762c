"""Bounded HTTP for openai's client, which is built on httpx2: see ``answers.py``.

openai.AsyncOpenAI(http_client=bounded_client(600.0, owner), max_retries=0, ...)
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

from grpo_recipes.errors import translate
from grpo_recipes.process.answers import MOST_BYTES
from grpo_recipes.process.listeners import ForeignListener, OwnListener


def bounded_client(
    timeout: float, owner: OwnListener | None = None, most_bytes: int = MOST_BYTES
) -> openai.DefaultAsyncHttpxClient:
    """Return a client whose answers are whole within ``timeout`` seconds; no proxy, no redirect.

    With ``owner`` it sends nothing to another process.
    """
    transport = _BoundedTransport(timeout, owner, most_bytes)
    return openai.DefaultAsyncHttpxClient(trust_env=False, follow_redirects=False, transport=transport)


class _BoundedTransport(httpx2.AsyncHTTPTransport):
    def __init__(self, timeout: float, owner: OwnListener | None, most_bytes: int) -> None:
        self._timeout, self._owner, self._most_bytes = timeout, owner, most_bytes
        super().__init__(trust_env=False, limits=openai.DEFAULT_CONNECTION_LIMITS)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send the request; its answer ends with an error at the deadline, or after too many bytes."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        request.headers["Accept-Encoding"] = "identity"  # httpx2 has no limit for what it decompresses
        if self._owner is not None:
            request.extensions = {**request.extensions, "trace": _connecting(self._owner)}
        refused = translate(ConnectionError, lambda error: httpx2.ConnectError(str(error), request=request))
        async with _within(deadline, self._timeout, request):
            with refused:  # by ``_connecting``; openai only knows errors of httpx2
                answer = await super().handle_async_request(request)
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            await answer.aclose()
            raise httpx2.DecodingError("the answer is compressed, though that was not accepted", request=request)
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        answer.stream = _BoundedStream(answer.stream, deadline, self._timeout, self._most_bytes, request)
        return answer


@contextlib.asynccontextmanager
async def _within(deadline: float, seconds: float, request: httpx2.Request) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError as error:
        raise httpx2.ReadTimeout(f"no whole answer within {seconds:g} s", request=request) from error


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(
        self, stream: httpx2.AsyncByteStream, deadline: float, seconds: float, most_bytes: int, request: httpx2.Request
    ) -> None:
        self._stream, self._most_bytes = stream, most_bytes
        self._limits = deadline, seconds, request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, pieces = 0, aiter(self._stream)
        while True:
            async with _within(*self._limits):
                piece = await anext(pieces, None)
            if piece is None:
                return
            size += len(piece)
            if size > self._most_bytes:
                text = f"the answer has more than {self._most_bytes / 1e6:.0f} MB"
                raise httpx2.RemoteProtocolError(text, request=self._limits[2])
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def _connecting(owner: OwnListener) -> Any:
    """Return a trace of httpcore that compares the listener before and after each connection is made."""
    before: list[frozenset[int]] = []

    async def trace(event: str, _: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.started":
            before[:] = [owner.sockets()]
        elif event == "connection.connect_tcp.complete" and [owner.sockets()] != before:
            raise ForeignListener("the listener changed: nothing was sent to it")

    return trace
