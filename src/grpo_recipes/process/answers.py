"""Bounded HTTP: an answer has one deadline as a whole, a largest size after decompression, and is never redirected.

The timeouts of sockets and HTTP libraries limit each read, so that a byte a second holds a request forever.
``TimedResponse`` limits all reads of an answer together, in any library that is built on ``http.client``;
``get`` is one small request, and ``bounded_opener`` is for urllib, which finds proxies. ``sessions.py`` does the same
for requests, ``async_sessions.py`` for httpx.
"""

import contextlib
import http.client
import io
import socket
import time
import urllib.request
from collections.abc import Mapping

from grpo_recipes.process.listeners import OwnListener

MOST_BYTES = 64 << 20  # of an answer for which its caller has no other limit


class TooLarge(OSError):
    """An answer has more bytes than any right one."""


class TimedResponse(http.client.HTTPResponse):
    """An answer that must be whole within the timeout which its socket has when the answer begins."""

    def __init__(self, sock: socket.socket, *args: object, **options: object) -> None:
        super().__init__(sock, *args, **options)  # type: ignore[arg-type]
        untimed, self.fp = self.fp, io.BufferedReader(_TimedFile(sock))
        untimed.close()


class _TimedFile(io.RawIOBase):
    """The bytes of a socket until a deadline."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._file = sock, sock.makefile("rb", buffering=0)
        limit = sock.gettimeout()
        self._deadline = None if limit is None else time.monotonic() + limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(left)
        return self._file.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


class _HTTPConnection(http.client.HTTPConnection):
    response_class = TimedResponse


class _HTTPSConnection(http.client.HTTPSConnection):
    response_class = TimedResponse


class _BoundedHTTP(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPConnection, request)


class _BoundedHTTPS(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_HTTPSConnection, request)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow no redirect: it is raised as an HTTPError."""


def bounded_opener() -> urllib.request.OpenerDirector:
    """Return an opener whose answers are whole within the timeout of ``open``; it follows no redirect."""
    return urllib.request.build_opener(_BoundedHTTP, _BoundedHTTPS, _NoRedirect)


def get(
    host: str, port: int, path: str, headers: Mapping[str, str], owner: OwnListener | None, seconds: float = 5.0
) -> tuple[int, bytes]:
    """Return status and body of a GET, both there within ``seconds``; no proxy, no redirect.

    With ``owner`` nothing is sent to another process. OSError and HTTPException are what can go wrong.
    """
    deadline = time.monotonic() + seconds
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    connection.response_class = TimedResponse
    with contextlib.closing(connection):
        with owner.connecting() if owner else contextlib.nullcontext():
            connection.connect()
        connection.request("GET", path, headers=dict(headers))
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        answer = connection.getresponse()
        body = answer.read(MOST_BYTES + 1)
    if len(body) > MOST_BYTES:
        raise TooLarge(f"the answer to {path} has more than {MOST_BYTES >> 20} MB")
    return answer.status, body
