"""S14: a streaming training set takes the same steps as a list of its rows, and can resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset

from grpo_recipes.trainers.ahead import OverlappedRollouts
from grpo_recipes.trainers.grpo import GRPOTrainer

from . import fixed_completions
from .fixed_completions import make_trainer, weights_of
from .tiny_training import SUMS, as_dataset

KEYS: dict[str, Any] = {
    "max_steps": 4, "learning_rate": 1e-2, "shuffle_dataset": False, "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2, "save_strategy": "steps",
}  # fmt: skip


def as_stream(rows: Any) -> IterableDataset:
    return as_dataset(rows).to_iterable_dataset()


def trained(folder: Path, model: str, **keys: Any) -> GRPOTrainer:
    trainer = make_trainer(folder, model, GRPOTrainer, **{**KEYS, **keys})
    torch.manual_seed(3)  # TRL shuffles the rows of a generation
    trainer.train()
    return trainer


def test_a_stream_trains_as_its_rows_do(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_rows = weights_of(trained(tmp_path / "rows", model))
    monkeypatch.setattr(fixed_completions, "as_dataset", as_stream)
    trainer = trained(tmp_path / "stream", model)
    assert isinstance(trainer.train_dataset, IterableDataset) and trainer.sampler is None
    of_stream = weights_of(trainer)
    assert all(torch.equal(weight, of_stream[name]) for name, weight in of_rows.items())


def test_a_checkpoint_of_a_stream_notes_its_order(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixed_completions, "as_dataset", as_stream)
    trainer = trained(tmp_path, model, save_steps=2)
    order = trainer.checkpoints._collect_order_settings()
    assert order["prompts"] is None and order["prompts of a generation"] == 2
    resumed = make_trainer(tmp_path, model, GRPOTrainer, **{**KEYS, "save_steps": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoints/checkpoint-2"))
    expected = weights_of(resumed)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(trainer).items())


def test_a_stream_cannot_be_sampled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        train_dataset = as_stream(SUMS)

    monkeypatch.setattr("grpo_recipes.trainers.ahead.ServerRollouts.__init__", lambda *_: None)
    with pytest.raises(ValueError, match="Fix: pass a Dataset, or remove overlap_generation"):
        OverlappedRollouts(Trainer())
