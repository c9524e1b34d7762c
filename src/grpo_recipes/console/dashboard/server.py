"""A small HTTP server for the dashboard: it only reads, and answers only requests with its token.

It listens on 127.0.0.1. Pages from other sites can't use it: the token is part of the path, and requests with another
host name than the loopback's are rejected, so a name that resolves to 127.0.0.1 does not help. Threads, times and sizes
of requests are limited.
"""

import hmac
import re
import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_recipes.console.dashboard.pages import LivePage
from grpo_recipes.errors import config_error
from grpo_recipes.secrets import mask_secrets

HOST = "127.0.0.1"
_LOCAL_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")  # an SSH tunnel may have another port
_MOST_REQUESTS = 16  # at the same time; more connections are closed
_REQUEST_SECONDS = 10.0  # limit of each read and write of a connection
_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the path contains the token
    "X-Content-Type-Options": "nosniff",
}


class Dashboard(ThreadingHTTPServer):
    """The server. ``find_page`` returns the page at a path below the token, or None.

    Raise ConfigError if the port is in use. Port 0 selects a free port.
    """

    daemon_threads = True  # Ctrl-C does not wait for them
    block_on_close = False

    def __init__(self, find_page: Callable[[str], LivePage | None], port: int = 0):
        """Draw a token and listen on the port of 127.0.0.1; raise ConfigError if that fails."""
        self.find_page, self.token = find_page, secrets.token_urlsafe(24)
        self._slots = threading.BoundedSemaphore(_MOST_REQUESTS)
        try:
            super().__init__((HOST, port), _Request)
        except OSError as error:
            fix = "use another port, or remove --port to get a free one"
            raise config_error("--port", f"can't listen on port {port} ({error.strerror})", fix) from error

    @property
    def url(self) -> str:
        """The address of the first page, with the token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread, or close it if 16 others are handled now."""
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a connection in its thread, and make room for another at the end, also after an error."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error without the request, because its path contains the token. Ignore connections that broke."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(f"grpo: dashboard: {type(error).__name__}: {mask_secrets(str(error))}", file=sys.stderr, flush=True)


class _Request(BaseHTTPRequestHandler):
    """A GET request of a page."""

    server: Dashboard
    server_version, sys_version = "grpo", ""
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer with the page at the path; 403 without the token, and 404 if the page does not exist.

        If ``since`` is the page's version, answer 204 without content.
        """
        path, _, query = self.path.partition("?")
        token, _, path = path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._answer(HTTPStatus.FORBIDDEN, "Open the URL that grpo dashboard printed.")
        page = self.server.find_page(path)
        if page is None:
            return self._answer(HTTPStatus.NOT_FOUND, "There is no such page.")
        text, version = page.read()
        if query == f"since={version}":
            return self._answer(HTTPStatus.NO_CONTENT, "", version)
        self._answer(HTTPStatus.OK, text, version)

    def parse_request(self) -> bool:
        """Parse the request; return false if it is malformed, or was answered with 403 because of another host name."""
        if not super().parse_request():
            return False
        if _LOCAL_HOST.fullmatch(self.headers.get("Host", "")):
            return True
        self._answer(HTTPStatus.FORBIDDEN, "Use the host name 127.0.0.1 or localhost.")
        return False

    def _answer(self, status: HTTPStatus, text: str, version: str = "") -> None:
        """Send a response with this status, text and version (ETag)."""
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {**_HEADERS, "ETag": version, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing: the path contains the token."""
