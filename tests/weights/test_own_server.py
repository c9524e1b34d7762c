"""R6: the trainer's client sends tokens and prompts to the run's own server only, and follows it to another port."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from other_user import needs_root, other_user

from grpo_recipes.extensions.atropos.server import RunServer, RunServerConfig, ServerGone
from grpo_recipes.weights import client as client_module
from grpo_recipes.weights.transport import ServerError, ServerLost
from weights.fake_server import FakeServer

pytestmark = pytest.mark.alone
GONE = 2**22 + 1  # no process has this pid


@pytest.fixture
def describe(tmp_path: Path, connect) -> Callable[..., None]:
    """``describe(KEY=VALUE, ...)``: write the launcher's record of its server, by default owned by this process."""

    def write(**facts: Any) -> None:
        state = {"epoch": 1, "state": "ready", "guard": os.getpid(), **facts}
        (tmp_path / "processes" / "server_state.json").write_text(json.dumps(state))

    return write


def test_a_server_of_the_launcher_is_asked(connect, describe, server: FakeServer) -> None:
    describe(url=server.url)
    connect(seed=7).generate([[1], [2]], n=2)
    assert len(server.sampled()) == 2 and server.tokens == {"Bearer the-token"}


def test_a_listener_that_is_not_below_the_process_guard_gets_nothing(connect, describe, server: FakeServer) -> None:
    describe(guard=GONE)
    with pytest.raises(ServerError, match="no vLLM server answers"):
        connect()
    assert server.tokens == set() and server.calls == []


def test_a_rank_of_another_node_cannot_see_the_owner(connect, describe, server: FakeServer, monkeypatch) -> None:
    """The served name and the separate token of each server protect it: see docs/troubleshooting.md."""
    monkeypatch.setenv("GRPO_NODE", "1")
    describe(guard=GONE)
    connect(seed=7).generate([[1]], n=1)
    assert len(server.sampled()) == 1


@needs_root
def test_another_user_on_the_port_of_a_dead_server_gets_nothing(
    connect, describe, server: FakeServer, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(client_module, "_NOTICE_SECONDS", 1.0)
    describe(url=server.url)
    client = connect(seed=7)
    client.generate([[1]], n=1)
    server.close()
    with other_user(urlsplit(server.url).port, tmp_path / "received") as user:
        user.wait()
        for ask in (lambda: client.generate([[1]], n=1), client.reset_prefix_cache, lambda: client.pause("keep")):
            with pytest.raises(ServerLost):
                ask()
        assert user.received == []


def test_the_next_server_is_asked_at_its_new_address(connect, describe, server: FakeServer) -> None:
    describe(url=server.url)
    client = connect(seed=7)
    before = client.generate([[1], [2]], n=2)
    server.close()
    other = FakeServer()
    describe(epoch=2, url=other.url)
    assert client.generate([[1], [2]], n=2) == before
    assert client.base_url == other.url and len(other.sampled()) == 2
    other.close()


@needs_root
def test_an_environment_sends_nothing_to_another_user(
    describe, server: FakeServer, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("GRPO_RUN_DIR", str(tmp_path))
    describe()
    server.close()
    with other_user(urlsplit(server.url).port, tmp_path / "received") as user:
        user.wait()
        environment = RunServer(RunServerConfig(model_name="m", base_url=f"{server.url}/v1", patience=0.5, timeout=5))
        with pytest.raises(ServerGone, match="another process listens on"):
            asyncio.run(environment._completion_wrapper(prompt="a secret prompt", max_tokens=3))
        assert user.received == []
