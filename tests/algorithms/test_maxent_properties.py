"""Properties for all rewards, log-probabilities and temperatures."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_recipes.algorithms import maxent

few = settings(max_examples=25, database=None)
NAN = math.nan
INF = math.inf
values = st.floats(-2.0, 2.0).map(lambda value: round(value, 3))
temperatures = st.sampled_from([0.01, 0.05, 0.2, 1.0, 30.0])


@st.composite
def groups(draw: st.DrawFn, unscorable: bool = True) -> torch.Tensor:
    """Draw (P, G) rewards, some of them NaN."""
    prompts, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    value = st.one_of(values, values, values, st.just(NAN)) if unscorable else values
    row = st.lists(value, min_size=size, max_size=size)
    return torch.tensor(draw(st.lists(row, min_size=prompts, max_size=prompts)), dtype=torch.float64)


def references(like_PG: torch.Tensor) -> torch.Tensor:
    return -torch.rand(like_PG.shape, generator=torch.Generator().manual_seed(like_PG.numel()), dtype=torch.float64)


def weigh(rewards_PG: torch.Tensor, refs_PG: torch.Tensor, tau: float | torch.Tensor) -> dict[str, torch.Tensor]:
    """Apply each weight function to the same groups."""
    q_PG = maxent.listwise_q(rewards_PG, temperature=0.7, epsilon=0.5 / rewards_PG.shape[1])
    return {
        "target with the reference": maxent.target_weights(q_PG, refs_PG, tau, beta=0.4),
        "target without": maxent.target_weights(q_PG, None, tau, beta=0.0),
        "tempered": maxent.tempered_weights(rewards_PG, tau),
        "policy": maxent.policy_weights(refs_PG, ~rewards_PG.isnan()),
        "policy, by its spread": maxent.policy_weights(refs_PG, ~rewards_PG.isnan(), 0.1, 2.0),
        "shares": maxent.compute_reward_shares((rewards_PG - rewards_PG.nan_to_num(nan=INF).amin(1, keepdim=True)) + 1),
    }


@pytest.mark.parametrize("scale", [1.0, 7.0, 40.0])
def test_by_its_spread_a_groups_policy_weights_do_not_depend_on_the_scale_of_its_log_probs(scale):
    logps_PG = torch.tensor([[-3.0, -1.0, -7.0, -2.0]], dtype=torch.float64)
    learns_PG = torch.tensor([[True, True, False, True]])
    expected_PG = maxent.policy_weights(logps_PG, learns_PG, 0.5, 1.5)
    close(maxent.policy_weights(scale * logps_PG, learns_PG, 0.5, 1.5), expected_PG)
    spread = logps_PG[0, [0, 1, 3]].std(correction=0).item()
    close(expected_PG, maxent.policy_weights(logps_PG, learns_PG, 1.5 * spread))
    close(maxent.policy_weights(logps_PG, learns_PG, 90.0, 1.5), maxent.policy_weights(logps_PG, learns_PG, 90.0))


def test_per_token_the_objective_becomes_maxrl_as_completions_grow_and_at_a_temperature_it_does_not():
    """The length law: log-probs per token are alike in the end, and G (w - s) is G w - 1."""
    rewards_PG = torch.tensor([[1.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    logps_PG = torch.tensor([[-0.5, -3.0, -1.0, -2.0]], dtype=torch.float64)  # an answer's, in however many tokens
    learns_PG, maxrl_PG = torch.ones(1, 4, dtype=torch.bool), 4 * maxent.compute_reward_shares(rewards_PG) - 1
    close(maxrl_PG, (rewards_PG - 0.5) / 0.5)
    weights_PG = maxent.target_weights(maxent.listwise_q(rewards_PG, 0.1, 0.0), None, 0.2, 0.0)
    away = [
        (4 * (weights_PG - maxent.policy_weights(logps_PG / tokens, learns_PG)) - maxrl_PG).abs().max().item()
        for tokens in (1, 3, 30, 300)
    ]
    assert away[0] > 1 and away[1] > 0.3 and away[2] < 0.07 and away[3] < 0.007
    kept_PG = 4 * (weights_PG - maxent.policy_weights(logps_PG, learns_PG, 2.0))
    assert kept_PG[0, 1] - kept_PG[0, 0] > 1  # the rarer of two correct answers gains more


def test_a_group_without_reward_has_no_shares():
    close(maxent.compute_reward_shares(torch.zeros(1, 3)), torch.zeros(1, 3))


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=0, equal_nan=True)


@few
@given(groups(), temperatures)
def test_weights_sum_to_one_over_the_scorable_and_the_others_get_none(rewards_PG, tau):
    scorable_PG = ~rewards_PG.isnan()
    for weights_PG in weigh(rewards_PG, references(rewards_PG), tau).values():
        assert (weights_PG >= 0).all()
        assert (weights_PG[~scorable_PG] == 0).all()
        close(weights_PG.sum(1), scorable_PG.any(1).double())


@few
@given(groups(), temperatures, st.randoms(use_true_random=False))
def test_the_order_of_a_group_does_not_matter(rewards_PG, tau, random):
    order = list(range(rewards_PG.shape[1]))
    random.shuffle(order)
    refs_PG = references(rewards_PG)
    moved = weigh(rewards_PG[:, order], refs_PG[:, order], tau)
    for name, weights_PG in weigh(rewards_PG, refs_PG, tau).items():
        close(moved[name], weights_PG[:, order])


@few
@given(groups(), temperatures, values)
def test_a_constant_added_to_rewards_or_log_probs_changes_nothing(rewards_PG, tau, constant):
    refs_PG = references(rewards_PG)
    moved = weigh(rewards_PG + constant, refs_PG - 5 * constant, tau)
    for name, weights_PG in weigh(rewards_PG, refs_PG, tau).items():
        close(moved[name], weights_PG)
    close(maxent.subtract_group_mean(rewards_PG + constant), maxent.subtract_group_mean(rewards_PG))


@few
@given(groups(), temperatures)
def test_groups_do_not_touch_each_other(rewards_PG, tau):
    refs_PG = references(rewards_PG)
    taus_P1 = tau * (1 + torch.arange(len(rewards_PG), dtype=torch.float64))[:, None]
    together = weigh(rewards_PG, refs_PG, taus_P1)
    for place in range(len(rewards_PG)):
        row = slice(place, place + 1)
        for name, weights_PG in weigh(rewards_PG[row], refs_PG[row], float(taus_P1[place])).items():
            close(together[name][row], weights_PG, 1e-14)


@few
@given(groups(), temperatures)
def test_float32_and_half_precision_are_near_float64(rewards_PG, tau):
    refs_PG = references(rewards_PG)
    exact = weigh(rewards_PG, refs_PG, tau)
    for name, weights_PG in weigh(rewards_PG.float(), refs_PG.float(), tau).items():
        assert weights_PG.dtype == torch.float32
        close(weights_PG.double(), exact[name], 1e-4)
    half_PG = rewards_PG.bfloat16()
    assert torch.equal(maxent.tempered_weights(half_PG, tau), maxent.tempered_weights(half_PG.float(), tau))


@few
@given(groups(unscorable=False))
def test_tempered_weights_at_both_ends(utilities_PG):
    best_PG = (utilities_PG == utilities_PG.amax(1, keepdim=True)).double()
    shared_PG = best_PG / best_PG.sum(1, keepdim=True)
    assert torch.equal(maxent.tempered_weights(utilities_PG, 0.0), shared_PG)
    close(maxent.tempered_weights(utilities_PG, 1e-6), shared_PG)
    uniform_PG = torch.full_like(utilities_PG, 1 / utilities_PG.shape[1])
    close(maxent.tempered_weights(utilities_PG, INF), uniform_PG, 1e-15)
    close(maxent.tempered_weights(utilities_PG, 1e9), uniform_PG)


@few
@given(groups(unscorable=False), temperatures)
def test_target_weights_at_their_ends(rewards_PG, beta):
    q_PG = maxent.listwise_q(rewards_PG, 1.0, 1e-3)
    refs_PG = references(rewards_PG)
    uniform_PG = torch.full_like(q_PG, 1 / q_PG.shape[1])
    close(maxent.target_weights(q_PG, refs_PG, INF, beta), uniform_PG, 1e-15)
    close(maxent.target_weights(q_PG, refs_PG, 1e9, beta), uniform_PG, 1e-6)
    # tau = beta, both huge: q no longer counts and half of the reference's log-prob is left.
    close(maxent.target_weights(q_PG, refs_PG, 1e9, 1e9), (refs_PG / 2).softmax(1), 1e-6)
    close(maxent.target_weights(q_PG, refs_PG, 0.0, 1e9), refs_PG.softmax(1), 1e-6)
    close(maxent.target_weights(q_PG, refs_PG, 0.0, beta), maxent.target_weights(q_PG, refs_PG, 1e-9, beta), 1e-4)
    close(maxent.target_weights(q_PG, None, 1.0, 0.0), q_PG)
    close(maxent.target_weights(q_PG, None, 1e-6, 0.0), maxent.tempered_weights(rewards_PG, 0.0))


@few
@given(
    st.lists(values, min_size=2, max_size=8),
    st.sampled_from([(0.2, 3.0), (1.0, 0.5), (0.05, 0.1), (0.0, 1.0), (2.0, 0.0)]),
)
def test_the_exact_update_improves_by_the_known_amount(rewards, constants):
    """Phi = E log q + tau H rises by beta KL(new || old) + (tau + beta) KL(old || new), with the old as reference."""
    tau, beta = constants
    rewards_PG = torch.tensor([rewards], dtype=torch.float64)
    q_PG = maxent.listwise_q(rewards_PG, temperature=0.5, epsilon=1e-3)
    old_PG = references(rewards_PG).mul(3).softmax(1)
    for _ in range(3):
        new_PG = maxent.target_weights(q_PG, old_PG.log(), tau, beta)
        gain = _phi(new_PG, q_PG, tau) - _phi(old_PG, q_PG, tau)
        close(gain, beta * _kl(new_PG, old_PG) + (tau + beta) * _kl(old_PG, new_PG), 1e-13)
        old_PG = new_PG


def _phi(policy_PG: torch.Tensor, q_PG: torch.Tensor, tau: float) -> torch.Tensor:
    return (policy_PG * q_PG.log()).sum(1) + tau * maxent.weight_entropy(policy_PG)


def _kl(one_PG: torch.Tensor, other_PG: torch.Tensor) -> torch.Tensor:
    return (one_PG * (one_PG / other_PG).log()).sum(1)


@few
@given(groups(), temperatures)
def test_measures_stay_in_their_range(rewards_PG, tau):
    weights_PG = maxent.tempered_weights(rewards_PG, tau)
    some_P = ~rewards_PG.isnan().all(1)
    rollouts_P = maxent.weight_entropy(weights_PG).exp()
    assert torch.equal(rollouts_P.isnan(), ~some_P)
    assert ((rollouts_P[some_P] > 1 - 1e-12) & (rollouts_P[some_P] < rewards_PG.shape[1] + 1e-9)).all()
    wrong_PG = rewards_PG < 0
    right_PG = rewards_PG >= 0
    close((maxent.incorrect_mass(weights_PG, wrong_PG) + maxent.incorrect_mass(weights_PG, right_PG))[some_P],
          torch.ones(int(some_P.sum()), dtype=torch.float64))  # fmt: skip
    assert torch.equal(maxent.incorrect_mass(weights_PG, wrong_PG).isnan(), ~some_P)


def test_q_is_floored_and_a_missing_verdict_is_not_a_low_one():
    rewards_PG = torch.tensor([[0.0, 1.0, NAN, 1.0]], dtype=torch.float64)
    q_PG = maxent.listwise_q(rewards_PG, temperature=1e-3, epsilon=0.1)
    # The floor counts the whole group: softmax (0, 1/2, 1/2) times 0.6 plus 0.1, normalised.
    close(q_PG, torch.tensor([[1 / 9, 4 / 9, NAN, 4 / 9]], dtype=torch.float64))
    close(maxent.target_weights(q_PG, None, 1.0, 0.0), q_PG.nan_to_num(0.0))


def test_a_tau_for_each_group():
    utilities_PG = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    weights_PG = maxent.tempered_weights(utilities_PG, torch.tensor([[0.0], [1.0], [INF]]))
    close(weights_PG[:, 0], torch.tensor([1.0, 1 / (1 + math.exp(-1)), 0.5], dtype=torch.float64))


ONE_PG = torch.tensor([[1.0, 0.0]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: maxent.listwise_q(ONE_PG, 0.0, 0.1), "temperature must be above 0"),
        (lambda: maxent.listwise_q(ONE_PG, NAN, 0.1), "temperature must be above 0"),
        (lambda: maxent.listwise_q(ONE_PG, 1.0, 0.5), "epsilon must be at least 0 and below 1 / 2"),
        (lambda: maxent.listwise_q(ONE_PG, 1.0, -1e-9), "epsilon must be at least 0 and below 1 / 2"),
        (lambda: maxent.listwise_q(ONE_PG * INF, 1.0, 0.1), "rewards must be finite"),
        (lambda: maxent.target_weights(ONE_PG, None, 0.0, 0.0), "tau \\+ beta must be above 0"),
        (lambda: maxent.target_weights(ONE_PG, None, -0.1, 1.0), "tau must be at least 0"),
        (lambda: maxent.target_weights(ONE_PG, ONE_PG, 1.0, -1.0), "beta must be at least 0"),
        (lambda: maxent.target_weights(ONE_PG, ONE_PG, 1.0, INF), "beta must be at least 0 and finite"),
        (lambda: maxent.target_weights(ONE_PG, None, 1.0, 1.0), "needs ref_logps_PG"),
        (lambda: maxent.target_weights(ONE_PG, ONE_PG * NAN, 1.0, 1.0), "ref_logps_PG must be finite"),
        (lambda: maxent.tempered_weights(ONE_PG, -0.1), "tau must be at least 0"),
        (lambda: maxent.tempered_weights(ONE_PG, NAN), "tau must be at least 0"),
        (lambda: maxent.tempered_weights(ONE_PG, torch.tensor([[-1.0]])), "tau must be at least 0"),
        (lambda: maxent.tempered_weights(-INF * torch.ones(1, 2), 1.0), "utilities must be finite"),
        (lambda: maxent.policy_weights(ONE_PG * NAN, ONE_PG > 0), "logps_PG must be finite"),
        (lambda: maxent.policy_weights(ONE_PG, ONE_PG > 0, temperature=0.0), "temperature must be above 0"),
        (lambda: maxent.policy_weights(ONE_PG, ONE_PG > 0, spread=-1.0), "spread at least 0"),
        (lambda: maxent.compute_reward_shares(-ONE_PG), "rewards must be at least 0, not -1"),
    ],
)
def test_a_value_out_of_its_range_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
