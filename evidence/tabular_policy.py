"""Policies that are tables, their steps and what is measured of them: the ground of ``tabular_maxent.py``."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from grpo_recipes.algorithms.maxent import (
    incorrect_mass,
    listwise_q,
    policy_weights,
    subtract_group_mean,
    target_weights,
    tempered_weights,
    weight_entropy,
)

GROUP = 16
LONGEST = 16
EPSILON = 1e-6
SAMPLES = 8
LEAST_RIGHT, MOST_RIGHT = 0.01, 0.5  # share of the right answers before training, log-uniform over prompts
MATCHED = 0.7
MEASURES = {
    "reward": "probability of a right answer",
    "pass@8": "probability of at least one right answer among 8 samples",
    "modes": "effective number of right answers: exp(entropy) of the policy over the right ones",
    "modes_share": "modes / number of right answers",
    "coverage@8": "expected share of the right answers that 8 samples hold; pass@8 where only one of them, drawn "
    "evenly, is wanted",
}


@dataclass(frozen=True)
class Arm:
    """One way to weigh a group.

    Attributes:
        tau: temperature of the weights; SEED's alpha; what entropy is worth in the reward of ``soft_reward``.
        sampled: False is the expected update, that of an infinite group.
        per_token: the loss is a mean over an answer's tokens; log-probabilities in weights are divided by its length.
        again: other random numbers: how far equal arms differ.
        kappa: temperature of the policy's own distribution over summed log-probabilities in ``listwise``.
        spread: kappa is at least this many standard deviations of the group's summed log-probabilities.
        kl: coefficient of KL(policy || start), whose exact gradient is subtracted.
        entropy: coefficient of the policy's entropy, whose exact gradient is added.
    """

    objective: str
    tau: float = math.inf
    beta: float = 0.0
    utility: str = "advantage"
    per_token: bool = False
    lr: float = 1.0
    sampled: bool = True
    again: bool = False
    kappa: float = 1.0
    spread: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0

    @property
    def name(self) -> str:
        """As the tables call it."""
        kind = " length_scaled" if self.utility == "length_scaled" else " per token" if self.per_token else ""
        parts = [self.objective + kind]
        if self.objective not in ("grpo", "dr_grpo", "maxrl", "pass_at_k"):
            parts.append(f"{'alpha' if self.objective == 'seed' else 'tau'} {self.tau:g}")
        parts += [f"beta {self.beta:g}"] if self.beta else []
        parts += [f"kappa {self.kappa:g}"] if self.kappa != 1 else []
        parts += [f"spread {self.spread:g}"] if self.spread else []
        parts += [f"KL {self.kl:g}"] if self.kl else []
        parts += [f"entropy {self.entropy:g}"] if self.entropy else []
        parts += [f"lr {self.lr:g}"] if self.lr != 1 else []
        parts += ["expected"] if not self.sampled else []
        return ", ".join([*parts, *(["again"] if self.again else [])])


@dataclass(frozen=True)
class Task:
    """Prompts and their answers.

    Attributes:
        right_PK: which answers are right.
        start_PK: log-probabilities of the policy before training, which is the reference as well.
        lengths_PK: tokens of an answer, whether right or wrong.
        wordings: the ways to say any answer, as cumulative probability (W,) and log-probability (W,); None: one way.
    """

    right_PK: torch.Tensor
    start_PK: torch.Tensor
    lengths_PK: torch.Tensor
    wordings: tuple[torch.Tensor, torch.Tensor] | None = None

    def repeated(self, runs: int) -> Task:
        """The same prompts for several runs side by side."""
        wide = (values.repeat(runs, 1) for values in (self.right_PK, self.start_PK, self.lengths_PK))
        return Task(*wide, self.wordings)


@dataclass(frozen=True)
class Policy:
    """Log-probabilities of the answers, and their exp: computed once a step."""

    logps_PK: torch.Tensor
    chances_PK: torch.Tensor

    @classmethod
    def of(cls, logits_PK: torch.Tensor) -> Policy:
        """The softmax of the logits."""
        logps_PK = logits_PK.log_softmax(1)
        return cls(logps_PK, logps_PK.exp())


def make_task(prompts: int, answers: int = 100, right_ratio: float = 0.5) -> Task:
    """The task: 2 to 8 right answers a prompt, each ``right_ratio`` times as likely as the one before."""
    generator = torch.Generator().manual_seed(0)
    right_PK = torch.zeros(prompts, answers, dtype=torch.bool)
    start_PK = torch.zeros(prompts, answers, dtype=torch.float64)
    for prompt in range(prompts):
        order = torch.randperm(answers, generator=generator)
        count = int(torch.randint(2, 9, (1,), generator=generator))
        place = torch.rand(1, generator=generator, dtype=torch.float64)
        mass = LEAST_RIGHT * (MOST_RIGHT / LEAST_RIGHT) ** place
        right_PK[prompt, order[:count]] = True
        for members, share, ratio in ((order[:count], mass, right_ratio), (order[count:], 1 - mass, 1 - 5 / answers)):
            falling = ratio ** torch.arange(len(members), dtype=torch.float64)
            start_PK[prompt, members] = (share * falling / falling.sum()).log()
    lengths_PK = torch.randint(4, LONGEST + 1, (prompts, answers), generator=generator)
    return Task(right_PK, start_PK, lengths_PK)


@dataclass(frozen=True)
class Groups:
    """What the objectives see of a step: P groups of G answers."""

    answers_PG: torch.Tensor
    rewards_PG: torch.Tensor  # 1 or 0
    logps_PG: torch.Tensor
    ref_logps_PG: torch.Tensor
    lengths_PG: torch.Tensor


def weigh(arm: Arm, groups: Groups) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages (P, G) as the trainers make them, and weights (P, G) where the objective has some.

    Per token they are divided by the lengths, as the loss does it that is a mean over tokens.
    """
    advantages_PG, weights_PG = _whole_answers(arm, groups)
    return advantages_PG / groups.lengths_PG if arm.per_token else advantages_PG, weights_PG


def _whole_answers(arm: Arm, groups: Groups) -> tuple[torch.Tensor, torch.Tensor | None]:
    rewards_PG, group_size = groups.rewards_PG, groups.rewards_PG.shape[1]
    advantages_PG = subtract_group_mean(rewards_PG)
    if arm.objective == "grpo":
        return advantages_PG / (rewards_PG.std(1, keepdim=True) + 1e-4), None
    if arm.objective == "dr_grpo":
        return advantages_PG, None
    if arm.objective == "maxrl":
        return maxrl_advantages(rewards_PG), None
    if arm.objective == "pass_at_k":
        return pass_at_k_advantages(rewards_PG, SAMPLES), None
    if arm.objective == "soft_reward":
        return subtract_group_mean(rewards_PG - arm.tau * groups.logps_PG), None
    if arm.objective == "seed":
        keys = [[str(answer) for answer in row] for row in groups.answers_PG.tolist()]
        scale_P, _ = semantic_entropy_scale(groups.logps_PG / groups.lengths_PG, keys, arm.tau)
        return scale_P[:, None] * advantages_PG, None
    if arm.objective in ("listwise", "weighted_mle"):
        q_PG = listwise_q(rewards_PG, 1.0, EPSILON)
        tokens_PG = groups.lengths_PG if arm.per_token else torch.ones_like(groups.lengths_PG)
        weights_PG = target_weights(q_PG, groups.ref_logps_PG / tokens_PG, arm.tau, arm.beta)
        if arm.objective == "weighted_mle":
            return group_size * weights_PG, weights_PG
        kappa_PG = tokens_PG if arm.per_token else policy_temperature(groups.logps_PG, arm.kappa, arm.spread)
        own_PG = policy_weights(groups.logps_PG / kappa_PG, ~rewards_PG.isnan())
        return group_size * (weights_PG - own_PG), weights_PG
    tau: float | torch.Tensor = arm.tau
    if arm.objective == "adaptive":
        tau = mode_adaptive_tau(arm.tau, _distinct_right(groups))[:, None]
    lengths_PG = groups.lengths_PG / LONGEST if arm.utility == "length_scaled" else 1.0
    weights_PG = tempered_weights(advantages_PG * lengths_PG, tau)
    return group_size * weights_PG * advantages_PG, weights_PG


def maxrl_advantages(rewards_PG: torch.Tensor) -> torch.Tensor:
    """MaxRL's (https://arxiv.org/abs/2602.02710): G r / sum r - 1, and 0 where no answer has a reward."""
    mean_P1 = rewards_PG.mean(1, keepdim=True)
    return torch.where(mean_P1 > 0, rewards_PG / mean_P1 - 1, 0.0)


def pass_at_k_advantages(rewards_PG: torch.Tensor, k: int) -> torch.Tensor:
    """Those of pass@k training (https://arxiv.org/abs/2508.10751, the analytical derivation), for rewards of 0 and 1.

    A sample's reward is the mean over all sets of ``k`` in the group that it is in, each 1 where one of it is right;
    less the mean over all sets, and divided by their standard deviation.
    """
    size = rewards_PG.shape[1]
    wrong = [[math.comb(n, k) / math.comb(size, k), _wrong_sets(n, size, k)] for n in range(size + 1)]
    table_N2 = torch.tensor(wrong, dtype=rewards_PG.dtype)
    none_right_P1, with_wrong_P1 = table_N2[(size - rewards_PG.sum(1)).long()].split(1, dim=1)
    gain_PG = none_right_P1 - torch.where(rewards_PG > 0, 0.0, with_wrong_P1)
    deviation_P1 = (none_right_P1 * (1 - none_right_P1)).sqrt()
    return torch.where(deviation_P1 > 0, gain_PG / deviation_P1, 0.0)


def _wrong_sets(wrong: int, size: int, k: int) -> float:
    """Share of the sets of a wrong answer that have no right one."""
    return math.comb(wrong - 1, k - 1) / math.comb(size - 1, k - 1) if wrong else 0.0


def policy_temperature(logps_PG: torch.Tensor, least: float, spread: float) -> torch.Tensor:
    """Kappa (P, 1): ``least``, or ``spread`` standard deviations of the group's log-probabilities if that is more."""
    if not spread:
        return torch.full_like(logps_PG[:, :1], least)
    return (spread * logps_PG.std(1, keepdim=True)).clamp(min=least)


def _distinct_right(groups: Groups) -> torch.Tensor:
    """(P,) numbers of different right answers in each group."""
    different = int(groups.answers_PG.max()) + 1
    seen_PK = torch.zeros(len(groups.answers_PG), different, dtype=torch.float64)
    return seen_PK.scatter_reduce(1, groups.answers_PG, groups.rewards_PG, "amax").sum(1)


def mode_adaptive_tau(tau: float, distinct_correct_P: torch.Tensor) -> torch.Tensor:
    """A smaller tau where more distinct right answers are known: tau / log(1 + max(distinct, 1)).

    Args:
        tau: the temperature to adapt; at least 0.
        distinct_correct_P: (P,) number of distinct right answers in each group.

    Returns:
        (P,) temperatures; float64 for a count in whole numbers.

    Raises:
        ValueError: tau is below 0 or NaN.
    """
    if not tau >= 0:
        raise ValueError(f"tau must be at least 0, not {tau}")
    counts_P = distinct_correct_P if distinct_correct_P.is_floating_point() else distinct_correct_P.double()
    return tau / counts_P.clamp(min=1).log1p()


def semantic_entropy_scale(
    logps_PG: torch.Tensor, keys: Sequence[Sequence[str | None]], alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """SEED: smaller advantages where the policy's answers differ in meaning, 1 / (1 + alpha * H / log N).

    Args:
        logps_PG: (P, G) log-probabilities per token under the policy, in nats; NaN leaves a completion out.
        keys: P rows of G: completions with the same key mean the same, one without a key is alone.
        alpha: strength; at least 0.

    Returns:
        (P,) factors of the advantages, and (P,) entropies H of the meanings in nats. N counts the completions that are
        not left out; where N < 2 the factor is 1.

    Raises:
        ValueError: alpha is below 0, keys do not match logps_PG, or a log-probability is infinite.
    """
    if not 0 <= alpha < math.inf:
        raise ValueError(f"alpha must be at least 0 and finite, not {alpha}")
    if [len(row) for row in keys] != [logps_PG.shape[1]] * len(logps_PG):
        raise ValueError(f"keys must be {logps_PG.shape[0]} rows of {logps_PG.shape[1]}")
    if logps_PG.isinf().any():
        raise ValueError("log-probabilities must be finite, or NaN where a completion is left out")
    known_PG = ~logps_PG.isnan()
    clusters_PG = torch.tensor([_clusters(row) for row in keys], device=logps_PG.device)
    masses_PG = torch.zeros_like(logps_PG).scatter_add_(1, clusters_PG, policy_weights(logps_PG, known_PG))
    entropy_P = -torch.xlogy(masses_PG, masses_PG).sum(1)
    largest_P = known_PG.sum(1).clamp(min=1).to(entropy_P.dtype).log()
    share_P = torch.where(largest_P > 0, entropy_P / largest_P, 0.0)
    return 1 / (1 + alpha * share_P), entropy_P


def _clusters(keys: Sequence[str | None]) -> list[int]:
    """For each completion the place of the first with its key; its own place without a key."""
    return [place if key is None else keys.index(key) for place, key in enumerate(keys)]


@dataclass(frozen=True)
class Step:
    """One step: the gradient (P, K), and means over groups where the objective has weights."""

    gradient_PK: torch.Tensor
    wrong_mass: float | None = None
    eff_rollouts: float | None = None


def sampled_step(
    arm: Arm, policy: Policy, task: Task, draws_PG: torch.Tensor, word_draws_PG: torch.Tensor | None = None
) -> Step:
    """Gradient of the mean of advantage times log-probability over one group per prompt.

    The wording adds to the log-probability of a completion, and is not trained.
    """
    sums_PK = policy.chances_PK.cumsum(1)
    answers_PG = torch.searchsorted(sums_PK, draws_PG).clamp(max=sums_PK.shape[1] - 1)
    logps_PG, ref_logps_PG = policy.logps_PK.gather(1, answers_PG), task.start_PK.gather(1, answers_PG)
    if task.wordings is not None and word_draws_PG is not None:
        sums_W, logps_W = task.wordings
        words_PG = logps_W[torch.searchsorted(sums_W, word_draws_PG).clamp(max=len(sums_W) - 1)]
        logps_PG, ref_logps_PG = logps_PG + words_PG, ref_logps_PG + words_PG
    groups = Groups(
        answers_PG, task.right_PK.gather(1, answers_PG).double(), logps_PG, ref_logps_PG,
        task.lengths_PK.gather(1, answers_PG),
    )  # fmt: skip
    advantages_PG, weights_PG = weigh(arm, groups)
    shares_PK = torch.zeros_like(sums_PK).scatter_add_(1, answers_PG, advantages_PG / answers_PG.shape[1])
    gradient_PK = _on_logits(arm, policy, task, shares_PK)
    if weights_PG is None:
        return Step(gradient_PK)
    wrong_P = incorrect_mass(weights_PG, groups.rewards_PG == 0)
    return Step(gradient_PK, float(wrong_P.mean()), float(weight_entropy(weights_PG).exp().mean()))


def _on_logits(arm: Arm, policy: Policy, task: Task, shares_PK: torch.Tensor) -> torch.Tensor:
    """From the factor of each answer's log-probability to the gradient of its logit, with the terms of the loss."""
    if arm.kl or arm.entropy:
        terms_PK = arm.kl * (task.start_PK - policy.logps_PK) - arm.entropy * policy.logps_PK
        shares_PK = shares_PK + policy.chances_PK * terms_PK
    return shares_PK - policy.chances_PK * shares_PK.sum(1, keepdim=True)


def expected_step(arm: Arm, policy: Policy, task: Task) -> Step:
    """The same gradient for an infinite group: answer k makes up pi_k of it.

    A weight softmax(score) over such a group is the softmax of score + log pi over the answers, and the policy's own
    weights are ~ pi * pi^(1 / kappa).
    """
    logps_PK, policy_PK, rewards_PK = policy.logps_PK, policy.chances_PK, task.right_PK.double()
    advantages_PK = rewards_PK - (policy_PK * rewards_PK).sum(1, keepdim=True)
    if arm.objective in ("grpo", "dr_grpo"):
        variance_P1 = (policy_PK * advantages_PK.square()).sum(1, keepdim=True)
        shares_PK = policy_PK * advantages_PK / (variance_P1.sqrt() + 1e-4 if arm.objective == "grpo" else 1.0)
    elif arm.objective in ("listwise", "weighted_mle") and not arm.per_token and not arm.spread:
        total = arm.tau + arm.beta
        shares_PK = tempered_weights(rewards_PK + arm.beta * task.start_PK + total * logps_PK, total)
        if arm.objective == "listwise":
            own_PK = policy_weights((1 + 1 / arm.kappa) * logps_PK, torch.ones_like(task.right_PK))
            shares_PK = shares_PK - own_PK
    elif arm.objective == "tempered" and arm.utility == "advantage":
        shares_PK = tempered_weights(advantages_PK + arm.tau * logps_PK, arm.tau) * advantages_PK
    else:
        raise ValueError(f"{arm.name} has no expected update here")
    return Step(_on_logits(arm, policy, task, shares_PK))


def measure(policy: Policy, task: Task) -> torch.Tensor:
    """(P, 5) the MEASURES, from the policy's probabilities."""
    rights_PK = policy.chances_PK * task.right_PK
    reward_P, count_P = rights_PK.sum(1), task.right_PK.sum(1)
    modes_P = weight_entropy(policy_weights(policy.logps_PK, task.right_PK)).exp()
    found_P = (1 - (1 - rights_PK).pow(SAMPLES)).sum(1)
    pass_P = 1 - (1 - reward_P).clamp(min=0).pow(SAMPLES)
    return torch.stack([reward_P, pass_P, modes_P, modes_P / count_P, found_P / count_P], 1)


@dataclass(frozen=True)
class Training:
    """The runs of an arm, and means over steps and groups.

    Attributes:
        curve: (points, runs, 5) the MEASURES at each ``stride`` steps.
        final: (runs, 5) the MEASURES at the end.
        matched: for each run the MEASURES at the first step whose reward is MATCHED, and that step.
        policy: at the end, prompts of one run after those of another.
    """

    curve: torch.Tensor
    final: torch.Tensor
    matched: list[list[float] | None]
    policy: Policy
    wrong_mass: float | None
    eff_rollouts: float | None


def train(arm: Arm, task: Task, seeds: Sequence[int], steps: int, stride: int = 1) -> Training:
    """All runs of an arm, side by side. Only the reward is measured at each step."""
    runs, prompts = len(seeds) if arm.sampled else 1, len(task.right_PK)
    draws = [random_numbers(seed + (1000 if arm.again else 0), steps, prompts) for seed in seeds]
    words = None if task.wordings is None else [random_numbers(seed + 2000, steps, prompts) for seed in seeds]
    wide = task.repeated(runs)
    logits_PK = wide.start_PK
    curve, spreads = [], []
    matched: list[list[float] | None] = [None] * runs
    for step in range(steps + 1):
        policy = Policy.of(logits_PK)
        reward_R = (policy.chances_PK * wide.right_PK).sum(1).view(runs, prompts).mean(1).tolist()
        reached = [run for run in range(runs) if matched[run] is None and reward_R[run] >= MATCHED]
        if reached or step % stride == 0 or step == steps:
            measured = measure(policy, wide).view(runs, prompts, len(MEASURES)).mean(1)
            for run in reached:
                matched[run] = [*measured[run].tolist(), float(step)]
            curve += [measured] if step % stride == 0 else []
        if step == steps:
            break
        if arm.sampled:
            draws_PG, words_PG = (many and torch.cat([one[step] for one in many]) for many in (draws, words))
            taken = sampled_step(arm, policy, wide, draws_PG, words_PG)
        else:
            taken = expected_step(arm, policy, wide)
        logits_PK = logits_PK + arm.lr * taken.gradient_PK
        spreads.append((taken.wrong_mass, taken.eff_rollouts))
    means = [_mean(column) for column in zip(*spreads, strict=True)]
    return Training(torch.stack(curve), measured, matched, policy, *means)


@functools.lru_cache(maxsize=32)
def random_numbers(seed: int, steps: int, prompts: int) -> torch.Tensor:
    """(steps, P, G) numbers from 0 to 1: those of a seed are the same for each arm."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(steps, prompts, GROUP, generator=generator, dtype=torch.float64)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
