"""mean@k, distinct@k and coverage@k of sampled completions, and how scores are summed up. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_recipes.stats import mean_with_interval

Scores = dict[str, Any]


def mode_scores(modes: Sequence[Sequence[str | None]], totals: Sequence[int]) -> Scores:
    """Return the scores beside ``pass@k``, each with ``_ci``, the 95 % interval over problems.

    ``mean@k`` is the right share of the k completions of a problem, ``distinct@k`` the number of different modes among
    them, ``coverage@k`` that number over the modes there are, at most 1. ``modes`` (problems, k) holds the mode of each
    completion, None where it is wrong, and ``totals`` (problems,) how many modes each problem has.
    """
    samples = max(len(row) for row in modes)
    distinct = [len({mode for mode in row if mode is not None}) for row in modes]
    return summed_up(
        {
            f"mean@{samples}": [sum(mode is not None for mode in row) / len(row) for row in modes],
            f"distinct@{samples}": [float(count) for count in distinct],
            f"coverage@{samples}": [min(1.0, count / total) for count, total in zip(distinct, totals, strict=True)],
        }
    )


def summed_up(estimates: Mapping[str, Sequence[float]]) -> Scores:
    """Return mean over problems and 95 % interval of each score.

    ``estimates`` has (problems,) values for each name; those of ``distinct@k`` are counts up to k, the others shares.
    """
    scores: Scores = {}
    for name, values in estimates.items():
        kind, _, samples = name.partition("@")
        mean, interval = mean_with_interval(values, float(samples) if kind == "distinct" else 1.0)
        scores[name] = round(mean, 6)
        scores[f"{name}_ci"] = [round(limit, 6) for limit in interval]
    return scores
