"""MaxEnt-GRPO's update does not depend on the split of the batch, and each of its keys changes the update."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from grpo_recipes.trainers import maxent

from .fixed_completions import GROUP, generation, make_trainer, rows_of, weights_of


def assert_equal(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float) -> None:
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], rtol=0, atol=within), name


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path, model: str) -> None:
    folder = Path(model).parent
    keys = {"maxent_objective": "listwise", "maxent_beta": 0.5, "beta": 0.1, "kl_target": 0.01, "kl_horizon": 100.0,
            "maxent_target_weight_entropy": 0.5, "maxent_tau_lr": 1.0}  # fmt: skip
    # Three groups of four on two ranks: each rank has half of the second group.
    (folder / "keys.json").write_text(json.dumps({**keys, "per_device_train_batch_size": 6}))
    run_ranks("trainers.fixed_completions", str(folder))
    of_rank = [torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1)]

    alone = make_trainer(tmp_path, model, per_device_train_batch_size=12, **keys)
    before = weights_of(alone)
    alone.train()
    after = weights_of(alone)
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    for result in of_rank:
        assert_equal({name.removeprefix("module."): weight for name, weight in result["weights"].items()}, after, 1e-6)
        assert (result["tau"], result["beta"]) == (of_rank[0]["tau"], of_rank[0]["beta"])
    assert of_rank[0]["tau"] == pytest.approx(alone.tau, rel=1e-5) and alone.tau != alone._fixed_tau
    assert of_rank[0]["beta"] == pytest.approx(alone.beta, rel=1e-9) and alone.beta != 0.1
    compared = [name for name in rows_of(tmp_path)[0] if name.startswith("maxent/") or name == "beta"]
    assert len(compared) == 9
    for row, two in zip(rows_of(tmp_path), rows_of(folder / "two"), strict=True):
        assert [two[name] for name in compared] == pytest.approx([row[name] for name in compared], rel=1e-4)


@pytest.mark.parametrize("objective", ["listwise", "tempered"])
def test_accumulation_changes_nothing(tmp_path: Path, model: str, objective: str) -> None:
    after = []
    for rows, micro_batches in ((16, 1), (4, 4)):
        sizes = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": micro_batches}
        trainer = make_trainer(tmp_path / str(rows), model, maxent_objective=objective, **sizes)
        before = weights_of(trainer)
        trainer.train()
        after.append(weights_of(trainer))
    assert_equal(after[0], after[1], 1e-6)
    assert max((after[0][name] - before[name]).abs().max() for name in before) > 1e-4


def test_listwise_takes_the_log_probs_that_trl_computed(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"maxent_objective": "listwise", "per_device_train_batch_size": 4}
    single_batch = generation(make_trainer(tmp_path / "own", model, **keys))
    window = make_trainer(tmp_path / "window", model, steps_per_generation=2, num_iterations=2, **keys)
    monkeypatch.setattr(maxent, "compute_trainer_logps", None)  # not called
    trls = generation(window)
    assert "old_per_token_logps" in trls and "old_per_token_logps" not in single_batch
    assert torch.allclose(trls["advantages"], single_batch["advantages"], atol=1e-5)

    window.train()
    rows = rows_of(tmp_path / "window")
    assert ["maxent/tau" in row for row in rows] == [True, False]  # a generation serves four micro-batches


LISTWISE = {"maxent_objective": "listwise", "maxent_tau": 0.2}
REFERENCED = {**LISTWISE, "maxent_beta": 1.0}
TEMPERED = {"maxent_objective": "tempered", "maxent_tau": 0.2}
ENTROPY = {**TEMPERED, "maxent_target_weight_entropy": 0.5, "maxent_tau_lr": 0.5}
HELD_KL = {**TEMPERED, "beta": 0.5, "kl_target": 0.01, "kl_horizon": 20.0, "kl_ctl_step_size": 0.5}


@pytest.mark.parametrize(
    ("base", "change"),
    [
        (TEMPERED, {"maxent_objective": "listwise"}),
        (LISTWISE, {"maxent_objective": "weighted_mle"}),
        (LISTWISE, {"maxent_tau": 0.4}),
        (TEMPERED, {"maxent_tau": 0.4}),
        (LISTWISE, {"maxent_beta": 1.0}),
        (LISTWISE, {"maxent_q_temperature": 0.5}),
        (LISTWISE, {"maxent_q_epsilon": 0.1}),
        (REFERENCED, {"maxent_length_normalize_ref": False}),
        (LISTWISE, {"maxent_policy_temperature": 2.0}),
        (LISTWISE, {"maxent_policy_temperature": 0.0}),
        (LISTWISE, {"maxent_policy_spread": 8.0}),
        ({**LISTWISE, "maxent_policy_temperature": 0.0}, {"maxent_length_normalize_policy": False}),
        (TEMPERED, {"maxent_utility": "length_scaled"}),
        (TEMPERED, {"maxent_target_weight_entropy": 0.5}),
        (TEMPERED, {"maxent_target_eff_rollouts": 2.0}),
        (TEMPERED, {"maxent_target_ratio": 4.0}),
        (ENTROPY, {"maxent_tau_lr": 1.0}),
        ({**ENTROPY, "maxent_target_weight_entropy": 0.01}, {"maxent_tau_min": 0.19}),
        ({**ENTROPY, "maxent_target_weight_entropy": 1.3}, {"maxent_tau_max": 0.21}),
        (ENTROPY, {"maxent_tau_warmup_steps": 1}),
        ({**TEMPERED, "beta": 0.5}, {"kl_target": 0.01}),
        ({**HELD_KL, "max_steps": 3}, {"kl_target": 1e3}),  # in the first step the KL is 0
        (HELD_KL, {"kl_horizon": 40.0}),
        (HELD_KL, {"kl_ctl_step_size": 0.2}),
        (HELD_KL, {"kl_beta_min": 0.49}),
    ],
    ids=lambda value: next(iter(value)) if len(value) == 1 else "",
)
def test_every_key_changes_the_update(
    tmp_path_factory: pytest.TempPathFactory, model: str, base: dict[str, Any], change: dict[str, Any]
) -> None:
    first, other = (trained(tmp_path_factory, model, keys) for keys in (base, {**base, **change}))
    assert max((first[name] - other[name]).abs().max() for name in first) > 1e-7


_TRAINED: dict[str, dict[str, torch.Tensor]] = {}


def trained(factory: pytest.TempPathFactory, model: str, keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights after two steps. Results are cached by keys."""
    name = json.dumps(keys, sort_keys=True)
    if name not in _TRAINED:
        trainer = make_trainer(factory.mktemp("keys"), model, **keys)
        trainer.train()
        _TRAINED[name] = weights_of(trainer)
        assert all(weight.isfinite().all() for weight in _TRAINED[name].values())
    return _TRAINED[name]


def test_training_twice_with_the_same_keys_gives_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory, model: str
) -> None:
    first = trained(tmp_path_factory, model, TEMPERED)
    _TRAINED.clear()
    second = trained(tmp_path_factory, model, TEMPERED)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_a_sum_over_tokens_undoes_trls_division_by_the_longest_length(tmp_path: Path, model: str) -> None:
    keys = {"maxent_objective": "weighted_mle", "maxent_length_normalize_policy": False}
    trainer = make_trainer(tmp_path, model, **keys)
    sums = generation(trainer)["advantages"].view(-1, GROUP).sum(1)
    assert sums.tolist() == pytest.approx([GROUP * trainer.max_completion_length] * 2)
