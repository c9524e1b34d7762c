"""Compute pass@k, best@k, mean@k and majority@k of sampled completions with 95 % intervals. Pure.

pass@k is the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, eq. 1). Completions of the same problem are not
independent, so each problem is one sample for the interval: its standard error is the standard error of the mean over
problems (Miller 2024, arXiv 2411.00640, section 2.2).
"""

import math
import statistics
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

Z_95 = 1.959963984540054
Interval = tuple[float, float]
# 97.5 % points of Student's t for 1 to 30 degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Return the probability that at least one of ``k`` completions drawn without replacement is right.

    ``samples`` completions of the problem have a score, and ``right`` of them are right. Raise ValueError if there are
    fewer than ``k`` samples, or ``right`` is not possible.
    """
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {right} right among {samples} completions is not defined")
    if samples - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / number for number in range(samples - right + 1, samples + 1))


def best_at_k(rewards: Sequence[float], k: int) -> float:
    """Return the expected greatest reward among ``k`` completions drawn without replacement from these.

    In ascending order, the i-th reward is the greatest in C(i - 1, k - 1) of the C(n, k) draws. For rewards of 0 and 1,
    best@k equals pass@k. Raise ValueError unless 1 <= k <= the number of rewards.
    """
    if not 1 <= k <= len(rewards):
        raise ValueError(f"best@{k} of {len(rewards)} completions is not defined")
    draws = math.comb(len(rewards), k)
    ranked = enumerate(sorted(rewards))
    return math.fsum(reward * (math.comb(below, k - 1) / draws) for below, reward in ranked if below >= k - 1)


def majority_at_k(answers: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Return 1 if the most frequent answer of the first ``k`` completions is right, else 0.

    A completion without an answer (None) has no vote, and without votes the result is 0. Among equally frequent
    answers, the first counts. An answer is right if the first completion with this answer is right. Raise ValueError
    unless 1 <= k <= the number of answers.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"majority@{k} of {len(answers)} completions is not defined")
    votes = Counter(answer for answer in answers[:k] if answer is not None)
    if not votes:
        return 0.0
    winner = max(votes, key=votes.__getitem__)  # a Counter keeps the order of insertion, so ties go to the first answer
    return float(right[answers.index(winner)])


def t_interval_half_width(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of the mean, by Student's t; None for fewer than two values."""
    degrees = len(values) - 1
    if degrees < 1:
        return None
    # Beyond the table, the first terms of the expansion around the normal distribution are accurate to four digits.
    factor = _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else Z_95 + (Z_95**3 + Z_95) / (4 * degrees)
    return factor * statistics.stdev(values) / math.sqrt(degrees + 1)


def compare_ends(values: Sequence[float]) -> int:
    """Return 1 if the last tenth of a series (at least 3 values) is above the first tenth, -1 if it is below, or 0.

    0 means that the means differ by less than two standard errors, or that there are fewer than 6 values.
    """
    size = max(3, len(values) // 10)
    if len(values) < 2 * size:
        return 0
    first, last = values[:size], values[-size:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / size)
    change = (sum(last) - sum(first)) / size
    return 0 if abs(change) <= 2 * error else 1 if change > 0 else -1


def mean_with_interval(estimates: Sequence[float], most: float = 1.0) -> tuple[float, Interval]:
    """Return the mean of the problems' estimates (each between 0 and ``most``) with its 95 % interval.

    ``estimates`` must not be empty. If ``most`` is 1 and every estimate is 0 or 1, as with a single completion per
    problem, the interval is Wilson's. Otherwise it is Student's t interval over problems, cut to [0, most]. For a
    single problem, it is [0, most]. If all estimates are equal, their spread is no evidence: the interval then
    allows Wilson's share of unseen problems to have 0 or ``most``.
    """
    count = len(estimates)
    mean = math.fsum(estimates) / count
    if most == 1.0 and all(estimate in (0.0, 1.0) for estimate in estimates):
        return mean, wilson_interval(round(math.fsum(estimates)), count)
    if count == 1:
        return mean, (0.0, most)
    if min(estimates) == max(estimates):
        unseen = wilson_interval(0, count)[1]
        return mean, (mean * (1 - unseen), mean + (most - mean) * unseen)
    half = t_interval_half_width(estimates) or 0.0
    return mean, (max(0.0, mean - half), min(most, mean + half))


def wilson_interval(right: int, count: int) -> Interval:
    """Return Wilson's 95 % interval of right / count, valid at 0 and 1 and for few problems (AIME has 30).

    ``count`` must be above 0.
    """
    share, z2 = right / count, Z_95**2
    centre = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = Z_95 / (1 + z2 / count) * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def reported_ks(samples: int) -> list[int]:
    """Return the reported values of k for ``samples`` completions per problem: powers of two below it, and itself."""
    powers = [2**power for power in range(samples.bit_length()) if 2**power < samples]
    return [*powers, samples]


def evaluated_ks(samples: int) -> list[int]:
    """Return the values of k of an evaluation with ``samples`` completions per prompt: the reported values, and 5."""
    return sorted({*reported_ks(samples), *([5] if samples >= 5 else [])})


def scores_at_k(
    rewards: Sequence[Sequence[float | None]],
    right: Sequence[Sequence[bool | None]],
    answers: Sequence[Sequence[Hashable | None]],
    ks: Sequence[int] | None = None,
) -> dict[str, tuple[float, Interval | None]]:
    """Return ``pass@k``, ``mean@k``, ``best@k`` and ``majority@k`` of an evaluation, each with its 95 % interval.

    ``rewards``, ``right`` and ``answers`` are (problems, samples): the reward of a completion, whether it is right,
    and its answer. ``ks`` are at most the number of samples; by default ``evaluated_ks`` of it. Unscored
    completions (None as reward or in ``right``) are skipped, so "the first k" are the first k scored completions. A
    problem with fewer than k scored completions is left out. A score without problems is NaN and has no interval
    (None). ``mean@k`` and ``best@k`` of a single problem have none either. ``majority@k`` is left out if no
    completion has an answer.
    """
    scored = [[reward for reward in row if reward is not None] for row in rewards]
    judged = [
        [(answer, verdict) for answer, verdict in zip(*row, strict=True) if verdict is not None]
        for row in zip(answers, right, strict=True)
    ]
    has_answers = any(answer is not None for row in judged for answer, _ in row)
    scores: dict[str, tuple[float, Interval | None]] = {}
    for k in ks or evaluated_ks(max((len(row) for row in rewards), default=1)):
        counts = [(len(row), sum(verdict for _, verdict in row)) for row in judged]
        passed = [pass_at_k(samples, number, k) for samples, number in counts if samples >= k]
        scores[f"pass@{k}"] = mean_with_interval(passed) if passed else (math.nan, None)
        long_enough = [row for row in scored if len(row) >= k]
        scores[f"mean@{k}"] = _average_rewards([math.fsum(row[:k]) / k for row in long_enough])
        scores[f"best@{k}"] = _average_rewards([best_at_k(row, k) for row in long_enough])
        if has_answers:
            pairs = [row for row in judged if len(row) >= k]
            majorities = [
                majority_at_k([answer for answer, _ in row], [bool(verdict) for _, verdict in row], k) for row in pairs
            ]
            scores[f"majority@{k}"] = mean_with_interval(majorities) if majorities else (math.nan, None)
    return scores


def _average_rewards(estimates: Sequence[float]) -> tuple[float, Interval | None]:
    """Return the mean over problems with its Student's t interval, which is not cut since rewards have no limits.

    The mean is NaN without problems. The interval is None for fewer than two.
    """
    if not estimates:
        return math.nan, None
    mean, half = math.fsum(estimates) / len(estimates), t_interval_half_width(estimates)
    return mean, None if half is None else (mean - half, mean + half)


def pass_at_k_table(scores: Sequence[Sequence[float | None]]) -> dict[str, float | list[float] | None]:
    """Return ``pass@k`` and ``pass@k_ci`` of a benchmark for every reported k.

    ``scores`` is (problems, samples): 1 for a right completion, 0 for a wrong completion, None without a score.
    Completions without a score are skipped, and so are problems with fewer than k scores. A pass@k without problems is
    None.
    """
    table: dict[str, float | list[float] | None] = {}
    scored = [[score for score in row if score is not None] for row in scores]
    counts = [(len(row), sum(score >= 0.5 for score in row)) for row in scored]
    for k in reported_ks(max((len(row) for row in scores), default=1)):
        estimates = [pass_at_k(samples, right, k) for samples, right in counts if samples >= k]
        mean, interval = mean_with_interval(estimates) if estimates else (None, None)
        table[f"pass@{k}"] = None if mean is None else round(mean, 6)
        table[f"pass@{k}_ci"] = None if interval is None else [round(limit, 6) for limit in interval]
    return table


def score_names(result: Mapping[str, Any]) -> list[str]:
    """Return the names of the scores in a benchmark's result, e.g. ``pass@k`` or ``coverage@k``, without intervals."""
    return [key for key in result if "@" in key and not key.endswith("_ci")]


def format_result(result: Mapping[str, Any]) -> str:
    """Format a benchmark's result as ``pass@1 0.512 (0.468 to 0.556), pass@4 ..., 500 problems``.

    Baselines follow if there are any: ``; random pass@8 0.181, mean@8 ...``.
    """
    parts = []
    for key in score_names(result):
        low, high = result.get(f"{key}_ci") or (math.nan, math.nan)
        value = result[key]
        parts.append(f"{key} none" if value is None else f"{key} {value:.3f} ({low:.3f} to {high:.3f})")
    lines = [", ".join(parts), f"{result.get('problems', 'unknown')} problems"]
    for name, scores in result.get("baselines", {}).items():
        lines.append(f"{name} " + ", ".join(f"{key} {scores[key]:.3f}" for key in score_names(scores)))
    return "; ".join(lines)
