"""Fixtures for the trainer tests."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from grpo_recipes.runs import stop_request as stop_module

from .fake_sampler import FakeSampler
from .tiny_training import save_random_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Use one thread. Threads slow such small models down, up to ten times on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def models_read_once() -> None:
    """Let TRL copy a model that it has read before. Reading takes twice as long as all else that makes a trainer."""
    read = trl.trainer.grpo_trainer.create_model_from_path

    @functools.lru_cache(4)
    def read_once(path: str, written: int, keys: tuple[tuple[str, Any], ...]) -> torch.nn.Module:
        return read(path, **dict(keys))

    def create_model(path: str, **keys: Any) -> torch.nn.Module:
        weights = Path(path, "model.safetensors")
        if not weights.exists():
            return read(path, **keys)
        return copy.deepcopy(read_once(path, weights.stat().st_mtime_ns, tuple(sorted(keys.items()))))

    trl.trainer.grpo_trainer.create_model_from_path = create_model
    trl.trainer.utils.version = functools.cache(trl.trainer.utils.version)  # five packages in each checkpoint's card


@pytest.fixture(scope="session", autouse=True)
def seeds_of_the_cpu() -> None:
    """Do not store each seed, and the stack of its call, for a GPU that torch may initialize later."""
    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Save a random model and return its folder. A reference is read from disk."""
    folder = save_random_model(tmp_path_factory.mktemp("run") / "model")
    gc.collect()
    gc.freeze()  # accelerate collects garbage before each training, half a second with all that is imported
    return str(folder)


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
