"""Test a request to the server: repetition, detection of a lost server, and time limits."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
import requests

from grpo_recipes.process.sessions import secure_session
from grpo_recipes.server.wire import WORKERS_PATH
from grpo_recipes.weights.transport import BadAnswer, ServerAdapter, ServerLate, ServerLost

pytestmark = pytest.mark.alone

RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing sends RST


class FakeClosingServer:
    """Answers the first request of a connection and resets the connection at the second, as an idle limit may."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.status = "200 OK"
        self.healthy = True
        self.silent = False
        self.cut = self.slow = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        path = self._request(connection)
        if self.silent:
            time.sleep(3)
        status = self.status if path != "/health" else "200 OK" if self.healthy else "503 Service Unavailable"
        cut = self.cut and path != "/health"
        length = 20 if cut else 1000 if self.slow else 2
        connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{{}}".encode())
        with contextlib.suppress(OSError):
            while self.slow:
                time.sleep(0.1)
                connection.sendall(b"x")
        if not cut:
            connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()

    def _request(self, connection: socket.socket) -> str:
        received = b""
        while b"\r\n\r\n" not in received:
            received += connection.recv(4096)
        self.asked.append(received.split()[1].decode())
        return self.asked[-1]

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed by the test
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def server() -> Iterator[FakeClosingServer]:
    fake = FakeClosingServer()
    yield fake
    fake.close()


@pytest.fixture
def session() -> requests.Session:
    return secure_session(requests.Session(), ServerAdapter(timeout=1.0), "the-token")


def test_every_request_has_the_token_the_limits_and_no_proxy(session, monkeypatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert session.headers["Authorization"] == "Bearer the-token"
    assert session.merge_environment_settings("http://127.0.0.1:2", {}, None, None, None)["proxies"] == {}
    for url in ("http://127.0.0.1:2", "https://127.0.0.1:2"):
        assert isinstance(session.get_adapter(url), ServerAdapter)


@pytest.mark.parametrize("path", ["/v1/completions", WORKERS_PATH])
def test_a_kept_connection_that_closes_as_it_is_used_again_costs_nothing(server, session, path) -> None:
    for _ in range(5):
        assert session.post(server.url + path, json={}).status_code == 200
    assert len(server.asked) == 5


def test_a_weight_transfer_is_not_repeated(server, session) -> None:
    session.get(server.url)
    with pytest.raises(BadAnswer, match="lost the connection to the vLLM server in /update_weights"):
        session.post(f"{server.url}/update_weights", json={})
    assert server.asked.count("/update_weights") <= 1


def test_a_server_that_is_gone_is_not_asked_again_and_again(server, session) -> None:
    session.get(server.url)
    server.close()
    start = time.monotonic()
    with pytest.raises(ServerLost, match="Connection refused"):
        session.post(f"{server.url}/v1/completions", json={})
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(("healthy", "kind"), [(False, ServerLost), (True, BadAnswer)])
def test_an_answer_that_breaks_off_is_a_lost_server_unless_that_is_healthy(server, session, healthy, kind) -> None:
    server.cut, server.healthy = True, healthy
    with pytest.raises(kind, match="lost the connection"):
        session.get(server.url)
    assert server.asked == ["/", "/health"]


def test_an_answer_that_does_not_come_is_a_lost_server(server, session) -> None:
    server.silent = True
    with pytest.raises(ServerLost, match="did not answer /v1/completions within 1 s"):
        session.post(f"{server.url}/v1/completions", json={})
    start = time.monotonic()
    with pytest.raises(ServerLost, match=r"within 0\.2 s"):
        session.get(server.url, timeout=0.2)
    assert time.monotonic() - start < 0.8


def test_an_error_of_a_dead_engine_is_a_lost_server_and_one_of_a_living_is_an_answer(server, session) -> None:
    server.status = "500 Internal Server Error"
    assert session.get(server.url).status_code == 500
    server.healthy = False
    with pytest.raises(ServerLost, match="the engine of the vLLM server is dead: 500 in /v1/completions"):
        session.post(f"{server.url}/v1/completions", json={})


def test_an_answer_in_small_pieces_is_late(server, session) -> None:
    """R7: server_request_timeout bounds the whole answer, not each read."""
    server.slow = True
    start = time.monotonic()
    with pytest.raises(ServerLate, match="did not answer /v1/completions within 1 s"):
        session.post(f"{server.url}/v1/completions", json={})
    assert 0.8 < time.monotonic() - start < 4


def test_a_redirect_of_a_server_is_a_bad_answer(server, session) -> None:
    """R7: the token would be sent to another address."""
    server.status = "307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/"
    with pytest.raises(BadAnswer, match=r"the vLLM server redirects to http://127\.0\.0\.1:1/, which is not followed"):
        session.get(server.url)
