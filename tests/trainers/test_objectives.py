"""Objectives that TRL lacks, in real trainers: advantages, loss and gradient of GMPO, and splits of the batch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from grpo_recipes.errors import ConfigError
from grpo_recipes.trainers.advantages import estimate_advantages
from grpo_recipes.trainers.grpo import GRPOTrainer

from .fixed_completions import GROUP, generation, make_trainer, rows_of, weights_of
from .test_maxent import expected_rewards


def advantages_of(name: str, groups: list[list[float | None]]) -> list[list[float]]:
    """Compute the advantages with the formulas of the papers. A completion without a score has none."""
    known = [[reward for reward in group if reward is not None] for group in groups]
    if name == "rloo":
        return [
            [
                0.0 if reward is None else reward - (sum(scored) - reward) / (len(scored) - 1)
                for reward in group
            ]
            for group, scored in zip(groups, known, strict=True)
        ]  # fmt: skip
    baselines = [fmean(scored) if name.endswith("baseline") else 0.0 for scored in known]
    batch = [reward - baseline for scored, baseline in zip(known, baselines, strict=True) for reward in scored]
    return [
        [0.0 if reward is None else (reward - baseline - fmean(batch)) / stdev(batch) for reward in group]
        for group, baseline in zip(groups, baselines, strict=True)
    ]


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_the_loss_gets_the_advantages_of_the_paper(tmp_path: Path, model: str, name: str) -> None:
    trainer = make_trainer(tmp_path, model, GRPOTrainer, advantage_estimator=name)
    output = generation(trainer)
    rewards = expected_rewards(output)
    groups = [rewards[start : start + GROUP] for start in range(0, len(rewards), GROUP)]
    expected = [advantage for group in advantages_of(name, groups) for advantage in group]
    assert None in rewards and len(set(expected)) > 3
    assert output["advantages"].tolist() == pytest.approx(expected, abs=1e-6)
    assert list(trainer._logs["advantages"]) == pytest.approx(expected, abs=1e-6)


def test_with_reinforce_plus_plus_groups_of_equal_rewards_teach(tmp_path: Path, model: str) -> None:
    def of_prompt(prompts: list[Any], **_: Any) -> list[float]:
        return [float(prompt == prompts[0]) for prompt in prompts]

    for name, norm, without_signal in (("reinforce_plus_plus", 1e-4, 0), ("reinforce_plus_plus_baseline", -1, 1)):
        folder = tmp_path / name
        make_trainer(folder, model, GRPOTrainer, (of_prompt,), advantage_estimator=name).train()
        for row in rows_of(folder):
            assert row["grad_norm"] > norm and row["frac_reward_zero_std"] == without_signal
            assert (row["grad_norm"] == 0) is (name != "reinforce_plus_plus")


def test_groups_with_their_own_advantages_are_rejected() -> None:
    trainer: Any = SimpleNamespace(
        args=SimpleNamespace(advantage_estimator="rloo"), source=SimpleNamespace(brings_advantages=True)
    )
    with pytest.raises(ConfigError, match="a group has its own advantages, but rloo computes advantages from scores"):
        estimate_advantages(trainer)


LOW, HIGH = 0.2, 0.3


def paper_loss(ratios_T: torch.Tensor, advantage: float) -> torch.Tensor:
    """Compute GMPO's objective for a completion, negated: the geometric mean of min(ratio A, clip(ratio) A), with sign.

    https://arxiv.org/abs/2507.20673, with the limits exp(-LOW) and exp(HIGH).
    """
    clipped_T = ratios_T.clamp(math.exp(-LOW), math.exp(HIGH))
    terms_T = torch.minimum(ratios_T * advantage, clipped_T * advantage).abs()
    return -math.copysign(1, advantage) * terms_T.prod() ** (1 / len(terms_T))


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_gmpo_has_the_loss_and_the_gradient_of_the_paper(tmp_path: Path, model: str, beta: float) -> None:
    keys = {"loss_type": "gmpo", "epsilon": LOW, "epsilon_high": HIGH, "advantage_estimator": "rloo", "beta": beta}
    trainer = make_trainer(tmp_path, model, GRPOTrainer, **keys)
    rows = generation(trainer)
    mask = rows["completion_mask"].bool()
    logps = compute_logps(trainer, rows)
    shifts = torch.linspace(-0.5, 0.5, mask.numel())[torch.randperm(mask.numel())].view(mask.shape)
    rows["old_per_token_logps"] = old = (logps - shifts).detach()

    loss = trainer._compute_loss(trainer.model, dict(rows))
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in trainer.model.parameters()]
    trainer.model.zero_grad()

    logps = compute_logps(trainer, rows)
    losses, clipped = [], {"low": [0], "high": [0]}
    for row, advantage in enumerate(rows["advantages"].tolist()):
        log_ratios = (logps - old)[row][mask[row]]
        loss_of_row = paper_loss(log_ratios.exp(), advantage) if advantage else torch.zeros(())
        if beta:
            ratio = loss_of_row / -advantage if advantage else log_ratios.mean().exp()
            gap = (rows["ref_per_token_logps"] - logps)[row][mask[row]]
            loss_of_row = loss_of_row + beta * ((gap.exp() - gap - 1) * ratio).mean()
        losses.append(loss_of_row)
        clipped["low"].append(int((log_ratios < -LOW).sum()) if advantage < 0 else 0)
        clipped["high"].append(int((log_ratios > HIGH).sum()) if advantage > 0 else 0)
    expected = torch.stack(losses).mean()
    expected.backward()
    assert min(sum(counts) for counts in clipped.values()) > 0
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for gradient, parameter in zip(gradients, trainer.model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)
    for name, counts in clipped.items():
        (logged,) = trainer._metrics["train"][f"clip_ratio/{name}_mean"]
        assert logged == pytest.approx(sum(counts) / int(mask.sum()))


def compute_logps(trainer: GRPOTrainer, rows: dict[str, Any]) -> torch.Tensor:
    """Compute log-probs of completions, (B, T), with TRL's forward pass."""
    ids = torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1)
    mask = torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1)
    logps, *_ = trainer._get_per_token_logps_and_entropies(
        trainer.model, ids, mask, rows["completion_ids"].shape[1]
    )  # fmt: skip
    return logps


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"advantage_estimator": "rloo", "loss_type": "dr_grpo"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "reinforce_plus_plus_baseline", "beta": 0.1},
        {"loss_type": "gmpo", "epsilon": 0.01, "num_iterations": 2, "max_steps": 4},
        {"teacher_model_name_or_path": "", "teacher_coef": 0.5},
    ],
    ids=lambda keys: next(iter(keys.values())) or "teacher",
)
def test_two_processes_equal_one(tmp_path: Path, model: str, teacher: str, keys: dict[str, Any]) -> None:
    keys = {**keys, **({"teacher_model_name_or_path": teacher} if "teacher_coef" in keys else {})}
    folder = tmp_path / "ranks"
    folder.mkdir()
    (folder / "model").symlink_to(model)
    # Three groups of four on two ranks: each rank has half of the second group.
    (folder / "keys.json").write_text(json.dumps({**keys, "per_device_train_batch_size": 6}))
    run_ranks("trainers.fixed_completions", str(folder))
    alone = make_trainer(tmp_path, model, GRPOTrainer, per_device_train_batch_size=12, **keys)
    before = weights_of(alone)
    alone.train()
    after = weights_of(alone)
    assert max((after[name] - before[name]).abs().max() for name in after) > 1e-3
    for rank in (0, 1):
        for name, weight in torch.load(folder / f"rank_{rank}.pt")["weights"].items():
            assert torch.allclose(weight, after[name.removeprefix("module.")], rtol=0, atol=1e-6), name
    for row, two in zip(rows_of(tmp_path), rows_of(folder / "two"), strict=True):
        names = ("reward", "loss", "teacher_kl")
        compared = [name for name in row if name.startswith("clip_ratio/") or name in names]
        assert [two[name] for name in compared] == pytest.approx([row[name] for name in compared], rel=1e-4, abs=1e-6)
    if "gmpo" in keys.values():
        assert rows_of(tmp_path)[1]["clip_ratio/region_mean"] > 0
