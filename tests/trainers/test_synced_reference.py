"""A reference that moves with the policy is what a resumed run goes on from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

from .fixed_completions import make_trainer
from .test_controllers import train

SYNCED = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
TARGET = {"maxent_objective": "listwise", "maxent_beta": 1.0}


@pytest.mark.parametrize(
    ("kind", "keys"), [(GRPOTrainer, {"beta": 0.5}), (MaxEntGRPOTrainer, TARGET)], ids=["loss", "target"]
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, model: str, kind: type[GRPOTrainer], keys: dict[str, Any]
) -> None:
    keys = {**keys, **SYNCED}
    expected_rows, whole = train(tmp_path / "whole", model, kind, keys, steps=4)
    train(tmp_path / "run", model, kind, keys, stop_at=3)
    rows, resumed = train(tmp_path / "run", model, kind, keys, steps=4)
    assert rows == expected_rows
    for one, other in ((resumed.model, whole.model), (resumed.ref_model, whole.ref_model)):
        for mine, expected in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, expected)
    initial = make_trainer(tmp_path / "new", model, GRPOTrainer).model
    assert not torch.equal(whole.ref_model.lm_head.weight, initial.lm_head.weight)  # it has moved


def test_a_checkpoint_without_the_reference_is_named(tmp_path: Path, model: str) -> None:
    train(tmp_path / "run", model, GRPOTrainer, {"beta": 0.5}, stop_at=2)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2/reference_0\.pt is missing"):
        train(tmp_path / "run", model, GRPOTrainer, {"beta": 0.5, **SYNCED})
