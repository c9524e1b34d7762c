"""Which completions of an evaluation are right."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_recipes.evaluate.scores import judge_completions, score_groups

ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("rewards", "right"),
    [
        ([0.3, 0.8, 0.0], [None, None, None]),
        ([0.2, 1.0, 0.0], [False, True, False]),
        ([0.0, 0.0, 0.0], [False, False, False]),
        ([-1.0, 0.0, 0.0], [False, False, False]),
        ([math.nan, 1.0, 0.0], [None, True, False]),
        ([math.nan, 0.5, 0.0], [None, None, None]),
    ],
)
def test_graded_rewards_below_one_tell_nothing_about_right_and_wrong(rewards, right):
    """M20: `grpo eval` printed pass@k 0 for rewards between 0 and 1."""
    assert judge_completions(torch.tensor(rewards)[:, None], ["own.py:graded"], ONE) == right
    assert judge_completions(torch.tensor([[0.5], [0.0]]), ["pure_accuracy_math"], ONE) == [False, False]


def test_scores_of_graded_rewards():
    """M20: the mean and the best reward are still scored."""
    scores = score_groups(torch.tensor([[0.3], [0.8]]), ["own.py:graded"], ONE, ["a", "b"], repeats=2)
    assert math.isnan(scores["pass@1"][0]) and math.isnan(scores["pass@2"][0])
    assert scores["mean@2"][0] == pytest.approx(0.55) and scores["best@2"][0] == pytest.approx(0.8)
