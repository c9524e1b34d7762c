"""Compute the weights of MaxEnt-GRPO for the completions of a group, and control beta and tau.

Tensors are prompts by completions, (P, G). NaN marks an unscorable completion: it gets weight 0, and the weights of the
others sum to 1. A group with no scorable completion gets weight 0 throughout. Half precision is computed and returned
in float32.

The weights maximize E_pi[log q] + tau H(pi) - beta KL(pi || pi_ref) over the sampled completions. q is a softmax of the
group's rewards (``listwise_q``). The solution is w ~ q^(1 / (tau + beta)) * pi_ref^(beta / (tau + beta)), as in
docs/maxent-formulas.md. Controllers keep a measure of the training at a target: beta controls the KL, and tau controls
the spread of weights.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch

LEAST_Q = 1e-12
EMA_DECAY = 0.9
EQUAL = 1e-9  # rewards closer than this are equal
_MOST_NATS = 700.0  # exp of more overflows a float
_LARGEST_ERROR = 10.0  # largest factor between the log of a ratio and the log of its target that counts
_LEAST_TARGETS = {"weight_entropy": 0, "eff_rollouts": 1, "target_ratio": 1}  # measure -> lower limit of its targets


def listwise_q(rewards_PG: torch.Tensor, temperature: float, epsilon: float) -> torch.Tensor:
    """Return the target distribution over a group: a softmax of the rewards with a floor.

    ``temperature`` of the softmax is in units of reward, above 0. ``epsilon``, 0 <= epsilon < 1 / G, is the least mass
    of each completion. The (P, G) probabilities sum to 1 over the scorable completions and are NaN for NaN rewards.
    Raise ValueError for an argument out of its range or an infinite reward.
    """
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature}")
    group_size = rewards_PG.shape[1]
    if not 0 <= epsilon * group_size < 1:
        raise ValueError(f"epsilon must be at least 0 and below 1 / {group_size} (the group size), not {epsilon}")
    rewards_PG, scorable_PG = _split_values_and_mask(rewards_PG, "rewards")
    floored_PG = _softmax(rewards_PG / temperature, scorable_PG) * (1 - epsilon * group_size) + epsilon
    floored_PG = floored_PG.masked_fill(~scorable_PG, 0.0)
    q_PG = floored_PG / floored_PG.sum(1, keepdim=True)
    return q_PG.masked_fill(~scorable_PG, torch.nan)


def target_weights(
    q_PG: torch.Tensor, ref_logps_PG: torch.Tensor | None, tau: float | torch.Tensor, beta: float
) -> torch.Tensor:
    """Return the optimal weights, q^(1 / (tau + beta)) * pi_ref^(beta / (tau + beta)), normalized.

    ``q_PG`` is the result of ``listwise_q``. Values below 1e-12 count as 1e-12. ``ref_logps_PG`` are
    log-probabilities of whole completions under the reference, in nats, per token or summed. They are None if beta
    is 0. Completions with a q of NaN are not scorable: their weight is 0, and their reference may have any value.
    ``tau``, in units of log q, is a number or a tensor that broadcasts against (P, 1). At inf the weights are
    uniform. Raise ValueError if tau or beta is below 0, tau + beta is 0, beta is infinite, or the reference is
    missing or not finite for a scorable completion.
    """
    if not 0 <= beta < math.inf:
        raise ValueError(f"beta must be at least 0 and finite, not {beta}")
    q_PG, scorable_PG = _split_values_and_mask(q_PG, "q")
    total = _make_temperature(tau, q_PG) + beta
    if (total == 0).any():
        raise ValueError("tau + beta must be above 0: without entropy and reference no weights are defined")
    scores_PG = q_PG.clamp(min=LEAST_Q).log()
    if beta > 0:
        if ref_logps_PG is None:
            raise ValueError(f"beta {beta} needs ref_logps_PG")
        ref_logps_PG = ref_logps_PG.to(scores_PG.dtype)
        if not ref_logps_PG[scorable_PG].isfinite().all():
            raise ValueError("ref_logps_PG must be finite for each scorable completion")
        scores_PG = scores_PG + beta * ref_logps_PG
    return _compute_tempered_softmax(scores_PG, scorable_PG, total)


def tempered_weights(utilities_PG: torch.Tensor, tau: float | torch.Tensor) -> torch.Tensor:
    """Return softmax(utility / tau) over each group: (P, G) weights that sum to 1 over the scorable completions.

    A completion with the utility NaN is not scorable: its weight is 0. ``tau``, in units of utility, is a number or a
    tensor that broadcasts against (P, 1). At 0 all weight is on the largest utility, divided among ties. At inf the
    weights are uniform. Raise ValueError for a tau below 0 or NaN, or an infinite utility.
    """
    utilities_PG, scorable_PG = _split_values_and_mask(utilities_PG, "utilities")
    return _compute_tempered_softmax(utilities_PG, scorable_PG, _make_temperature(tau, utilities_PG))


def policy_weights(
    logps_PG: torch.Tensor, scorable_PG: torch.Tensor, temperature: float = 1.0, spread: float = 0.0
) -> torch.Tensor:
    """Return the policy's own distribution over a group, which the listwise objective moves to the target.

    ``logps_PG`` are log-probabilities of whole completions under the policy, in nats, per token or summed. They are
    divided by the larger of ``temperature``, above 0 and in nats, and ``spread`` times their standard deviation over
    the scorable completions of the group. Raise ValueError if the log-probability of a scorable completion is not
    finite, or a temperature or a spread is out of its range.
    """
    logps_PG = _widen_to_float32(logps_PG)
    if not logps_PG[scorable_PG].isfinite().all():
        raise ValueError("logps_PG must be finite for each scorable completion")
    if not 0 < temperature < math.inf or not 0 <= spread < math.inf:
        raise ValueError(f"temperature must be above 0, spread at least 0, both finite: not {temperature} and {spread}")
    if spread == 0:
        return _softmax(logps_PG / temperature, scorable_PG)
    known_PG = logps_PG.masked_fill(~scorable_PG, torch.nan)
    variance_P1 = (known_PG - known_PG.nanmean(1, keepdim=True)).square().nanmean(1, keepdim=True).nan_to_num(nan=0.0)
    return _softmax(logps_PG / (spread * variance_P1.sqrt()).clamp(min=temperature), scorable_PG)


def compute_reward_shares(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return each completion's fraction of its group's reward: (P, G) weights that sum to 1, or to 0 without rewards.

    MaxRL's advantage (https://arxiv.org/abs/2602.02710) is the reward divided by the group's mean, minus 1. It equals G
    times the weight, minus 1. Raise ValueError for a reward below 0 or infinite.
    """
    rewards_PG, scorable_PG = _split_values_and_mask(rewards_PG, "rewards")
    rewards_PG = rewards_PG.masked_fill(~scorable_PG, 0.0)
    if (rewards_PG < 0).any():
        raise ValueError(f"rewards must be at least 0, not {rewards_PG.min().item():g}")
    total_P1 = rewards_PG.sum(1, keepdim=True)
    return rewards_PG / total_P1.masked_fill(total_P1 == 0, 1.0)


def subtract_group_mean(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return rewards minus their group's mean, Dr.GRPO's advantage (https://arxiv.org/abs/2503.20783).

    NaN values are left out of the mean and stay NaN.
    """
    rewards_PG = _widen_to_float32(rewards_PG)
    return rewards_PG - rewards_PG.nanmean(1, keepdim=True)


def find_different_rewards(rewards_PG: torch.Tensor) -> torch.Tensor:
    """Return a mask, (P,), of the groups with different rewards.

    Rewards of NaN are left out. Other groups have equal weights for every tau.
    """
    most_P = rewards_PG.nan_to_num(nan=-torch.inf).amax(1)
    least_P = rewards_PG.nan_to_num(nan=torch.inf).amin(1)
    return most_P - least_P > EQUAL


def weight_entropy(weights_PG: torch.Tensor) -> torch.Tensor:
    """Return the (P,) entropies of the weights in nats. NaN for a group without weights."""
    weights_PG = _widen_to_float32(weights_PG)
    entropy_P = -torch.xlogy(weights_PG, weights_PG).sum(1)
    return entropy_P.masked_fill(~(weights_PG > 0).any(1), torch.nan)


def incorrect_mass(weights_PG: torch.Tensor, wrong_PG: torch.Tensor) -> torch.Tensor:
    """Return the (P,) fractions of the weight that is on wrong completions. NaN for a group without weights."""
    weights_PG = _widen_to_float32(weights_PG)
    mass_P = weights_PG.masked_fill(~wrong_PG, 0.0).sum(1)
    return mass_P.masked_fill(~(weights_PG > 0).any(1), torch.nan)


def target_ratio(weights_PG: torch.Tensor, right_PG: torch.Tensor, wrong_PG: torch.Tensor) -> torch.Tensor:
    """Return the (P,) ratios of the mean weight of right to wrong answers. NaN for a group without right or wrong.

    Also NaN if both have weight 0. Infinite if only the wrong answers have weight 0.
    """
    right_P, wrong_P = (  # the mean weight of each prompt's right and wrong completions; NaN if it has none
        weights_PG.masked_fill(~selected_PG, 0.0).sum(1) / selected_PG.sum(1) for selected_PG in (right_PG, wrong_PG)
    )
    return right_P / wrong_P


def _widen_to_float32(values: torch.Tensor) -> torch.Tensor:
    """Return the values in float32, or in their own dtype if it is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _split_values_and_mask(values_PG: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in at least float32, and a mask of the values that are not NaN.

    Raise ValueError, with this ``name`` of the values, for an infinite value.
    """
    values_PG = _widen_to_float32(values_PG)
    if values_PG.isinf().any():
        raise ValueError(f"{name} must be finite, or NaN for an unscored completion")
    return values_PG, ~values_PG.isnan()


def _make_temperature(tau: float | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return tau as a tensor with the dtype and device of ``like``. Raise ValueError if it is below 0 or NaN."""
    tau = torch.as_tensor(tau, dtype=like.dtype, device=like.device)
    if not (tau >= 0).all():
        raise ValueError(f"tau must be at least 0, not {tau.tolist()}")
    return tau


def _compute_tempered_softmax(
    scores_PG: torch.Tensor, scorable_PG: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """Return softmax(score / temperature) over each group, 0 for completions that are not scorable.

    At temperature 0 all weight is on the largest score, divided among ties. At inf the weights are uniform.
    """
    gaps_PG = scores_PG - scores_PG.masked_fill(~scorable_PG, -torch.inf).amax(1, keepdim=True)
    # At temperature 0 the largest score would be 0 / 0. Its gap of 0 stays 0, and all others become -inf.
    return _softmax(torch.where(gaps_PG == 0, gaps_PG, gaps_PG / temperature), scorable_PG)


def _softmax(scores_PG: torch.Tensor, scorable_PG: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the scorable completions of each group, and 0 for the other completions."""
    return scores_PG.masked_fill(~scorable_PG, -torch.inf).softmax(1).masked_fill(~scorable_PG, 0.0)


@dataclass
class KLController:
    """Adaptive coefficient of the KL penalty (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2).

    Each step multiplies beta by 1 + clip(kl / target - 1, +-step_size) * completions / horizon. The number of
    completions makes the horizon independent of the batch. A step counts for at most one horizon, so beta stays
    positive. If the policy never reaches the target, beta falls to ``minimum`` and can rise again from there.
    """

    beta: float  # current coefficient; above 0
    target: float  # KL to keep, in the unit of ``update`` (TRL's KL is in nats per token); above 0
    horizon: float  # completions over which beta changes at most by a factor of 1 + step_size; above 0
    step_size: float  # largest relative error that one step corrects; above 0, below 1
    minimum: float = 0.0  # least beta; at most beta

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of its range."""
        for name in ("beta", "target", "horizon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if not 0 < self.step_size < 1:
            raise ValueError(f"step_size must be above 0 and below 1, not {self.step_size}")
        if not 0 <= self.minimum <= self.beta:
            raise ValueError(f"minimum must be at least 0 and at most beta ({self.beta}), not {self.minimum}")

    def update(self, kl: float, completions: int) -> None:
        """Multiply beta according to the KL of a step over this many completions of all processes. Ignore NaN.

        ``beta`` rises if ``kl`` is above the target, and falls if it is below.
        """
        if math.isnan(kl):
            return
        error = max(-self.step_size, min(self.step_size, kl / self.target - 1))
        self.beta = max(self.minimum, self.beta * (1 + error * min(completions / self.horizon, 1.0)))

    def state_dict(self) -> dict[str, float]:
        """Return beta for a checkpoint."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore beta from a result of ``state_dict``."""
        self.beta = float(state["beta"])


@dataclass
class TauController:
    """Adaptive temperature of the weights: log tau rises by lr for each nat of spread that is missing to the target.

    For the weight entropy, and the logarithm of the effective rollouts, the error in nats uses a moving mean over
    steps: 0.9 of the last mean plus 0.1 of the new value. It starts with the first value. For the target ratio, the
    error is log (log ratio / log target) of the step. For rewards of 0 and 1 this is log tau minus its right value, so
    lr is the fraction of the error that a step corrects. At most a factor of 10 counts, so ratios up to 1, or inf, have
    finite errors.
    """

    tau: float  # current temperature; from minimum to maximum
    lr: float  # change of log tau per nat
    minimum: float  # least tau; above 0
    maximum: float  # largest tau
    measure: str  # metric to keep at the target, a mean over groups
    target: float  # target of the measure
    warmup_steps: int = 0  # number of first steps that only measure
    _mean: float | None = field(default=None, init=False)
    _updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of its range."""
        if not 0 < self.minimum <= self.tau <= self.maximum < math.inf:
            values = f"minimum is {self.minimum}, tau {self.tau}, maximum {self.maximum}"
            raise ValueError(f"0 < minimum <= tau <= maximum must hold; {values}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, not {self.lr}")
        if not _LEAST_TARGETS[self.measure] < self.target < math.inf:
            limit = _LEAST_TARGETS[self.measure]
            raise ValueError(f"target of {self.measure} must be above {limit}, not {self.target}")

    def update(self, value: float) -> None:
        """Adjust tau to the ``value`` of the measure in a step. Ignore NaN; only measure during the warm-up."""
        if math.isnan(value):
            return
        if self.measure == "target_ratio":  # the error is by how many nats log tau is too low
            excess = math.log(max(value, 1.0)) / math.log(self.target)
            error = math.log(min(_LARGEST_ERROR, max(1 / _LARGEST_ERROR, excess)))
        else:
            self._mean = value if self._mean is None else EMA_DECAY * self._mean + (1 - EMA_DECAY) * value
            is_exponential = self.measure == "eff_rollouts"
            error = math.log(self.target / self._mean) if is_exponential else self.target - self._mean
        self._updates += 1
        if self._updates > self.warmup_steps:
            self.tau = min(self.maximum, max(self.minimum, self.tau * math.exp(min(self.lr * error, _MOST_NATS))))

    def state_dict(self) -> dict[str, float | int | None]:
        """Return tau, the moving mean and the number of updates for a checkpoint."""
        return {"tau": self.tau, "mean": self._mean, "updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore tau, the moving mean and the number of updates from a result of ``state_dict``."""
        self.tau, self._mean, self._updates = float(state["tau"]), state["mean"], int(state["updates"])
