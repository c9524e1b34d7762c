"""R7: one deadline for a whole answer, a largest size after decompression, and no redirects, in every HTTP client."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
import requests

from grpo_recipes.process.answers import bounded_opener, get
from grpo_recipes.process.async_sessions import bounded_client
from grpo_recipes.process.listeners import ForeignListener, OwnListener
from grpo_recipes.process.sessions import BoundedAdapter, RejectedResponse
from grpo_recipes.rollouts.openai import CompletionClient, NoCompletion, SamplingParameters

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SECONDS = 1.0
BOMB = gzip.compress(b" " * 100_000_000, compresslevel=1)
ANSWERS = {
    "whole": (HEAD + b"Content-Length: 2\r\n\r\n{}", b""),
    "slow body": (HEAD + b"Content-Length: 1000\r\n\r\n", b"x"),
    "slow headers": (HEAD + b"X-Slow: ", b"x"),
    "slow chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "bomb": (HEAD + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(BOMB) + BOMB, b""),
    "large": (HEAD + b"Content-Length: 100000000\r\n\r\n" + b" " * 100_000_000, b""),
    "redirect": (b"HTTP/1.1 307 Temporary\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n", b""),
}


class SlowServer:
    """Sends the first part of an answer at once, then the second part every 0.1 s."""

    def __init__(self) -> None:
        self.answer = ANSWERS["whole"]
        self.asked: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        first, later = self.answer
        try:
            self.asked.append(connection.recv(65536))
            connection.sendall(first)
            while later:
                time.sleep(0.1)
                connection.sendall(later)
        except OSError:
            pass
        connection.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def server() -> Iterator[SlowServer]:
    slow = SlowServer()
    yield slow
    slow.close()


def by_requests(server: SlowServer, owner: OwnListener | None = None) -> int:
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", BoundedAdapter(SECONDS, 50_000_000, owner))
    return int(session.get(server.url, headers={"Authorization": "Bearer secret"}).status_code)


def by_openai(server: SlowServer, owner: OwnListener | None = None) -> int:
    async def ask() -> int:
        async with openai.AsyncOpenAI(
            base_url=server.url, api_key="secret", max_retries=0, http_client=bounded_client(SECONDS, owner, 50_000_000)
        ) as client:
            await client.get("/", cast_to=object)
        return 200

    return asyncio.run(ask())


def by_launcher(server: SlowServer, owner: OwnListener | None = None) -> int:
    return get("127.0.0.1", server.port, "/", {"Authorization": "Bearer secret"}, owner, SECONDS)[0]


def by_urllib(server: SlowServer) -> int:
    """The request of grpo doctor, with GET so that there is a body to be slow."""
    with bounded_opener().open(server.url, timeout=SECONDS) as answer:
        answer.read()
        return int(answer.status)


CLIENTS = [by_requests, by_openai, by_launcher]
Client = Callable[..., int]


def end_of(client: Client, *arguments: Any) -> BaseException:
    with pytest.raises(Exception) as error:
        client(*arguments)
    return error.value


@pytest.mark.parametrize("client", CLIENTS)
def test_a_whole_answer_is_read(server: SlowServer, client: Client) -> None:
    assert client(server) == 200


@pytest.mark.alone
@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("answer", ["slow body", "slow headers", "slow chunks"])
def test_an_answer_in_small_pieces_ends_at_the_deadline(server: SlowServer, client: Client, answer: str) -> None:
    server.answer = ANSWERS[answer]
    began = time.monotonic()
    end_of(client, server)
    assert SECONDS * 0.8 < time.monotonic() - began < SECONDS + 3


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("answer", ["bomb", "large"])
def test_an_answer_that_is_too_large_is_left(server: SlowServer, client: Client, answer: str, monkeypatch) -> None:
    monkeypatch.setattr("grpo_recipes.process.answers.MAX_BYTES", 50_000_000)
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 60.0)
    server.answer = ANSWERS[answer]
    if client is by_launcher and answer == "bomb":
        assert client(server) == 200, "it decompresses nothing"
    else:
        error = end_of(client, server)
        assert isinstance(error, RejectedResponse | openai.APIConnectionError | OSError)


@pytest.mark.parametrize("client", CLIENTS)
def test_a_redirect_is_not_followed(server: SlowServer, client: Client) -> None:
    server.answer = ANSWERS["redirect"]
    if client is by_launcher:
        assert client(server) == 307
    else:
        assert isinstance(end_of(client, server), RejectedResponse | openai.APIStatusError)
    assert len(server.asked) == 1, "nothing else was asked"


@pytest.mark.parametrize("client", CLIENTS)
def test_nothing_is_sent_to_a_listener_that_is_not_ours(server: SlowServer, client: Client) -> None:
    """R6: neither a token nor a request."""
    own_listener = OwnListener("127.0.0.1", server.port, os.getpid)
    assert client(server, own_listener) == 200
    server.asked.clear()
    foreign = OwnListener("127.0.0.1", server.port, lambda: 2**22 + 1)
    error: BaseException | None = end_of(client, server, foreign)
    causes = []
    while error is not None:
        causes.append(error)
        error = error.__cause__ or error.__context__
    assert any(isinstance(cause, ForeignListener) for cause in causes)
    time.sleep(0.1)
    assert not any(server.asked)


def test_httpx2_is_what_openai_is_built_on() -> None:
    """The transport is a class of that library: another one would be passed over."""
    assert isinstance(bounded_client(1.0), httpx2.AsyncClient)


@pytest.mark.alone
@pytest.mark.parametrize("answer", ["slow body", "slow headers", "slow chunks"])
def test_an_answer_to_urllib_has_one_deadline(server: SlowServer, answer: str) -> None:
    assert by_urllib(server) == 200
    server.answer = ANSWERS[answer]
    began = time.monotonic()
    with pytest.raises(OSError, match="timed out"):
        by_urllib(server)
    assert time.monotonic() - began < 3 * SECONDS


def test_urllib_follows_no_redirect(server: SlowServer) -> None:
    server.answer = ANSWERS["redirect"]
    with pytest.raises(urllib.error.HTTPError, match="307"):
        by_urllib(server)
    assert len(server.asked) == 1


@pytest.mark.alone
@pytest.mark.parametrize("answer", ["slow headers", "slow body"])
def test_a_reply_in_pieces_has_one_deadline(server: SlowServer, answer: str) -> None:
    client = CompletionClient(server.url, model="tiny", timeout=SECONDS, attempts=1)
    client._ready = True
    server.answer = ANSWERS[answer]
    began = time.monotonic()
    sampling = SamplingParameters(max_tokens=4)
    with pytest.raises(NoCompletion):
        list(client.stream([{"role": "user", "content": "hello"}], sampling))
    assert time.monotonic() - began < 3 * SECONDS


@pytest.mark.alone
def test_a_slow_run_api_does_not_hold_up_an_environment(
    server: SlowServer, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    module = pytest.importorskip("grpo_recipes.extensions.atropos.run_environment")
    monkeypatch.setattr(module, "_API_SECONDS", SECONDS)
    monkeypatch.setattr(module, "_identify_api", lambda url: {"api": url, "api_since": 1.0})
    file = tmp_path / "atropos_0.json"
    file.write_text(json.dumps({"api": server.url, "api_since": 1.0, "env_id": 3}))
    server.answer = ANSWERS["slow headers"]
    began = time.monotonic()
    with pytest.raises(requests.RequestException):
        module.disconnect_predecessor(file, server.url)
    assert time.monotonic() - began < 3 * SECONDS
    assert b"POST /disconnect-env" in server.asked[0]
