"""Bounded HTTP: a response has one deadline as a whole and a maximum size after decompression. Redirects are errors.

Sockets and HTTP libraries limit each read, so a server that sends one byte per second can block a request forever.
``TimedResponse`` limits all reads of a response together, in every library that is built on ``http.client``.
``get`` sends one small request. ``bounded_opener`` is for urllib, which finds proxies. ``sessions.py`` does the same
for requests, and ``async_sessions.py`` for httpx.
"""

import contextlib
import http.client
import io
import socket
import time
import urllib.request
from collections.abc import Mapping

from grpo_recipes.process.listeners import OwnListener

MAX_BYTES = 64 << 20  # maximum size of a response, unless the caller sets another limit


class ResponseTooLarge(OSError):
    """A response is larger than any valid one."""


class TimedResponse(http.client.HTTPResponse):
    """A response that must be complete within the timeout that its socket has when the response starts."""

    def __init__(self, sock: socket.socket, *args: object, **options: object) -> None:
        super().__init__(sock, *args, **options)  # type: ignore[arg-type]
        untimed_file, self.fp = self.fp, io.BufferedReader(_TimedFile(sock))
        untimed_file.close()


class _TimedFile(io.RawIOBase):
    """A file that reads from a socket and raises TimeoutError at a deadline: the socket's timeout, counted from now."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._file = sock, sock.makefile("rb", buffering=0)
        timeout = sock.gettimeout()
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def readable(self) -> bool:
        """Return True, as ``io.BufferedReader`` requires."""
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        """Read into ``buffer`` and return the number of bytes. Raise TimeoutError at the deadline."""
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError("timed out")
            self._socket.settimeout(remaining)
        return self._file.readinto(buffer)

    def close(self) -> None:
        """Close this file and the socket's file that it reads. A second call does nothing."""
        if not self.closed:
            self._file.close()
        super().close()


class _HTTPConnection(http.client.HTTPConnection):
    """An HTTP connection with one deadline for a whole response."""

    response_class = TimedResponse


class _HTTPSConnection(http.client.HTTPSConnection):
    """An HTTPS connection with one deadline for a whole response."""

    response_class = TimedResponse


class _BoundedHTTP(urllib.request.HTTPHandler):
    """Opens http URLs for urllib with ``_HTTPConnection``."""

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send the request and return its response; urllib calls this."""
        return self.do_open(_HTTPConnection, request)


class _BoundedHTTPS(urllib.request.HTTPSHandler):
    """Opens https URLs for urllib with ``_HTTPSConnection``."""

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        """Send the request and return its response; urllib calls this."""
        return self.do_open(_HTTPSConnection, request)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Raises HTTPError for each redirect."""

    def redirect_request(self, *_: object) -> None:
        """Return no request, so that a redirect is raised as an HTTPError."""


def bounded_opener() -> urllib.request.OpenerDirector:
    """Return a urllib opener that raises HTTPError for a redirect instead of following it.

    The ``timeout`` argument of its ``open`` limits the whole response, not each read.
    """
    return urllib.request.build_opener(_BoundedHTTP, _BoundedHTTPS, _NoRedirect)


def get(
    host: str, port: int, path: str, headers: Mapping[str, str], owner: OwnListener | None, seconds: float = 5.0
) -> tuple[int, bytes]:
    """Send a GET request over http, and return the status and the body of the response.

    No proxy is used and no redirect is followed. A status such as 404 is not an error. Raise OSError or HTTPException
    without a complete answer within ``seconds``, and ResponseTooLarge above ``MAX_BYTES``. With ``owner``, raise
    ForeignListener before anything is sent if a process outside the run listens on the port.
    """
    deadline = time.monotonic() + seconds
    connection = http.client.HTTPConnection(host, port, timeout=seconds)
    connection.response_class = TimedResponse
    with contextlib.closing(connection):
        with owner.connecting() if owner else contextlib.nullcontext():
            connection.connect()
        connection.request("GET", path, headers=dict(headers))
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
        response = connection.getresponse()
        body = response.read(MAX_BYTES + 1)
    if len(body) > MAX_BYTES:
        raise ResponseTooLarge(f"the response to {path} is larger than {MAX_BYTES >> 20} MB")
    return response.status, body
