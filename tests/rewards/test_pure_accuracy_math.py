"""Exact match of the answer in the last answer tag."""

from __future__ import annotations

import pytest

from grpo_recipes.rewards.functions import pure_accuracy_math


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<answer>7</answer>", "7", 1.0),
        ("so it is <answer>7</answer> then", "7", 1.0),
        ("<answer>8</answer>", "7", 0.0),
        ("<answer>7</answer> no: <answer>8</answer>", "7", 0.0),
        ("<answer>8</answer> no: <answer>7</answer>", "7", 1.0),
        ("<answer> 7\n</answer>", "7", 1.0),
        ("<answer>\n7\n</answer>", " 7 ", 1.0),
        ("<answer>a\nb</answer>", "a\nb", 1.0),
        ("<answer>7.0</answer>", "7", 1.0),
        ("<answer>7.5</answer>", "7", 0.0),
        ("<answer>77</answer>", "7", 0.0),
        ("7", "7", 0.0),
        ("<answer>7", "7", 0.0),
        ("7</answer>", "7", 0.0),
        ("<ANSWER>7</ANSWER>", "7", 0.0),
        ("", "7", 0.0),
        ("<answer></answer>", "7", 0.0),
        ("<answer>7</answer>", 7, 1.0),
        ([{"role": "assistant", "content": "<answer>7</answer>"}], "7", 1.0),
        ([{"role": "assistant", "content": "<answer>7</answer>"}, {"role": "assistant", "content": "8"}], "7", 0.0),
        ([], "7", 0.0),
    ],
)
def test_the_last_answer_tag_is_compared_with_the_solution(completion, answer, reward):
    assert pure_accuracy_math([completion], answer=[answer], prompts=["ignored"]) == [reward]


def test_strict_matching_compares_the_text():
    completions = ["<answer> 7 </answer>", "<answer>7.0</answer>", r"<answer>\boxed{7}</answer>"]
    assert pure_accuracy_math(completions, ["7"] * 3, answer_matching="strict") == [1.0, 0.0, 0.0]
    assert pure_accuracy_math(completions, ["7"] * 3) == [1.0, 1.0, 1.0]


def test_every_completion_has_its_own_solution():
    completions = ["<answer>1</answer>", "<answer>2</answer>", "<answer>3</answer>"]
    assert pure_accuracy_math(completions, answer=["1", "1", "3"]) == [1.0, 0.0, 1.0]


def test_a_missing_solution_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError):
        pure_accuracy_math(["<answer>1</answer>", "<answer>1</answer>"], answer=["1"])
