"""A client of a fake server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.weights.client import BridgeClient
from grpo_recipes.weights.file import FileClient
from weights.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture
def connect(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``connect(seed=7, stop=STOP, client=CLASS, KEY=VALUE, ...)``: a client of the fake server, else FileClient."""
    (tmp_path / "token").write_text("the-token")
    monkeypatch.setenv("GRPO_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("GRPO_RUN", "this-run")
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    (tmp_path / "processes").mkdir()

    def connected(
        seed: int | None = None, stop: StopRequest | None = None, client: type[BridgeClient] = FileClient, **keys: Any
    ) -> BridgeClient:
        options = {"server_request_timeout": 5.0, "vllm_server_timeout": 5.0, **keys}
        args = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
        stop = stop or StopRequest(tmp_path)
        return client(args=args, run_dir=tmp_path, seed=seed, stop=stop, base_url=server.url)

    return connected
