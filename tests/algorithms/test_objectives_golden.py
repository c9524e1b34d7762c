"""Advantages and clipped log-ratios against numbers computed by hand from the formulas of the papers."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_recipes.algorithms.objectives import ESTIMATORS, clip_log_ratios
from grpo_recipes.recipe.keys import catalogue

NAN = math.nan


def estimate(name: str, rewards: list[list[float]]) -> list[list[float]]:
    return ESTIMATORS[name](torch.tensor(rewards, dtype=torch.float64)).tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "advantages"),
    [
        # RLOO, eq. 4: R_i - 1 / (k - 1) * sum of R_j over j != i.
        ("rloo", [[1, 0, 0, 1], [2, 4, 0, 0]], [[2 / 3, -2 / 3, -2 / 3, 2 / 3], [2 / 3, 10 / 3, -2, -2]]),
        ("rloo", [[0.5, 1, NAN, 0], [1, NAN, NAN, NAN]], [[0, 0.75, NAN, -0.75], [NAN] * 4]),
        # REINFORCE++: (R - mean of the batch) / deviation of the batch. Mean 0.75, deviation sqrt(0.75 / 3).
        ("reinforce_plus_plus", [[1, 0], [1, 1]], [[0.5, -1.5], [0.5, 0.5]]),
        ("reinforce_plus_plus", [[1, 0, NAN], [1, NAN, 1]], [[0.5, -1.5, NAN], [0.5, NAN, 0.5]]),
        ("reinforce_plus_plus", [[0.1, 0.1], [0.1, 0.1]], [[0, 0], [0, 0]]),
        # Baseline: R - mean of the group = 0.5, -0.5, 0, 0. Their mean is 0, and their deviation sqrt(0.5 / 3).
        ("reinforce_plus_plus_baseline", [[1, 0], [1, 1]], [[math.sqrt(1.5), -math.sqrt(1.5)], [0, 0]]),
        ("reinforce_plus_plus_baseline", [[3, NAN, 1], [0, 0, NAN]],
         [[math.sqrt(1.5), NAN, -math.sqrt(1.5)], [0, 0, NAN]]),
    ],
)  # fmt: skip
def test_advantages(name: str, rewards: list[list[float]], advantages: list[list[float]]) -> None:
    for actual, expected in zip(estimate(name, rewards), advantages, strict=True):
        assert actual == pytest.approx(expected, abs=1e-6, nan_ok=True)


def test_a_batch_without_scores_has_no_advantages() -> None:
    for name in ESTIMATORS:
        assert all(math.isnan(advantage) for advantage in estimate(name, [[NAN, NAN]])[0])


def test_every_estimator_is_a_choice_of_the_key() -> None:
    assert catalogue()["advantage_estimator"]["choices"] == ["group", *ESTIMATORS]


def test_log_ratios_are_clipped_only_in_the_direction_of_the_update() -> None:
    log_ratios = torch.tensor([[0.5, -0.6, 0.1]]).expand(3, 3)
    clipped, at_low, at_high = clip_log_ratios(log_ratios, torch.tensor([[2.0], [-1.0], [0.0]]), 0.4, 0.3)
    assert clipped.tolist() == torch.tensor([[0.3, -0.6, 0.1], [0.5, -0.4, 0.1], [0.5, -0.6, 0.1]]).tolist()
    assert at_high.nonzero().tolist() == [[0, 0]] and at_low.nonzero().tolist() == [[1, 1]]
