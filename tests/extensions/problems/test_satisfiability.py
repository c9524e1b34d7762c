"""The reward for assignments: accepted formats, correct and wrong assignments, and unreadable answers."""

from __future__ import annotations

import pytest

from grpo_recipes.extensions.problems.rewards import satisfiability

CLAUSES = "[[1, -2], [2, 3]]"


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>x1=true, x2=true, x3=false</answer>", 1.0),
        ("<answer>x1=false, x2=false, x3=true</answer>", 1.0),
        ("<answer>x1=false, x2=true, x3=true</answer>", 0.0),
        ("<answer>x1=false, x2=true, x3=true</answer> no: <answer>x1=1, x2=1, x3=0</answer>", 1.0),
        ("x1=true, x2=true, x3=false", 0.0),  # outside of the tag
        ("<answer>true</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("", 0.0),
    ],
)
def test_scores(completion: str, score: float) -> None:
    chat = [{"role": "assistant", "content": completion}]
    assert satisfiability([completion, chat], clauses=[CLAUSES] * 2, answer=["x1=false"] * 2) == [score, score]


@pytest.mark.parametrize("clauses", [None, "", "x", "[]"])
def test_a_row_without_clauses_is_unscored(clauses: str | None) -> None:
    right = "<answer>x1=true, x2=true, x3=false</answer>"
    assert satisfiability([right, right], clauses=[clauses, CLAUSES]) == [None, 1.0]
