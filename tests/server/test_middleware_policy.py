"""Which weights an answer is of, as the server's middleware tells it, called as an ASGI server calls it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.server.middleware import ACTIVITY_PATH, POLICY_HEADER, SYNCED_PATH, ReportActivity

EMPTIED, IN_USE = b'{"success": true}', b'{"success": false}'


class FakeVllm:
    """Answers in two parts, ``body`` with ``status`` to every path; ``held`` keeps the answers back."""

    def __init__(self) -> None:
        self.status, self.body = 200, EMPTIED
        self.held = asyncio.Event()
        self.held.set()
        self.state = SimpleNamespace(engine_client=SimpleNamespace(get_num_unfinished_requests=lambda: 0))
        self.middleware = ReportActivity(self)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        status, body = self.status, self.body
        await self.held.wait()
        if scope["path"] == "/breaks":
            raise RuntimeError("broken")
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"x")]})
        await send({"type": "http.response.body", "body": body[:5], "more_body": True})
        await send({"type": "http.response.body", "body": body[5:]})

    async def ask(self, path: str = "/v1/completions", told: str | None = None, method: str = "POST") -> str | None:
        """Return the number in the answer; check that the answer is otherwise the application's."""
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [] if told is None else [(POLICY_HEADER.lower().encode(), told.encode())]
        scope = {"type": "http", "method": method, "path": path, "app": self, "headers": headers}
        await self.middleware(scope, None, send)
        received = dict(sent[0]["headers"])
        if path != ACTIVITY_PATH:
            assert received[b"content-type"] == b"x" and b"".join(message["body"] for message in sent[1:]) == self.body
        number = received.get(POLICY_HEADER.lower().encode())
        return None if number is None else number.decode()


def test_answers_have_the_number_of_the_last_sync_and_none_before_the_first() -> None:
    async def play() -> list[str | None]:
        vllm = FakeVllm()
        answers = [await vllm.ask()]
        answers.append(await vllm.ask(SYNCED_PATH, told="0"))  # the server had no number when this request came
        answers += [
            await vllm.ask(),
            await vllm.ask("/health", method="GET"),
            await vllm.ask(ACTIVITY_PATH, None, "GET"),
        ]
        await vllm.ask(SYNCED_PATH, told="17")
        await vllm.ask(SYNCED_PATH)  # a client that sends no number of weights
        return [*answers, await vllm.ask()]

    assert asyncio.run(play()) == [None, None, "0", "0", "0", "17"]


@pytest.mark.parametrize(
    ("path", "told", "method", "status", "body"),
    [
        (SYNCED_PATH, "2", "POST", 200, IN_USE),  # vLLM answers 200 although it did not empty the cache
        (SYNCED_PATH, "2", "POST", 500, b"Internal Server Error"),
        (SYNCED_PATH, "2", "POST", 200, b"[]"),
        (SYNCED_PATH, "2", "GET", 405, b""),
        (SYNCED_PATH, "two", "POST", 200, EMPTIED),
        ("/v1/completions", "2", "POST", 200, EMPTIED),
    ],
)
def test_only_a_sync_that_was_completed_changes_the_number(path, told, method, status, body) -> None:
    async def play() -> str | None:
        vllm = FakeVllm()
        await vllm.ask(SYNCED_PATH, told="1")
        vllm.status, vllm.body = status, body
        await vllm.ask(path, told, method)
        return await vllm.ask()

    assert asyncio.run(play()) == "1"


def test_a_sync_that_breaks_leaves_the_number() -> None:
    async def play() -> str | None:
        vllm = FakeVllm()
        await vllm.ask(SYNCED_PATH, told="1")
        with pytest.raises(RuntimeError, match="broken"):
            await vllm.ask("/breaks", told="2")
        return await vllm.ask()

    assert asyncio.run(play()) == "1"


def test_a_request_during_which_the_weights_changed_has_the_number_of_its_begin() -> None:
    async def play() -> list[str | None]:
        vllm = FakeVllm()
        await vllm.ask(SYNCED_PATH, told="3")
        vllm.held.clear()
        long = asyncio.create_task(vllm.ask())
        await asyncio.sleep(0)
        vllm.held.set()
        vllm.held = asyncio.Event()  # the first waits for the one before
        vllm.held.set()
        await vllm.ask(SYNCED_PATH, told="4")
        return [await long, await vllm.ask()]

    assert asyncio.run(play()) == ["3", "4"]
