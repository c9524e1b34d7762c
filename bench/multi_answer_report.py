"""What ``multi_answer.py`` makes of its runs: means with t-intervals over runs, the tuned setting, a table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from multi_answer_task import METRICS

Runs = Sequence[dict[str, Any]]
PARTS = {"train": "equations trained on", "held_out": "equations held out"}
ALLOWED_LOSS = 0.02  # of mean@8, beside GRPO
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
T_QUANTILES = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448,
    2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484,
    2.0452, 2.0423,
)  # fmt: skip


def mean_and_interval(values: Sequence[float]) -> dict[str, Any]:
    """Mean over runs, its 95 % t-interval and the runs' standard deviation; one run has neither of these."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return {"mean": round(mean, 5), "ci": None, "sd": None, "runs": 1}
    sd = statistics.stdev(values)
    half = T_QUANTILES[min(len(values) - 1, len(T_QUANTILES)) - 1] * sd / math.sqrt(len(values))
    interval = [round(mean - half, 5), round(mean + half, 5)]
    return {"mean": round(mean, 5), "ci": interval, "sd": round(sd, 5), "runs": len(values)}


def summary(runs: Runs) -> dict[str, Any]:
    """Arm -> part -> metric -> ``mean_and_interval``, arms in the order in which they come."""
    return {
        arm: {
            part: {metric: mean_and_interval([run[part][metric] for run in of_arm]) for metric in METRICS}
            for part in PARTS
        }
        for arm, of_arm in by_arm(runs).items()
    }


def differences(runs: Runs, baseline: str) -> dict[str, Any]:
    """The same of each arm minus ``baseline``: paired by seed, between the means (Welch) where no seed is shared."""
    arms = by_arm(runs)
    base = {run["seed"]: run for run in arms[baseline]}
    result: dict[str, Any] = {}
    for arm, of_arm in arms.items():
        if arm == baseline:
            continue
        paired = [(run, base[run["seed"]]) for run in of_arm if run["seed"] in base]
        result[arm] = {"paired": bool(paired)}
        for part in PARTS:
            result[arm][part] = {
                metric: mean_and_interval([one[part][metric] - other[part][metric] for one, other in paired])
                if paired
                else unpaired([one[part][metric] for one in of_arm], [other[part][metric] for other in base.values()])
                for metric in METRICS
            }
    return result


def p_value(difference: dict[str, Any]) -> float | None:
    """Two-sided p of a paired difference, Student's t; None without a spread or where it is not paired."""
    if not difference.get("sd"):
        return None
    freedom = difference["runs"] - 1
    statistic = abs(difference["mean"]) / difference["sd"] * math.sqrt(difference["runs"])
    # The integral of the density up to the statistic; what is beyond it is the p-value. The sum is the midpoint rule.
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    parts = 20_000
    step = statistic / parts
    inside = math.fsum((1 + (step * (k + 0.5)) ** 2 / freedom) ** (-(freedom + 1) / 2) for k in range(parts))
    return max(0.0, 1 - 2 * scale * step * inside)


def clear(tables: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The differences that stay clear of 0 after Bonferroni's correction for all that are made.

    Args:
        tables: name -> what ``differences`` returned.
    """
    every = {
        f"{name}: {arm}, {part}, {metric}": table[arm][part][metric]
        for name, table in tables.items()
        for arm in table
        for part in PARTS
        for metric in METRICS
    }
    p_values = {name: p_value(one) for name, one in every.items()}
    level = 0.05 / len(every)
    return {
        "comparisons": len(every),
        "level": level,
        "clear_of_0": [name for name, p in p_values.items() if p is not None and p < level],
    }


def unpaired(values: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """Difference of two means with Welch's 95 % interval."""
    difference = math.fsum(values) / len(values) - math.fsum(others) / len(others)
    if min(len(values), len(others)) == 1:
        return {"mean": round(difference, 5), "ci": None}
    parts = [statistics.variance(sample) / len(sample) for sample in (values, others)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(sample) - 1) for part, sample in zip(parts, (values, others), strict=True) if part
    ) if sum(parts) else 1  # fmt: skip
    half = T_QUANTILES[min(int(freedom), len(T_QUANTILES)) - 1] * math.sqrt(sum(parts))
    return {"mean": round(difference, 5), "ci": [round(difference - half, 5), round(difference + half, 5)]}


def chosen(runs: Runs, baseline: str) -> dict[str, Any]:
    """The setting of each objective, and the objective, that the criterion of ``multi_answer.py`` picks.

    Args:
        runs: of the tuning, each with ``objective`` and ``tau``; the baseline's have None.
    """
    of_arm = {
        arm: {metric: math.fsum(run["train"][metric] for run in some) / len(some) for metric in METRICS}
        | {"objective": some[0]["objective"], "tau": some[0]["tau"]}
        for arm, some in by_arm(runs).items()
    }
    needed = of_arm[baseline]["mean@8"] - ALLOWED_LOSS

    def rank(one: dict[str, Any]) -> tuple[bool, float]:
        enough = one["mean@8"] >= needed
        return enough, one["coverage@8"] if enough else one["mean@8"]

    candidates = [one for one in of_arm.values() if one["objective"]]
    best = {
        objective: max((one for one in candidates if one["objective"] == objective), key=rank)
        for objective in dict.fromkeys(one["objective"] for one in candidates)
    }
    return {
        "mean@8 needed": round(needed, 5),
        "tau": {objective: one["tau"] for objective, one in best.items()},
        "objective": max(best, key=lambda objective: rank(best[objective])),
    }


def by_arm(runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """Runs of each arm."""
    arms: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        arms.setdefault(run["arm"], []).append(run)
    return arms


def table(result: dict[str, Any], part: str) -> str:
    """A Markdown table: guessers, the untrained model, then means over runs with half an interval."""
    metrics = list(METRICS)
    lines = ["| | " + " | ".join(metrics) + " |", "|---" * (len(metrics) + 1) + "|"]
    for name, scores in result["baselines"][part].items():
        lines.append(_line(name, [_number(scores.get(metric)) for metric in metrics]))
    for arm, scores in result["summary"].items():
        lines.append(_line(arm, [_with_interval(scores[part][metric]) for metric in metrics]))
    return "\n".join(lines)


def _line(name: str, cells: Iterable[str]) -> str:
    return f"| {name} | " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "\u2013" if value is None else f"{value:.3f}"


def _with_interval(one: dict[str, Any]) -> str:
    return _number(one["mean"]) + (f" \u00b1 {(one['ci'][1] - one['ci'][0]) / 2:.3f}" if one["ci"] else "")
