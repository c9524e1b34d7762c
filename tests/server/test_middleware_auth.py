"""The token check in front of the server, called as an ASGI server calls it."""

from __future__ import annotations

import asyncio

import pytest

from grpo_recipes.server.middleware import RequireToken

TOKEN = "0123456789abcdef"


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """``ask(path, authorization, type)``: the messages sent, and whether the application behind was reached."""
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    monkeypatch.setenv("GRPO_TOKEN_FILE", str(token))
    reached: list[str] = []

    async def app(scope, receive, send):
        reached.append(scope.get("path", scope["type"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guarded = RequireToken(app)

    def ask_it(path: str, *authorization: str, kind: str = "http", method: str = "GET"):
        reached.clear()
        sent: list[dict] = []

        async def send(message):
            sent.append(message)

        async def receive():
            return {"type": f"{kind}.connect"}

        headers = [(b"host", b"x"), *((b"authorization", value.encode("latin1")) for value in authorization)]
        scope = {"type": kind, "path": path, "method": method, "headers": headers}
        asyncio.run(guarded(scope, receive, send))
        return sent, bool(reached)

    return ask_it


PATHS = [
    "/health",
    "/v1/models",
    "/v1/completions",
    "/grpo/completions",
    "/collective_rpc",
    "/update_weights",
    "/metrics",
    "/",
    "//health",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
@pytest.mark.parametrize(
    "authorization",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        ["Bearer wrong"],
        [TOKEN],
        [f"Basic {TOKEN}"],
        [f"bearer {TOKEN}x"],
        ["Bearer \xff"],
    ],
)
def test_no_path_answers_without_the_runs_token(ask, path, method, authorization):
    sent, reached = ask(path, *authorization, method=method)
    assert not reached
    assert sent[0]["status"] == 401
    assert sent[1]["type"] == "http.response.body" and TOKEN.encode() not in sent[1]["body"]


@pytest.mark.parametrize("path", PATHS)
def test_every_path_answers_with_it(ask, path):
    sent, reached = ask(path, f"Bearer {TOKEN}")
    assert reached and sent[0]["status"] == 200


@pytest.mark.parametrize(("authorization", "passes"), [([], False), ([f"Bearer {TOKEN}"], True)])
def test_a_websocket_needs_the_token_too(ask, authorization, passes):
    sent, reached = ask("/v1/realtime", *authorization, kind="websocket")
    assert reached is passes
    assert passes or "http.response.start" not in [message["type"] for message in sent]


def test_starting_and_stopping_the_server_needs_no_token(ask):
    _, reached = ask("", kind="lifespan")
    assert reached
