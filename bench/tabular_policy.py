"""Policies that are tables, their steps and what is measured of them: the ground of ``tabular_maxent.py``."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from grpo_recipes.algorithms.maxent import (
    centred,
    incorrect_mass,
    listwise_q,
    policy_weights,
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
        tau: temperature of the weights; SEED's alpha.
        sampled: False is the expected update, that of an infinite group.
        per_token: log-probabilities are divided by the answers' lengths, in the weights and in the loss.
        again: other random numbers: how far equal arms differ.
    """

    objective: str
    tau: float = math.inf
    beta: float = 0.0
    utility: str = "advantage"
    per_token: bool = False
    lr: float = 1.0
    sampled: bool = True
    again: bool = False

    @property
    def name(self) -> str:
        """As the tables call it."""
        kind = " length_scaled" if self.utility == "length_scaled" else " per token" if self.per_token else ""
        parts = [self.objective + kind]
        if self.objective not in ("grpo", "dr_grpo"):
            parts.append(f"{'alpha' if self.objective == 'seed' else 'tau'} {self.tau:g}")
        parts += [f"beta {self.beta:g}"] if self.beta else []
        parts += [f"lr {self.lr:g}"] if self.lr != 1 else []
        parts += ["expected"] if not self.sampled else []
        return ", ".join([*parts, *(["again"] if self.again else [])])


@dataclass(frozen=True)
class Task:
    """Prompts and their answers.

    Attributes:
        right_PK: which answers are right.
        start_PK: log-probabilities of the policy before training, which is the reference as well.
        lengths_PK: tokens of an answer, 4 to LONGEST, whether right or wrong.
    """

    right_PK: torch.Tensor
    start_PK: torch.Tensor
    lengths_PK: torch.Tensor

    def repeated(self, runs: int) -> Task:
        """The same prompts for several runs side by side."""
        return Task(*(values.repeat(runs, 1) for values in (self.right_PK, self.start_PK, self.lengths_PK)))


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
    rewards_PG, group_size = groups.rewards_PG, groups.rewards_PG.shape[1]
    advantages_PG = centred(rewards_PG)
    if arm.objective == "grpo":
        return advantages_PG / (rewards_PG.std(1, keepdim=True) + 1e-4), None
    if arm.objective == "dr_grpo":
        return advantages_PG, None
    if arm.objective == "seed":
        keys = [[str(answer) for answer in row] for row in groups.answers_PG.tolist()]
        scale_P, _ = semantic_entropy_scale(groups.logps_PG / groups.lengths_PG, keys, arm.tau)
        return scale_P[:, None] * advantages_PG, None
    if arm.objective in ("listwise", "weighted_mle"):
        q_PG = listwise_q(rewards_PG, 1.0, EPSILON)
        tokens_PG = groups.lengths_PG if arm.per_token else torch.ones_like(groups.lengths_PG)
        weights_PG = target_weights(q_PG, groups.ref_logps_PG / tokens_PG, arm.tau, arm.beta)
        own_PG = policy_weights(groups.logps_PG / tokens_PG, ~rewards_PG.isnan())
        gaps_PG = weights_PG - own_PG if arm.objective == "listwise" else weights_PG
        return group_size * gaps_PG / tokens_PG, weights_PG
    tau: float | torch.Tensor = arm.tau
    if arm.objective == "adaptive":
        tau = mode_adaptive_tau(arm.tau, _distinct_right(groups))[:, None]
    lengths_PG = groups.lengths_PG / LONGEST if arm.utility == "length_scaled" else 1.0
    weights_PG = tempered_weights(advantages_PG * lengths_PG, tau)
    return group_size * weights_PG * advantages_PG, weights_PG


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


def sampled_step(arm: Arm, logits_PK: torch.Tensor, task: Task, draws_PG: torch.Tensor) -> Step:
    """Gradient of the mean of advantage times log-probability over one group per prompt."""
    logps_PK = logits_PK.log_softmax(1)
    answers_PG = torch.searchsorted(logps_PK.exp().cumsum(1), draws_PG).clamp(max=logits_PK.shape[1] - 1)
    groups = Groups(
        answers_PG,
        *(values.gather(1, answers_PG) for values in (task.right_PK.double(), logps_PK, task.start_PK)),
        task.lengths_PK.gather(1, answers_PG),
    )
    advantages_PG, weights_PG = weigh(arm, groups)
    shares_PK = torch.zeros_like(logps_PK).scatter_add(1, answers_PG, advantages_PG / answers_PG.shape[1])
    gradient_PK = shares_PK - logps_PK.exp() * shares_PK.sum(1, keepdim=True)
    if weights_PG is None:
        return Step(gradient_PK)
    wrong_P = incorrect_mass(weights_PG, groups.rewards_PG == 0)
    return Step(gradient_PK, float(wrong_P.mean()), float(weight_entropy(weights_PG).exp().mean()))


def expected_step(arm: Arm, logits_PK: torch.Tensor, task: Task) -> Step:
    """The same gradient for an infinite group: answer k makes up pi_k of it.

    A weight softmax(score) over such a group is the softmax of score + log pi over the answers, and the policy's own
    weights are ~ pi * pi.
    """
    logps_PK = logits_PK.log_softmax(1)
    policy_PK, rewards_PK = logps_PK.exp(), task.right_PK.double()
    advantages_PK = rewards_PK - (policy_PK * rewards_PK).sum(1, keepdim=True)
    if arm.objective in ("grpo", "dr_grpo"):
        variance_P1 = (policy_PK * advantages_PK.square()).sum(1, keepdim=True)
        shares_PK = policy_PK * advantages_PK / (variance_P1.sqrt() + 1e-4 if arm.objective == "grpo" else 1.0)
    elif arm.objective in ("listwise", "weighted_mle") and not arm.per_token:
        total = arm.tau + arm.beta
        shares_PK = tempered_weights(rewards_PK + arm.beta * task.start_PK + total * logps_PK, total)
        if arm.objective == "listwise":
            shares_PK = shares_PK - policy_weights(2 * logps_PK, torch.ones_like(task.right_PK))
    elif arm.objective == "tempered" and arm.utility == "advantage":
        shares_PK = tempered_weights(advantages_PK + arm.tau * logps_PK, arm.tau) * advantages_PK
    else:
        raise ValueError(f"{arm.name} has no expected update here")
    return Step(shares_PK - policy_PK * shares_PK.sum(1, keepdim=True))


def measure(logits_PK: torch.Tensor, task: Task) -> torch.Tensor:
    """(P, 5) the MEASURES, from the policy's probabilities."""
    rights_PK = logits_PK.softmax(1) * task.right_PK
    reward_P, count_P = rights_PK.sum(1), task.right_PK.sum(1)
    modes_P = weight_entropy(policy_weights(logits_PK, task.right_PK)).exp()
    found_P = (1 - (1 - rights_PK).pow(SAMPLES)).sum(1)
    pass_P = 1 - (1 - reward_P).clamp(min=0).pow(SAMPLES)
    return torch.stack([reward_P, pass_P, modes_P, modes_P / count_P, found_P / count_P], 1)


@dataclass(frozen=True)
class Training:
    """The runs of an arm: ``curves`` (steps + 1, runs, 5), and means over steps and groups."""

    curves: torch.Tensor
    wrong_mass: float | None
    eff_rollouts: float | None

    def matched(self) -> list[list[float] | None]:
        """For each run the MEASURES at the first step whose reward is MATCHED, and that step."""
        found: list[list[float] | None] = []
        for run in range(self.curves.shape[1]):
            steps = (self.curves[:, run, 0] >= MATCHED).nonzero()
            first = int(steps[0]) if len(steps) else None
            found.append(None if first is None else [*self.curves[first, run].tolist(), float(first)])
        return found


def train(arm: Arm, task: Task, seeds: Sequence[int], steps: int) -> Training:
    """All runs of an arm, side by side."""
    runs, prompts = len(seeds) if arm.sampled else 1, len(task.right_PK)
    generators = [torch.Generator().manual_seed(seed + (1000 if arm.again else 0)) for seed in seeds]
    wide = task.repeated(runs)
    logits_PK = wide.start_PK.clone()
    curves, taken = [measure(logits_PK, wide)], []
    for _ in range(steps):
        if arm.sampled:
            draws = [torch.rand(prompts, GROUP, generator=one, dtype=torch.float64) for one in generators]
            taken.append(sampled_step(arm, logits_PK, wide, torch.cat(draws)))
        else:
            taken.append(expected_step(arm, logits_PK, wide))
        logits_PK = logits_PK + arm.lr * taken[-1].gradient_PK
        curves.append(measure(logits_PK, wide))
    return Training(
        torch.stack(curves).view(steps + 1, runs, prompts, len(MEASURES)).mean(2),
        _mean(step.wrong_mass for step in taken),
        _mean(step.eff_rollouts for step in taken),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
