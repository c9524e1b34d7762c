"""The launcher waits for its own server, and only for a limited time: real sockets of this process."""

from __future__ import annotations

import http.server
import json
import os
import threading
import time
from collections.abc import Iterator

import pytest

from grpo_recipes.launch.readiness import NotReady, wait_until_ready
from grpo_recipes.process import listeners
from grpo_recipes.process.listeners import list_open_sockets
from grpo_recipes.recipe.keys import catalogue

pytestmark = pytest.mark.alone

NAME, TOKEN = "run-abcd", "the-runs-token"


class FakeServer(http.server.BaseHTTPRequestHandler):
    """List one model for a client with the token. /health answers 200 to all clients, as in vLLM."""

    served = NAME

    def do_GET(self) -> None:
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}" or self.path == "/health"
        body = json.dumps({"data": [{"id": self.served}]}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Start a server in this process with the model ``request.param``, and yield its port."""
    handler = type("FakeNamedServer", (FakeServer,), {"served": getattr(request, "param", NAME)})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def wait(port: int, alive: bool = True, root: int | None = None, token: str = TOKEN, timeout: float = 0.6) -> float:
    return wait_until_ready(lambda: alive, root or os.getppid(), "127.0.0.1", port, NAME, token, timeout)


def test_our_own_server_that_serves_this_run_is_ready(port: int) -> None:
    assert wait(port, timeout=10) < 10


@pytest.mark.parametrize("port", ["somebody-elses-model"], indirect=True)
def test_a_server_that_answers_and_serves_another_run_is_not_waited_for_without_end(port: int) -> None:
    start = time.monotonic()
    with pytest.raises(NotReady, match=r"was not ready after 1 s \(vllm_server_timeout\)"):
        wait(port)
    assert 0.6 <= time.monotonic() - start < 10


def test_a_dead_server_is_not_waited_for_at_all(port: int) -> None:
    start = time.monotonic()
    with pytest.raises(NotReady, match="died before it was ready"):
        wait(port, alive=False, timeout=600)
    assert time.monotonic() - start < 1


def test_another_process_on_the_port_is_told_at_once(port: int) -> None:
    with pytest.raises(NotReady, match=f"was taken by another process \\(pid {os.getpid()}\\)"):
        wait(port, root=2**22 + 1, timeout=600)


def test_a_server_that_began_to_listen_while_its_owner_was_looked_for_is_ours(port: int, monkeypatch) -> None:
    looks = iter([()])
    monkeypatch.setattr(listeners, "list_open_sockets", lambda pids: next(looks, None) or list_open_sockets(pids))
    assert wait(port, timeout=10) < 10


def test_a_server_that_refuses_the_runs_token_is_told_at_once(port: int) -> None:
    with pytest.raises(NotReady, match="rejects the run's token"):
        wait(port, token="another", timeout=600)


def test_the_longest_wait_is_ten_minutes_unless_the_recipe_says_otherwise() -> None:
    assert catalogue()["vllm_server_timeout"]["default"] == 600.0
