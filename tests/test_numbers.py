"""S8: numbers from outside are checked in the dtype that training computes in."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_recipes.numbers import LARGEST_REWARD, LOWEST_LOGPROB, find_reward_problem, is_logprob


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-300, LARGEST_REWARD, -LARGEST_REWARD])
def test_a_reward_within_the_limit_keeps_the_advantages_of_a_large_group_finite(value: float) -> None:
    assert find_reward_problem(value) is None
    rewards_G = torch.tensor([value, -value] * 512, dtype=torch.float32)
    advantages_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-4)
    assert rewards_G.square().sum().isfinite() and advantages_G.isfinite().all()
    assert value == 0 or abs(value) < 1e-9 or float(advantages_G.abs().max()) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (1e39, "1e+39 is infinite in float32"),
        (-1e20, "-1e+20 is beyond 1e+15: the variance of a group would overflow float32"),
    ],
)
def test_any_other_has_a_reason(value: float, problem: str) -> None:
    assert find_reward_problem(value) == problem


def test_a_log_prob_is_that_of_a_probability_of_float32() -> None:
    assert all(map(is_logprob, (0.0, -0.5, -100.0, LOWEST_LOGPROB, 1e-7)))
    assert not any(map(is_logprob, (-9999.0, -math.inf, math.nan, 0.5, LOWEST_LOGPROB - 1)))
    assert float(torch.tensor(LOWEST_LOGPROB, dtype=torch.float32).exp()) == 0.0
