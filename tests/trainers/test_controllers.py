"""Controllers in real trainings: their inputs, and their state in checkpoints."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StoppedOnRequest
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

from .fixed_completions import make_trainer, rows_of, weights_of
from .resumed_ranks import StopAt

HELD_KL = {"beta": 0.05, "kl_target": 1e-3, "kl_horizon": 40.0, "kl_ctl_step_size": 0.3}
HELD_TAU = {"maxent_objective": "tempered", "maxent_target_weight_entropy": 0.4, "maxent_tau_lr": 0.5}
# A generation window of 8 micro steps, 4 optimizer steps.
WINDOW = {
    "per_device_train_batch_size": 4,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
}


@pytest.mark.parametrize(("target", "direction"), [(1e-6, 1), (1e3, -1)])
def test_beta_moves_by_the_rule_and_towards_the_target(
    tmp_path: Path, model: str, target: float, direction: int
) -> None:
    keys = {**HELD_KL, "kl_target": target, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(tmp_path, model, GRPOTrainer, max_steps=4, **keys)
    trainer.train()
    rows = rows_of(tmp_path)
    betas = [row["beta"] for row in rows] + [trainer.beta]
    assert betas[0] == 0.05
    for row, after in zip(rows, betas[1:], strict=True):
        error = max(-0.3, min(0.3, row["kl"] / target - 1))
        assert after == pytest.approx(row["beta"] * (1 + error * 8 / 40), rel=1e-9)
    # In the first step the policy is the reference still.
    assert all((after - before) * direction > 0 for before, after in pairwise(betas[1:]))


def test_tau_moves_towards_the_target_entropy(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, max_steps=3, **HELD_TAU, maxent_tau=0.5)
    trainer.train()
    rows = rows_of(tmp_path)
    assert rows[0]["maxent/tau"] == 0.5 and rows[0]["maxent/weight_entropy"] > 0.4
    taus = [row["maxent/tau"] for row in rows] + [trainer.tau]
    assert all(after < before for before, after in pairwise(taus))


@pytest.mark.parametrize("maxent_objective", ["tempered", "listwise"])
def test_a_ratio_is_held_where_a_few_completions_are_right(tmp_path: Path, model: str, maxent_objective: str) -> None:
    """The reward marks an eighth of the completions, and most groups have none. The other groups measure tau."""

    def pure_accuracy_math(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(sum(ids) % 8 == 0) for ids in completion_ids]

    keys = {"maxent_objective": maxent_objective, "maxent_tau": 0.1, "maxent_target_ratio": 4.0, "maxent_tau_lr": 0.5}
    trainer = make_trainer(tmp_path, model, rewards=(pure_accuracy_math,), max_steps=24, **keys)
    trainer.train()
    rows = rows_of(tmp_path)
    measured = [row["maxent/target_ratio"] for row in rows if "maxent/target_ratio" in row]
    assert 12 <= len(measured) < 24 and measured[-1] == pytest.approx(4.0, rel=0.02) and measured[0] > 100
    for row, after in pairwise(rows):
        assert ("maxent/eff_rollouts" in row) == ("maxent/target_ratio" in row)
        assert (row["maxent/tau"] != after["maxent/tau"]) == ("maxent/target_ratio" in row), "nothing moves else"


def test_two_targets_are_refused(tmp_path: Path, model: str) -> None:
    with pytest.raises(ValueError, match="maxent_target_ratio and maxent_target_weight_entropy can't be combined"):
        make_trainer(tmp_path, model, **HELD_TAU, maxent_target_ratio=4.0)


def test_a_run_without_controllers_logs_no_beta(tmp_path: Path, model: str) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, max_steps=1, beta=0.05)
    trainer.train()
    assert "beta" not in rows_of(tmp_path)[0] and "kl" in rows_of(tmp_path)[0]


@pytest.mark.parametrize("kind", [GRPOTrainer, MaxEntGRPOTrainer])
def test_a_kl_target_without_a_kl_term_is_refused(tmp_path: Path, model: str, kind: type[GRPOTrainer]) -> None:
    with pytest.raises(ValueError, match="kl_target: beta must be above 0"):
        make_trainer(tmp_path, model, kind, kl_target=0.1, maxent_objective="listwise", maxent_beta=1.0)


def train(
    folder: Path, model: str, kind: type[GRPOTrainer], keys: dict[str, Any], stop_at: int | None = None, steps: int = 6
) -> tuple[list[dict[str, Any]], GRPOTrainer]:
    """Train six optimizer steps, four per generation. Resume from the newest checkpoint."""
    folder.mkdir(exist_ok=True)
    stop_file(folder).unlink(missing_ok=True)
    callbacks = (StopAt(folder, stop_at),)
    trainer = make_trainer(folder, model, kind, callbacks=callbacks, max_steps=steps, **WINDOW, **keys)
    checkpoint = find_newest_complete(folder / "checkpoints")
    with suppress(StoppedOnRequest):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    timed = ("seconds/", "tokens_per_second", "step_time", "memory/", "syncs")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in rows_of(folder)], trainer


@pytest.mark.parametrize(
    ("kind", "keys"), [(GRPOTrainer, HELD_KL), (MaxEntGRPOTrainer, {**HELD_KL, **HELD_TAU})], ids=["kl", "kl-and-tau"]
)
def test_a_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, model: str, kind: type[GRPOTrainer], keys: dict[str, Any]
) -> None:
    expected_rows, whole = train(tmp_path / "whole", model, kind, keys)
    assert len({row["beta"] for row in expected_rows}) == 6
    train(tmp_path / "run", model, kind, keys, stop_at=2)  # inside a generation window
    rows, resumed = train(tmp_path / "run", model, kind, keys)
    assert rows == expected_rows
    assert resumed.beta == whole.beta and resumed.controllers == whole.controllers
    expected = weights_of(whole)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(resumed).items())


def test_a_checkpoint_without_the_state_is_named(tmp_path: Path, model: str) -> None:
    train(tmp_path / "run", model, MaxEntGRPOTrainer, HELD_KL, stop_at=2)
    with pytest.raises(FileNotFoundError, match=r"checkpoint-2/controllers\.json has no state of the tau controller"):
        train(tmp_path / "run", model, MaxEntGRPOTrainer, {**HELD_KL, **HELD_TAU})


def test_a_resumed_state_with_infinite_metrics_is_json(tmp_path: Path, model: str) -> None:
    keys = {"maxent_objective": "tempered", "maxent_tau": math.inf}
    train(tmp_path / "run", model, MaxEntGRPOTrainer, keys, stop_at=2)
    rows, resumed = train(tmp_path / "run", model, MaxEntGRPOTrainer, keys, steps=4)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    state = tmp_path / "run/checkpoints/checkpoint-2/trainer_state.json"
    (first, _) = json.loads(state.read_text(), parse_constant=refuse)["log_history"]
    assert first["maxent/tau"] == "inf" and resumed.state.log_history[0] == first
