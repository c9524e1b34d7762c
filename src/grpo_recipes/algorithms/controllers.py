"""Controllers that hold a measure of the training at a target: the KL by beta, the spread of weights by tau."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

EMA_DECAY = 0.9
_MOST = 700.0  # nats; exp of more is no float


@dataclass
class KLController:
    """Adaptive coefficient of the KL penalty (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2).

    Each step multiplies beta by 1 + clip(kl / target - 1, +-step_size) * completions / horizon. The number of
    completions makes the horizon independent of the batch. A step counts for at most one horizon: beta stays positive.
    """

    beta: float  # the coefficient in force; above 0
    target: float  # KL to hold, in the unit of the KL that ``update`` is given (TRL's is nats per token); above 0
    horizon: float  # completions over which beta changes by a factor of 1 + step_size at most; above 0
    step_size: float  # largest relative error that one step corrects; above 0, below 1

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of its range."""
        for name in ("beta", "target", "horizon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, not {getattr(self, name)}")
        if not 0 < self.step_size < 1:
            raise ValueError(f"step_size must be above 0 and below 1, not {self.step_size}")

    def update(self, kl: float, completions: int) -> None:
        """Adjust beta to the KL of a step over this many completions of all processes. NaN is ignored."""
        if math.isnan(kl):
            return
        error = max(-self.step_size, min(self.step_size, kl / self.target - 1))
        self.beta *= 1 + error * min(completions / self.horizon, 1.0)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"beta": self.beta}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint."""
        self.beta = float(state["beta"])


@dataclass
class TauController:
    """Adaptive temperature of the weights: log tau rises by lr for each nat that the mean entropy is short of a target.

    The mean runs over the steps, 0.9 of the last one and 0.1 of the new value; it begins with the first value. A target
    in effective rollouts is compared in logarithms, so that both targets have the unit nats.
    """

    tau: float  # the temperature in force; within minimum and maximum
    lr: float  # change of log tau per nat
    minimum: float  # above 0
    maximum: float
    warmup_steps: int = 0  # first steps that only measure
    # Mean of a group to hold, of the weight entropy in nats or of the effective rollouts: exactly one is given.
    target_entropy: float | None = None
    target_eff_rollouts: float | None = None
    _mean: float | None = field(default=None, init=False)
    _updates: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raise ValueError for a value out of its range."""
        if (self.target_entropy is None) == (self.target_eff_rollouts is None):
            raise ValueError("give exactly one of target_entropy and target_eff_rollouts")
        if not 0 < self.minimum <= self.tau <= self.maximum < math.inf:
            found = f"minimum is {self.minimum}, tau {self.tau}, maximum {self.maximum}"
            raise ValueError(f"0 < minimum <= tau <= maximum must hold; {found}")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be above 0 and finite, not {self.lr}")
        for name, least in (("target_entropy", 0), ("target_eff_rollouts", 1)):
            if (target := getattr(self, name)) is not None and not target > least:
                raise ValueError(f"{name} must be above {least}, not {target}")

    def update(self, entropy: float, eff_rollouts: float) -> None:
        """Adjust tau to the mean weight entropy and effective rollouts of a step's groups. NaN is ignored."""
        value = entropy if self.target_eff_rollouts is None else eff_rollouts
        if math.isnan(value):
            return
        self._mean = value if self._mean is None else EMA_DECAY * self._mean + (1 - EMA_DECAY) * value
        self._updates += 1
        if self._updates <= self.warmup_steps:
            return
        goal, mean = self.target_entropy, self._mean
        if self.target_eff_rollouts is not None:
            goal, mean = math.log(self.target_eff_rollouts), math.log(mean)
        factor = math.exp(min(self.lr * (goal - mean), _MOST))
        self.tau = min(self.maximum, max(self.minimum, self.tau * factor))

    def state_dict(self) -> dict[str, float | int | None]:
        """Return the state for a checkpoint."""
        return {"tau": self.tau, "mean": self._mean, "updates": self._updates}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Continue from a checkpoint."""
        self.tau, self._mean, self._updates = float(state["tau"]), state["mean"], int(state["updates"])
