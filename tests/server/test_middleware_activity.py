"""Test the server's activity report, requested through ASGI and by the launcher over a socket."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.launch.readiness import Activity, read_activity
from grpo_recipes.server.middleware import ACTIVITY_PATH, ReportActivity


class FakeApplication:
    """Answers on command; its engine is computing five completions."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.reached: list[str] = []
        self.state = SimpleNamespace(engine_client=SimpleNamespace(get_num_unfinished_requests=lambda: 5))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        await self.go_on.wait()
        if scope["path"] == "/breaks":
            raise RuntimeError("broken")


async def ask(reporting: ReportActivity, application: FakeApplication, method: str, path: str) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "app": application, "headers": []}
    await reporting(scope, None, send)
    return sent


async def activity(reporting: ReportActivity, application: FakeApplication) -> dict[str, int]:
    start, body = await ask(reporting, application, "GET", ACTIVITY_PATH)
    assert start["status"] == 200
    return dict(json.loads(body["body"]))


def test_requests_without_an_answer_are_counted_and_the_engines_completions_told() -> None:
    async def play() -> None:
        application = FakeApplication()
        reporting = ReportActivity(application)
        assert await activity(reporting, application) == {"requests": 0, "completions": 5, "refused": 0}
        waiting = [
            asyncio.create_task(ask(reporting, application, method, path))
            for method, path in (("POST", "/v1/completions"), ("POST", "/breaks"), ("GET", "/metrics"))
        ]
        await asyncio.sleep(0)
        assert (await activity(reporting, application))["requests"] == 2
        application.go_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert (await activity(reporting, application))["requests"] == 0
        assert application.reached == ["/v1/completions", "/breaks", "/metrics"]

    asyncio.run(play())


def test_other_messages_pass() -> None:
    passed: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    for scope in ({"type": "lifespan"}, {"type": "websocket", "path": ACTIVITY_PATH}):
        asyncio.run(ReportActivity(application)(scope, None, None))
    assert passed == ["lifespan", "websocket"]


METRICS = b"""# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="run"} 100.0
vllm:generation_tokens_total{engine="1",model_name="run"} 2.5e+02
vllm:generation_tokens_created{engine="0",model_name="run"} 1.7e+09
"""


@pytest.fixture
def port() -> Iterator[int]:
    class FakeServer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            bodies = {"/metrics": METRICS, ACTIVITY_PATH: b'{"requests": 3, "completions": 12}'}
            allowed = self.headers.get("Authorization") == "Bearer the-token"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(bodies[self.path])

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_the_launcher_learns_tokens_of_all_engines_and_requests_under_way(port: int) -> None:
    assert read_activity("127.0.0.1", port, "the-token") == Activity(tokens=350.0, requests=3)


def test_a_server_that_refuses_or_is_not_there_tells_nothing(port: int) -> None:
    assert read_activity("127.0.0.1", port, "another") is None
    assert read_activity("127.0.0.1", 1, "the-token") is None
