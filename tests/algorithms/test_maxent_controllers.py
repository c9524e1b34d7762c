"""Controllers hold what they measure: on policies and groups small enough to be exact, from ten times off."""

from __future__ import annotations

import json
import math

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
# The beta whose best policy, ~ exp(reward / beta), has that KL.
KL_BETA = 0.48465952


def kl_of(logits: torch.Tensor) -> float:
    policy = logits.softmax(0)
    return float((policy * (policy * len(policy)).log()).sum())


def climb(controller: KLController, moving: bool = True, completions: int = COMPLETIONS) -> list[float]:
    """KL before each step."""
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


def furthest(values: list[float], target: float) -> float:
    """Largest relative error of the last half."""
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
    """Two steps of half the completions are one step, up to the square of its size."""
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
TARGETS = {"target_entropy": 0.75 * math.log(16), "target_eff_rollouts": 12.0}
# The taus whose weights have these on average.
TAUS = {"target_entropy": 0.728, "target_eff_rollouts": 1.209}


def tau_controller(tau: float = 0.2, **changes: float) -> TauController:
    known = {"lr": 0.2, "minimum": 1e-3, "maximum": 1e3}
    target = {} if TARGETS.keys() & changes.keys() else {"target_entropy": 1.3}
    return TauController(tau, **{**known, **target, **changes})


def weigh(controller: TauController, moving: bool = True) -> dict[str, list[float]]:
    """What each step measures."""
    generator = torch.Generator().manual_seed(1)
    seen: dict[str, list[float]] = {name: [] for name in TARGETS}
    for _ in range(STEPS):
        rewards_PG = torch.randn(16, 16, generator=generator, dtype=torch.float64)
        weights_PG = maxent.tempered_weights(maxent.centred(rewards_PG), controller.tau)
        entropy = float(maxent.weight_entropy(weights_PG).mean())
        rollouts = float(maxent.weight_entropy(weights_PG).exp().mean())
        seen["target_entropy"].append(entropy)
        seen["target_eff_rollouts"].append(rollouts)
        if moving:
            controller.update(entropy, rollouts)
    return seen


@pytest.mark.parametrize("off", [10.0, 0.1])
@pytest.mark.parametrize("name", TARGETS)
def test_the_spread_of_weights_is_held_from_ten_times_off(name, off):
    target = {name: TARGETS[name]}
    assert furthest(weigh(tau_controller(TAUS[name] * off, **target))[name], TARGETS[name]) < 0.2
    assert nearest(weigh(tau_controller(TAUS[name] * off, **target), moving=False)[name], TARGETS[name]) > 0.3


def test_tau_follows_the_mean_entropy():
    controller = tau_controller(lr=0.05, minimum=0.01, maximum=10.0)
    taus = []
    for entropy in (1.2, 1.0, 0.8):
        controller.update(entropy, NAN)
        taus.append(controller.tau)
    assert taus == pytest.approx([0.20100250, 0.20221214, 0.20381595], abs=5e-9)


def test_effective_rollouts_are_compared_in_logarithms():
    by_entropy, by_rollouts = tau_controller(target_entropy=math.log(4)), tau_controller(target_eff_rollouts=4.0)
    by_entropy.update(math.log(2), NAN)
    by_rollouts.update(NAN, 2.0)
    assert by_rollouts.tau == pytest.approx(by_entropy.tau, rel=1e-12)
    assert by_rollouts.tau == pytest.approx(0.2 * 2**0.2, rel=1e-12)


@pytest.mark.parametrize(("changes", "tau"), [({"maximum": 0.25}, 0.25), ({"minimum": 0.15}, 0.15)])
def test_tau_stays_within_its_limits(changes, tau):
    controller = tau_controller(lr=5.0, **changes)
    controller.update(0.1 if "maximum" in changes else 2.5, NAN)
    assert controller.tau == tau


@pytest.mark.parametrize(("entropy", "tau"), [(0.1, 5.0), (2.5, 0.15)])
def test_a_step_of_any_size_ends_at_the_limit(entropy, tau):
    controller = tau_controller(lr=1e6, minimum=0.15, maximum=5.0)
    controller.update(entropy, NAN)
    assert controller.tau == tau


def test_warmup_measures_and_does_not_move():
    controller, other = tau_controller(warmup_steps=2), tau_controller()
    taus = []
    for entropy in (2.0, 2.0, 1.3):
        controller.update(entropy, NAN)
        taus.append(controller.tau)
    assert taus[:2] == [0.2, 0.2]
    # The mean is 1.93 when it starts to count; without the warm-up's part in it the third step would change nothing.
    assert taus[2] == pytest.approx(0.2 * math.exp(0.2 * (1.3 - 1.93)), rel=1e-12)
    other.update(2.0, NAN)
    assert other.tau < 0.2


def test_a_step_that_measured_nothing_changes_nothing():
    controller = tau_controller()
    controller.update(1.0, NAN)
    before = controller.state_dict()
    controller.update(NAN, NAN)
    assert controller.state_dict() == before


def test_the_state_of_a_checkpoint_continues_exactly():
    kl, other_kl = kl_controller(), kl_controller(beta=7.0)
    tau, other_tau = tau_controller(warmup_steps=3), tau_controller(0.9, warmup_steps=3)
    values = [float(value) for value in torch.rand(20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)]
    for value in values[:2]:
        kl.update(value / 3, 77)
        tau.update(2 * value, NAN)
    other_kl.load_state_dict(json.loads(json.dumps(kl.state_dict())))
    other_tau.load_state_dict(json.loads(json.dumps(tau.state_dict())))
    for value in values[2:]:
        for one in (kl, other_kl):
            one.update(value / 3, 77)
        for one in (tau, other_tau):
            one.update(2 * value, NAN)
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
        (lambda: tau_controller(target_entropy=1.0, target_eff_rollouts=2.0), "exactly one"),
        (lambda: TauController(0.2, 0.1, 0.01, 1.0), "exactly one"),
        (lambda: tau_controller(math.inf), "minimum <= tau <= maximum"),
        (lambda: tau_controller(0.0), "minimum <= tau <= maximum"),
        (lambda: tau_controller(maximum=0.1), "minimum <= tau <= maximum"),
        (lambda: tau_controller(minimum=0.0), "minimum <= tau <= maximum"),
        (lambda: tau_controller(lr=0.0), "lr must be above 0"),
        (lambda: tau_controller(target_entropy=0.0), "target_entropy must be above 0"),
        (lambda: tau_controller(target_eff_rollouts=1.0), "target_eff_rollouts must be above 1"),
    ],
)
def test_a_value_out_of_its_range_is_an_error(make, message):
    with pytest.raises(ValueError, match=message):
        make()
