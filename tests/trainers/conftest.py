"""Fixtures for the trainer tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from grpo_recipes.runs import stop_request as stop_module

from .fake_sampler import FakeSampler
from .tiny_training import save_random_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread. Threads slow such small models down, up to ten times on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Save a random model and return its folder. A reference is read from disk."""
    folder = save_random_model(tmp_path_factory.mktemp("run") / "model")
    gc.freeze()  # accelerate collects garbage before each training, half a second with all that is imported
    yield str(folder)
    gc.unfreeze()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a model with other random weights than ``model``, and return its folder."""
    return str(save_random_model(tmp_path_factory.mktemp("teacher"), seed=1))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSampler]:
    """Start a fake of the run's server, with the variables that its client needs."""
    (tmp_path / "token").write_text("the-token")
    monkeypatch.setenv("GRPO_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("GRPO_RUN", "this-run")
    monkeypatch.setenv("GRPO_SYNC_DIR", str(tmp_path / "sync"))
    monkeypatch.setattr(stop_module, "POLL_SECONDS", 0.0)
    fake = FakeSampler()
    yield fake
    fake.close()
