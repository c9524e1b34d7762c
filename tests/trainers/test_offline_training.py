"""Hydra keys of the offline trainer, in a training of seconds: each reaches the server's request or the update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from extensions.offline.test_keys import keys
from weights.fake_server import FakeServer

from .tiny_training import train

OF_THE_TRAINER = (
    "max_completion_length", "temperature", "top_p", "top_k", "repetition_penalty", "per_device_train_batch_size",
    "learning_rate", "max_grad_norm", "beta", "entropy_coef", "gradient_accumulation_steps", "num_generations",
    "steps_per_generation", "max_steps", "seed",
)  # fmt: skip
SMALL = {
    "generation.max_new_tokens": 4, "generation.temperature": 1.0, "generation.repetition_penalty": 1.0,
    "data.problems_per_iteration": 2, "train.batch_size": 4, "train.iterations": 2, "train.lr": 0.05,
    "train.grad_clip": 0.1,
}  # fmt: skip


def trainer_keys(changes: dict[str, Any]) -> dict[str, Any]:
    """Return the trainer's keys of a small configuration with changes."""
    all_keys = keys(**{key.replace(".", "__"): value for key, value in (SMALL | changes).items()})
    return {key: all_keys[key] for key in OF_THE_TRAINER}


def weights(folder: Path, model: str, changes: dict[str, Any], **overrides: Any) -> torch.Tensor:
    """Return the weights after a gradient-descent training in one vector."""
    plain = {"optim": "sgd", "lr_scheduler_type": "constant", "ref_model_name_or_path": model}
    trainer, _ = train(folder, **trainer_keys(changes), **plain, **overrides)
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: str) -> torch.Tensor:
    return weights(tmp_path_factory.mktemp("plain"), model, {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", 0.04), ("train.grad_clip", 0.2), ("train.kl_coef", 0.5), ("train.entropy_coef", 0.1),
        ("train.batch_size", 2), ("train.grad_accum_steps", 2), ("train.iterations", 3), ("seed", 1),
        ("data.problems_per_iteration", 3), ("data.rollouts_per_problem", 2), ("generation.max_new_tokens", 3),
        ("generation.temperature", 0.5), ("generation.top_p", 0.2), ("generation.top_k", 3),
        ("generation.repetition_penalty", 2.0),
    ],
)  # fmt: skip
def test_a_key_changes_the_update(tmp_path: Path, model: str, plain: torch.Tensor, key: str, value: Any) -> None:
    changed = weights(tmp_path, model, {key: value})
    assert not torch.equal(plain, changed) and torch.isfinite(changed).all()


def test_the_same_keys_give_the_same_update(tmp_path: Path, model: str, plain: torch.Tensor) -> None:
    assert torch.equal(plain, weights(tmp_path, model, {}))


def test_two_accumulated_batches_of_four_are_one_of_eight(tmp_path: Path, model: str) -> None:
    accumulated = weights(tmp_path / "two", model, {"train.batch_size": 4, "train.grad_accum_steps": 2})
    whole = weights(tmp_path / "one", model, {"train.batch_size": 8})
    assert torch.allclose(accumulated, whole, rtol=0, atol=1e-6)
    assert not torch.equal(whole, weights(tmp_path / "none", model, {"train.batch_size": 8, "train.lr": 0.0}))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    fake = FakeServer()
    (tmp_path / "token").write_text("the-token")
    for name, text in (("TOKEN_FILE", tmp_path / "token"), ("RUN", "this-run"), ("SYNC_DIR", tmp_path / "sync")):
        monkeypatch.setenv(f"GRPO_{name}", str(text))
    yield fake
    fake.close()


def test_every_sampling_field_reaches_the_server_under_its_name(tmp_path: Path, model: str, server: FakeServer) -> None:
    changes = {
        "generation.max_new_tokens": 9, "generation.temperature": 0.6, "generation.top_p": 0.9, "generation.top_k": 7,
        "generation.repetition_penalty": 1.2, "train.iterations": 1,
    }  # fmt: skip
    port = urlsplit(server.url).port
    served = {"use_vllm": True, "vllm_server_host": "127.0.0.1", "vllm_server_port": port}
    served |= {"vllm_mode": "server", "weight_sync": "file", "weight_guard": False}
    weights(tmp_path / "run", model, changes, **served)
    expected = {"max_tokens": 9, "temperature": 0.6, "top_p": 0.9, "top_k": 7, "repetition_penalty": 1.2, "n": 4}
    assert len(server.sampled()) == 2
    for request in server.sampled():
        assert {name: request[name] for name in expected} == expected and "frequency_penalty" not in request
