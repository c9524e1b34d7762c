"""Weights against numbers computed independently of this code, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_recipes.algorithms import maxent

REWARDS_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
REF_LOGPS_PG = torch.tensor([[-0.5, -1.0, -0.8, -0.6]], dtype=torch.float64)


def near(actual: torch.Tensor, expected: list[float], tolerance: float = 1e-7) -> None:
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def test_q():
    q_PG = maxent.listwise_q(REWARDS_PG, temperature=1.0, epsilon=1e-6)
    near(q_PG[0], [0.3655288271978452, 0.13447117280215484, 0.13447117280215484, 0.3655288271978452], 1e-15)


@pytest.mark.parametrize(
    ("tau", "beta", "weights", "entropy"),
    [
        (0.2, 3.0, [0.34239567, 0.15676039, 0.18908913, 0.31175481], 1.3357555),
        (0.2, 0.0, [0.49665350, 0.00334650, 0.00334650, 0.49665350], 0.73332756),
        (0.0, 1.0, [0.41657958, 0.09295191, 0.11353171, 0.37693680], 1.20038955),
        (1.0, 1.0, [0.33948433, 0.16036142, 0.17722678, 0.32292748], 1.33194155),
    ],
)
def test_target_weights(tau, beta, weights, entropy):
    q_PG = maxent.listwise_q(REWARDS_PG, temperature=1.0, epsilon=1e-6)
    weights_PG = maxent.target_weights(q_PG, REF_LOGPS_PG, tau, beta)
    near(weights_PG[0], weights)
    near(maxent.weight_entropy(weights_PG), [entropy])


@pytest.mark.parametrize(("group_size", "mass"), [(4, 0.687), (8, 0.837), (16, 0.916)])
def test_one_right_completion_of_a_group_leaves_most_weight_on_the_wrong_where_beta_is_large(group_size, mass):
    rewards_PG = torch.zeros(1, group_size, dtype=torch.float64)
    rewards_PG[0, 0] = 1.0
    q_PG = maxent.listwise_q(rewards_PG, temperature=1.0, epsilon=1e-6)
    weights_PG = maxent.target_weights(q_PG, torch.full_like(q_PG, -0.7), tau=0.2, beta=3.0)
    near(maxent.incorrect_mass(weights_PG, rewards_PG == 0), [mass], 5e-4)
    near(weights_PG[0, :1] / weights_PG[0, 1:2], [math.exp(1 / 3.2)], 1e-5)


@pytest.mark.parametrize(
    ("advantages", "lengths", "longest", "tau", "weights"),
    [
        ([0.75, -0.25, -0.25, -0.25], [32] * 4, 256, 0.25, [1.4186449776, *[0.8604516741] * 3]),
        ([0.75, -0.25, -0.25, -0.25], [10, 20, 30, 40], 192, 0.05, [2.43437850, 0.66206480, 0.51027345, 0.39328325]),
        ([0.5, 0.5, -0.5, -0.5], [192] * 4, 192, 0.0, [2.0, 2.0, 0.0, 0.0]),
    ],
)
def test_tempered_weights(advantages, lengths, longest, tau, weights):
    advantages_PG = torch.tensor([advantages], dtype=torch.float64)
    utilities_PG = advantages_PG * torch.tensor([lengths]) / longest
    near(len(lengths) * maxent.tempered_weights(utilities_PG, tau)[0], weights)


@pytest.mark.parametrize(
    ("tau", "right", "wrong", "rollouts", "wrong_mass"),
    [
        (1.0, 1.073, 0.967, 15.98, 0.665),
        (0.25, 1.306, 0.861, 15.68, 0.592),
        (0.1, 1.80, 0.636, 14.00, 0.437),
        (0.05, 2.512, 0.313, 9.97, 0.215),
        (0.01, 3.200, 0.0001, 5.00, 0.0001),
    ],
)
def test_five_right_of_sixteen(tau, right, wrong, rollouts, wrong_mass):
    rewards_PG = torch.tensor([[1.0] * 5 + [0.0] * 11], dtype=torch.float64)
    weights_PG = maxent.tempered_weights(maxent.subtract_group_mean(rewards_PG) * 20 / 192, tau)
    near(16 * weights_PG[0, :1], [right], 5e-3)
    near(16 * weights_PG[0, -1:], [wrong], 5e-4)
    near(maxent.weight_entropy(weights_PG).exp(), [rollouts], 5e-3)
    near(maxent.incorrect_mass(weights_PG, rewards_PG == 0), [wrong_mass], 5e-4)
    # The ratio does not depend on the success rate.
    ratio = math.exp(20 / (192 * tau))
    near(weights_PG[0, :1] / weights_PG[0, -1:], [ratio], 1e-9 * ratio)
