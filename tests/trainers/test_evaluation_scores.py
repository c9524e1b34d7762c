"""pass@k, mean@k, best@k and majority@k of an evaluation, on one process and on two."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rank_processes import run_ranks

from grpo_recipes.evaluate.scores import label_answers
from grpo_recipes.runs.rundir import read_rows

from .judged_sets import evaluate, half_length, pure_accuracy_math

# For each prompt, the scored completions of TABLE in order: correct or not, and the answer.
SCORED = (
    ((1, "7"), (0, "1"), (0, "1"), (1, "7"), (0, None), (0, "2")),
    ((0, "3"), (1, "8"), (0, "3"), (1, "8")),
    ((1, "9"), (1, "9"), (0, None), (0, None), (1, "9"), (0, "4")),
)
MAJORITIES = {1: [1, 0, 1], 2: [1, 0, 1], 4: [1, 0, 1], 5: [1, 1], 6: [1, 1]}


def by_two_processes(folder: Path) -> dict[str, Any]:
    run_ranks("trainers.judged_sets", str(folder))
    first, second = (json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert {name: value for name, value in first.items() if "@" in name} == {
        name: value for name, value in second.items() if "@" in name
    }
    return dict(first)


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_has_the_scores_of_its_completions(tmp_path: Path, processes: int) -> None:
    metrics = evaluate(tmp_path) if processes == 1 else by_two_processes(tmp_path)

    expected: dict[str, float] = {}
    for k in (1, 2, 4, 5, 6):
        rewards = [[reward for reward, _ in row] for row in SCORED if len(row) >= k]
        drawn = [fmean(map(max, combinations(row, k))) for row in rewards]
        expected |= {f"eval_pass@{k}": fmean(drawn), f"eval_best@{k}": fmean(drawn)}
        expected |= {f"eval_mean@{k}": fmean(fmean(row[:k]) for row in rewards)}
        expected |= {f"eval_majority@{k}": fmean(MAJORITIES[k])}
    scores = {name: value for name, value in metrics.items() if "@" in name}
    assert scores == pytest.approx(expected) and len(set(expected.values())) > 6

    (row,) = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert {name: value for name, value in row.items() if "@" in name and not name.endswith("_ci")} == scores
    for name in expected:
        low, high = row[f"{name}_ci"]
        assert low <= row[name] <= high
    assert "eval_pass@1" in read_rows(tmp_path / "eval.jsonl")[0]


def test_without_an_accuracy_reward_a_sum_of_1_is_right(tmp_path: Path) -> None:
    metrics = evaluate(tmp_path, (half_length,))

    # The lengths of the completions over 2. Two completions have no verdict.
    first, third = [18, 18, 18, 20, 1, 9], [18, 18, 0, 17, 18, 18]
    assert metrics["eval_mean@1"] == pytest.approx(9)
    assert metrics["eval_mean@6"] == pytest.approx((sum(first) / 12 + sum(third) / 12) / 2)
    assert metrics["eval_best@6"] == pytest.approx((10 + 9) / 2)
    assert metrics["eval_pass@1"] == pytest.approx((5 / 6 + 1 + 5 / 6) / 3)  # "7" and "" sum to less than 1
    assert "eval_majority@1" in metrics


def test_the_weight_of_another_reward_changes_no_verdict(tmp_path: Path) -> None:
    metrics = evaluate(tmp_path, (pure_accuracy_math, half_length), reward_weights=[0.0, 1.0])
    assert metrics["eval_pass@1"] == pytest.approx((2 / 6 + 2 / 4 + 3 / 6) / 3)
    assert metrics["eval_best@6"] == pytest.approx(9.5)


def test_no_k_is_above_the_completions_of_a_prompt(tmp_path: Path) -> None:
    metrics = evaluate(tmp_path, num_generations_eval=3, per_device_eval_batch_size=3)
    assert {name for name in metrics if name.startswith("eval_pass@")} == {f"eval_pass@{k}" for k in (1, 2, 3)}
    assert all(math.isfinite(value) for name, value in metrics.items() if "@" in name)


def test_equal_answers_have_one_label() -> None:
    answers = ["1/2", None, "0.5", "2, 3", "3", "3 and 2", "$0.50$"]
    assert label_answers(answers) == [0, None, 0, 3, 4, 3, 0]
