"""What the MaxEnt trainer can optimise, as far as a recipe is concerned. No torch: ``check`` and the trainer read it.

The mathematics is in ``algorithms.maxent``; docs/maxent.md has the table and the evidence for the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_OBJECTIVE = "tempered"

_OF_Q = frozenset({"maxent_q_temperature", "maxent_q_epsilon", "maxent_beta", "maxent_length_normalize_ref"})
_OF_POLICY = frozenset({"maxent_length_normalize_policy"})
# Read by every objective.
SHARED_KEYS = frozenset(
    {
        "maxent_objective", "maxent_tau", "maxent_target_weight_entropy", "maxent_target_eff_rollouts",
        "maxent_tau_lr", "maxent_tau_min", "maxent_tau_max", "maxent_tau_warmup_steps",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Objective:
    """One objective.

    Attributes:
        tau: default of ``maxent_tau``.
        own_keys: the maxent keys it reads beside ``SHARED_KEYS``.
        targets_q: whether its weights come from ``listwise_q`` and the reference, so that tau + beta must be positive.
    """

    tau: float
    own_keys: frozenset[str]
    targets_q: bool

    @property
    def keys(self) -> frozenset[str]:
        """Every maxent key it reads."""
        return SHARED_KEYS | self.own_keys

    def tau_or_default(self, given: float | None) -> float:
        """The temperature of a recipe that gives this ``maxent_tau``; None is a recipe without one."""
        return self.tau if given is None else given

    def loss_type(self, length_normalize_policy: bool) -> str:
        """TRL's ``loss_type``, which the objective fixes: ``grpo`` is a mean over tokens, ``dr_grpo`` a sum."""
        return "grpo" if self.targets_q and length_normalize_policy else "dr_grpo"


# TRL's `scale_rewards` under every objective: weights come from rewards as they are.
SCALE_REWARDS = "none"

# DEFAULT_OBJECTIVE and every tau are what `bench/multi_answer.py --tuning` picked, with rewards of 0 and 1: the most
# distinct right answers at a mean reward at most 0.02 below GRPO's. listwise kept by far the most answers but met that
# condition nowhere; its tau is the one with the highest mean reward.
OBJECTIVES: dict[str, Objective] = {
    "listwise": Objective(tau=0.2, own_keys=_OF_Q | _OF_POLICY, targets_q=True),
    "weighted_mle": Objective(tau=0.05, own_keys=_OF_Q | _OF_POLICY, targets_q=True),
    "tempered": Objective(tau=0.05, own_keys=frozenset({"maxent_utility"}), targets_q=False),
}
