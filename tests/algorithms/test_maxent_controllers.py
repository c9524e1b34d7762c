"""Controllers reach their target from ten times off, on policies and groups small enough for exact results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_recipes.algorithms import maxent
from grpo_recipes.algorithms.maxent import KLController, TauController

STEPS = 200
COMPLETIONS = 256
NAN = math.nan


# The policy: 8 answers of reward 0 to 1, a uniform reference, exact gradient ascent on E[reward] - beta KL.
REWARDS = torch.linspace(0, 1, 8, dtype=torch.float64)
KL_TARGET = 0.2
# With this beta, the best policy, ~ exp(reward / beta), has the target KL.
KL_BETA = 0.48465952


def kl_of(logits: torch.Tensor) -> float:
    policy = logits.softmax(0)
    return float((policy * (policy * len(policy)).log()).sum())


def climb(controller: KLController, moving: bool = True, completions: int = COMPLETIONS) -> list[float]:
    """Return the KL before each step."""
    logits, kls = torch.zeros_like(REWARDS), []
    for _ in range(STEPS):
        policy = logits.softmax(0)
        kls.append(kl_of(logits))
        worth = REWARDS - controller.beta * (policy * len(policy)).log()
        logits = logits + 3 * policy * (worth - policy @ worth)
        if moving:
            controller.update(kls[-1], completions)
    return kls


def kl_controller(beta: float = 1.0, **changes: float) -> KLController:
    return KLController(**{"beta": beta, "target": KL_TARGET, "horizon": 1000.0, "step_size": 0.2, **changes})


@pytest.mark.parametrize(("minimum", "recovered"), [(0.0, False), (1e-4, True)])
def test_beta_comes_back_from_its_floor_in_time(minimum, recovered):
    """The KL stays below its target for 100 steps, then it runs away. The remaining beta decides."""
    controller = kl_controller(0.04, horizon=2000.0, minimum=minimum)
    for _ in range(100):
        controller.update(0.0, 2048)
    assert (controller.beta < 1e-10) != recovered and controller.beta >= minimum
    for _ in range(40):
        controller.update(1.0, 2048)
    assert (controller.beta > 0.04) == recovered


def furthest(values: list[float], target: float) -> float:
    """Return the largest relative error in the second half."""
    return max(abs(value / target - 1) for value in values[STEPS // 2 :])


def nearest(values: list[float], target: float) -> float:
    return min(abs(value / target - 1) for value in values[STEPS // 2 :])


def test_the_beta_of_the_target_is_known():
    assert kl_of(REWARDS / KL_BETA) == pytest.approx(KL_TARGET, rel=1e-6)


@pytest.mark.parametrize("off", [10.0, 0.1])
def test_kl_is_held_from_ten_times_off(off):
    assert furthest(climb(kl_controller(KL_BETA * off)), KL_TARGET) < 0.2
    assert nearest(climb(kl_controller(KL_BETA * off), moving=False), KL_TARGET) > 0.5


def test_without_the_number_of_completions_the_controller_is_inert():
    controller = kl_controller(KL_BETA * 10)
    assert nearest(climb(controller, completions=1), KL_TARGET) > 0.5
    assert controller.beta == pytest.approx(KL_BETA * 10, rel=0.05)


def test_the_horizon_counts_completions_and_not_steps():
    """Two steps with half the completions equal one step, up to the square of the step size."""
    whole, halves = kl_controller(), kl_controller()
    whole.update(0.23, 256)
    for _ in range(2):
        halves.update(0.23, 128)
    assert halves.beta == pytest.approx(whole.beta, rel=(0.15 * 256 / 1000) ** 2)
    assert whole.beta == pytest.approx(1 + 0.15 * 0.256, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "kl", "beta"),
    [
        ({}, 0.8, 1 + 0.2 * 0.256),
        ({}, 0.0, 1 - 0.2 * 0.256),
        ({"step_size": 0.5}, 0.8, 1 + 0.5 * 0.256),
        ({"horizon": 512.0}, 0.8, 1.1),
        ({"horizon": 16.0}, 0.8, 1.2),
        ({"horizon": 16.0, "step_size": 0.9}, 0.0, 0.1),
        ({"target": 0.8}, 0.8, 1.0),
        ({}, NAN, 1.0),
    ],
)
def test_one_step_of_beta(changes, kl, beta):
    controller = kl_controller(**changes)
    controller.update(kl, COMPLETIONS)
    assert controller.beta == pytest.approx(beta, rel=1e-12)


# The groups: 16 prompts of 16 normal rewards, others each step.
TARGETS = {"weight_entropy": 0.75 * math.log(16), "eff_rollouts": 12.0, "target_ratio": 4.0}
# With these taus, the weights reach the targets on average.
TAUS = {"weight_entropy": 0.728, "eff_rollouts": 1.209, "target_ratio": 1.253}


def tau_controller(tau: float = 0.2, **changes: Any) -> TauController:
    known = {"lr": 0.2, "minimum": 1e-3, "maximum": 1e3, "measure": "weight_entropy", "target": 1.3}
    return TauController(tau, **{**known, **changes})


def measured(weights_PG: torch.Tensor, rewards_PG: torch.Tensor, right_PG: torch.Tensor) -> dict[str, float]:
    """Compute the metrics of a step like the trainer."""
    differ_P = maxent.find_different_rewards(rewards_PG)
    entropy_P = maxent.weight_entropy(weights_PG)[differ_P]
    ratio_P = maxent.target_ratio(weights_PG, right_PG, ~right_PG)[differ_P]
    values = {"weight_entropy": entropy_P, "eff_rollouts": entropy_P.exp(), "target_ratio": ratio_P}
    return {name: float(value_P.mean()) for name, value_P in values.items()}


def weigh(controller: TauController, moving: bool = True) -> list[float]:
    """Return the measure of each step. Completions above the mean of their group count as correct."""
    generator, measures = torch.Generator().manual_seed(1), []
    for _ in range(STEPS):
        utilities_PG = maxent.subtract_group_mean(torch.randn(16, 16, generator=generator, dtype=torch.float64))
        weights_PG = maxent.tempered_weights(utilities_PG, controller.tau)
        measures.append(measured(weights_PG, utilities_PG, utilities_PG > 0)[controller.measure])
        if moving:
            controller.update(measures[-1])
    return measures


@pytest.mark.parametrize("off", [10.0, 0.1])
@pytest.mark.parametrize("name", TARGETS)
def test_the_spread_of_weights_is_held_from_ten_times_off(name, off):
    target = {"measure": name, "target": TARGETS[name]}
    assert furthest(weigh(tau_controller(TAUS[name] * off, **target)), TARGETS[name]) < 0.2
    assert nearest(weigh(tau_controller(TAUS[name] * off, **target), moving=False), TARGETS[name]) > 0.3


def solved(controller: TauController, success: Callable[[int], float], steps: int, q: float | None = None):
    """Return the measure of each step on 32 groups of 16 rewards of 0 and 1. ``q`` is the beta of a target of q."""
    generator, measures = torch.Generator().manual_seed(2), []
    for step in range(steps):
        rewards_PG = (torch.rand(32, 16, generator=generator, dtype=torch.float64) < success(step)).double()
        if q is None:
            weights_PG = maxent.tempered_weights(maxent.subtract_group_mean(rewards_PG), controller.tau)
        else:
            refs_PG = torch.zeros_like(rewards_PG)
            weights_PG = maxent.target_weights(maxent.listwise_q(rewards_PG, 0.5, 1e-6), refs_PG, controller.tau, q)
        measures.append(measured(weights_PG, rewards_PG, rewards_PG == 1)[controller.measure])
        controller.update(measures[-1])
    return measures


CLIMB = {"success": lambda step: 0.2 + 0.75 * step / 300, "steps": 300}


@pytest.mark.parametrize("q", [None, 0.5])
@pytest.mark.parametrize("tau", [0.001, 50.0])
@pytest.mark.parametrize("rate", [0.25, 0.5, 0.95, None])
def test_a_ratio_is_reached_and_held_at_any_rate_of_success(rate, tau, q):
    controller = tau_controller(tau, measure="target_ratio", target=4.0)
    course = CLIMB if rate is None else {"success": lambda _: rate, "steps": 100}
    ratios = solved(controller, q=q, **course)
    assert all(abs(ratio / 4 - 1) < 0.02 for ratio in ratios[60:])
    assert controller.tau == pytest.approx(1 / math.log(4) if q is None else 1 / (0.5 * math.log(4)) - q, rel=0.02)


@pytest.mark.parametrize("target", [4.0, 8.0])
def test_effective_completions_cannot_be_fewer_than_the_right_answers(target):
    controller = tau_controller(measure="eff_rollouts", target=target)
    rollouts = solved(controller, **CLIMB)
    assert controller.tau == controller.minimum and rollouts[-1] > target + 1


def test_groups_of_equal_rewards_are_not_measured():
    """Four of five prompts are always solved, the others in 4 of 16 completions: the target of 8 is possible."""
    controller = tau_controller(measure="eff_rollouts", target=8.0)
    rewards_PG = torch.zeros(10, 16, dtype=torch.float64)
    rewards_PG[2:] = rewards_PG[:2, :4] = 1.0
    for _ in range(STEPS):
        weights_PG = maxent.tempered_weights(maxent.subtract_group_mean(rewards_PG), controller.tau)
        measures = measured(weights_PG, rewards_PG, rewards_PG == 1)
        controller.update(measures["eff_rollouts"])
    assert measures["eff_rollouts"] == pytest.approx(8.0, rel=1e-3)
    assert maxent.weight_entropy(weights_PG).exp().mean() > 14


@pytest.mark.parametrize(("lr", "stays"), [(1.9, True), (2.1, False)])
def test_a_ratio_is_held_by_strides_below_2(lr, stays):
    ratios = solved(tau_controller(1.0, measure="target_ratio", target=4.0, lr=lr), lambda _: 0.5, 100)
    assert all(abs(ratio / 4 - 1) < 0.02 for ratio in ratios[60:]) == stays


def test_rewards_differ_where_two_known_ones_do():
    rewards_PG = torch.tensor([[0.5, 0.5 + 1e-12, NAN], [0.5, 0.6, NAN], [NAN, NAN, NAN], [1.0, NAN, NAN]])
    assert maxent.find_different_rewards(rewards_PG.double()).tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    ("ratio", "factor"),
    [(16.0, 2.0), (2.0, 0.5), (4.0, 1.0), (math.inf, 10.0), (1e300, 10.0), (1.0, 0.1), (0.3, 0.1), (0.0, 0.1)],
)
def test_one_step_towards_a_ratio(ratio, factor):
    """Tau moves by the log of the ratio over the log of its target, at most by a factor of ten."""
    controller = tau_controller(measure="target_ratio", target=4.0)
    controller.update(ratio)
    assert controller.tau == pytest.approx(0.2 * factor**0.2, rel=1e-12)


def test_tau_follows_the_mean_entropy():
    controller = tau_controller(lr=0.05, minimum=0.01, maximum=10.0)
    taus = []
    for entropy in (1.2, 1.0, 0.8):
        controller.update(entropy)
        taus.append(controller.tau)
    assert taus == pytest.approx([0.20100250, 0.20221214, 0.20381595], abs=5e-9)


def test_effective_rollouts_are_compared_in_logarithms():
    by_entropy = tau_controller(target=math.log(4))
    by_rollouts = tau_controller(measure="eff_rollouts", target=4.0)
    by_entropy.update(math.log(2))
    by_rollouts.update(2.0)
    assert by_rollouts.tau == pytest.approx(by_entropy.tau, rel=1e-12)
    assert by_rollouts.tau == pytest.approx(0.2 * 2**0.2, rel=1e-12)


@pytest.mark.parametrize(("changes", "tau"), [({"maximum": 0.25}, 0.25), ({"minimum": 0.15}, 0.15)])
def test_tau_stays_within_its_limits(changes, tau):
    controller = tau_controller(lr=5.0, **changes)
    controller.update(0.1 if "maximum" in changes else 2.5)
    assert controller.tau == tau


@pytest.mark.parametrize(("entropy", "tau"), [(0.1, 5.0), (2.5, 0.15)])
def test_a_step_of_any_size_ends_at_the_limit(entropy, tau):
    controller = tau_controller(lr=1e6, minimum=0.15, maximum=5.0)
    controller.update(entropy)
    assert controller.tau == tau


def test_warmup_measures_and_does_not_move():
    controller, other = tau_controller(warmup_steps=2), tau_controller()
    taus = []
    for entropy in (2.0, 2.0, 1.3):
        controller.update(entropy)
        taus.append(controller.tau)
    assert taus[:2] == [0.2, 0.2]
    # The mean is 1.93 when it starts to count; without the warm-up's part in it the third step would change nothing.
    assert taus[2] == pytest.approx(0.2 * math.exp(0.2 * (1.3 - 1.93)), rel=1e-12)
    other.update(2.0)
    assert other.tau < 0.2


def test_a_step_that_measured_nothing_changes_nothing():
    controller = tau_controller()
    controller.update(1.0)
    before = controller.state_dict()
    controller.update(NAN)
    assert controller.state_dict() == before


def test_the_state_of_a_checkpoint_continues_exactly():
    kl, other_kl = kl_controller(), kl_controller(beta=7.0)
    tau, other_tau = tau_controller(warmup_steps=3), tau_controller(0.9, warmup_steps=3)
    values = [float(value) for value in torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
    for value in values[:2]:
        kl.update(value / 3, 77)
        tau.update(2 * value)
    other_kl.load_state_dict(json.loads(json.dumps(kl.state_dict())))
    other_tau.load_state_dict(json.loads(json.dumps(tau.state_dict())))
    for value in values[2:]:
        for controller in (kl, other_kl):
            controller.update(value / 3, 77)
        for controller in (tau, other_tau):
            controller.update(2 * value)
        assert other_kl.beta == kl.beta
        assert other_tau.state_dict() == tau.state_dict()
    assert kl.beta != 1.0
    assert tau.tau != 0.2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kl_controller(0.0), "beta must be above 0"),
        (lambda: kl_controller(target=NAN), "target must be above 0"),
        (lambda: kl_controller(horizon=0.0), "horizon must be above 0"),
        (lambda: kl_controller(step_size=1.0), "step_size must be above 0 and below 1"),
        (lambda: kl_controller(minimum=2.0), r"minimum must be at least 0 and at most beta \(1.0\), not 2.0"),
        (lambda: tau_controller(math.inf), "minimum <= tau <= maximum"),
        (lambda: tau_controller(0.0), "minimum <= tau <= maximum"),
        (lambda: tau_controller(maximum=0.1), "minimum <= tau <= maximum"),
        (lambda: tau_controller(minimum=0.0), "minimum <= tau <= maximum"),
        (lambda: tau_controller(lr=0.0), "lr must be above 0"),
        (lambda: tau_controller(target=0.0), "target of weight_entropy must be above 0"),
        (lambda: tau_controller(measure="eff_rollouts", target=1.0), "target of eff_rollouts must be above 1"),
        (lambda: tau_controller(measure="target_ratio", target=1.0), "target of target_ratio must be above 1"),
    ],
)
def test_a_value_out_of_its_range_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()
