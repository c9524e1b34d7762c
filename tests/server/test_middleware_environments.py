"""R11: test the paths that the token of environments in other terminals opens, and when the server answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.server.middleware import (
    ACTIVITY_PATH,
    ENVIRONMENT_PATHS,
    ENVIRONMENT_TOKEN_VARIABLE,
    POLICY_HEADER,
    SYNCED_PATH,
    ReportActivity,
    RequireToken,
)

RUN, ENVIRONMENT = "the-runs-token", "the-environments-token"


class Server:
    """Both layers of middleware in front of an application that answers every path."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(engine_client=SimpleNamespace(get_num_unfinished_requests=lambda: 0))
        self.reached: list[str] = []
        self.layers = RequireToken(ReportActivity(self._application))

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"success": true}'})

    def ask(self, path: str, token: str, method: str = "POST", kind: str = "http", **headers: str) -> tuple[int, bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        all_headers = {"authorization": f"Bearer {token}", **headers}
        encoded = [(name.lower().encode(), value.encode()) for name, value in all_headers.items()]
        scope = {"type": kind, "method": method, "path": path, "app": self, "headers": encoded}
        asyncio.run(self.layers(scope, None, send))  # type: ignore[arg-type]
        return sent[0].get("status", 0), b"".join(message.get("body", b"") for message in sent)

    def sync(self) -> None:
        assert self.ask(SYNCED_PATH, RUN, **{POLICY_HEADER: "0"})[0] == 200


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    for variable, token in (("GRPO_TOKEN_FILE", RUN), (ENVIRONMENT_TOKEN_VARIABLE, ENVIRONMENT)):
        (tmp_path / variable).write_text(token)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    return Server()


@pytest.mark.parametrize("path", ENVIRONMENT_PATHS)
def test_environments_may_sample_and_look_whether_the_server_is_well(server: Server, path: str) -> None:
    server.sync()
    assert server.ask(path, ENVIRONMENT)[0] == 200 and server.reached[-1] == path


@pytest.mark.parametrize(
    "path",
    ["/collective_rpc", "/update_weights", "/pause", "/resume", SYNCED_PATH, ACTIVITY_PATH, "/metrics",
     "/grpo/completions", "/v1/load_lora_adapter", "/sleep", "/generate/", "/health/../collective_rpc", "//generate"],
)  # fmt: skip
def test_their_token_opens_nothing_else(server: Server, path: str) -> None:
    server.sync()
    reached = list(server.reached)
    assert server.ask(path, ENVIRONMENT)[0] == 401 and server.reached == reached
    assert server.ask(path, RUN)[0] == 200


def test_their_token_opens_no_websocket(server: Server) -> None:
    server.sync()
    assert server.ask("/v1/completions", ENVIRONMENT, kind="websocket")[0] == 0 and server.reached == [SYNCED_PATH]


def test_environments_wait_for_the_weights_of_the_trainer_and_the_trainer_waits_for_nothing(server: Server) -> None:
    for path in ENVIRONMENT_PATHS:
        assert server.ask(path, ENVIRONMENT) == (503, b"the server waits for the trainer's weights")
        assert server.ask(path, RUN)[0] == 200
    server.sync()
    assert server.ask("/generate", ENVIRONMENT)[0] == 200


def test_a_run_without_such_environments_has_one_token(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENVIRONMENT_TOKEN_VARIABLE)
    assert Server().ask("/generate", ENVIRONMENT)[0] == 401
    assert Server().ask("/generate", "")[0] == 401


def test_refused_requests_are_counted_for_the_diagnosis(server: Server) -> None:
    for token in ("wrong", "x", ""):
        assert server.ask("/health", token)[0] == 401
    assert b'"refused": 3' in server.ask(ACTIVITY_PATH, RUN, "GET")[1]
