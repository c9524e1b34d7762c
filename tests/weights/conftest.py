"""A client of a fake server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_recipes.weights.bridges import FileClient
from grpo_recipes.weights.client import ClientSettings
from weights.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def connect(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FileClient]:
    """``connect(SETTING=VALUE, ...)``: a client of the fake server, without a file of the server's state."""
    (tmp_path / "token").write_text("the-token")
    monkeypatch.setenv("GRPO_TOKEN_FILE", str(tmp_path / "token"))
    settings = ClientSettings("this-run", 5.0, True, None, tmp_path / "sync", tmp_path / "server_state.json", 5.0)
    return lambda **changes: FileClient(settings=replace(settings, **changes), base_url=server.url)
