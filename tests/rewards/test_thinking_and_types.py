"""Finding the answer in a completion, and reference solutions in typed columns."""

from __future__ import annotations

import pytest

from grpo_recipes.evaluate.scores import extract_answer
from grpo_recipes.rewards.answers import extract_final_text
from grpo_recipes.rewards.functions import (
    cosine_length,
    format_tags,
    pure_accuracy_math,
)
from grpo_recipes.rewards.math_verify import math_verify


def score(reward, completion: str) -> float | None:
    """Return the score of a shipped reward for a completion with the correct answer, 7."""
    if reward is cosine_length:
        scores = cosine_length([completion], ["7"], [[0]], max_completion_length=10)
        return float(scores[0] == 1.0 - 0.5 / 2 * (1 - 0.9510565162951535))
    return reward([completion], answer=["7"])[0]


RIGHT = {
    pure_accuracy_math: "<answer>7</answer>",
    math_verify: "<answer>7</answer>",
    cosine_length: "<answer>7</answer>",
    format_tags: "<answer>7</answer>",
}


@pytest.mark.parametrize("reward", RIGHT, ids=lambda reward: reward.__name__)
@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("{right}", 1.0),
        ("<think>{wrong} or <answer>5</answer>?</think>{right}", 1.0),
        ("hm, {wrong} or <answer>5</answer>?</think>\n{right}", 1.0),
        ("<think>a</think> <think>b</think> {right}", 1.0),
        ("<think>{right}</think> done", 0.0),
        ("<think>{right}</think>", 0.0),
        ("<think>it is {right}", 0.0),
        ("{right}</think>", 0.0),
        ("<think>a</think><think>{right}", 0.0),
        ("<think>a</think>{right}<think>but", 0.0),
    ],
)
def test_only_the_text_after_the_last_think_block_has_an_answer(reward, completion, expected):
    """S4: for every shipped reward, an unclosed think block has no answer."""
    right = RIGHT[reward]
    text = completion.format(right=right, wrong=right.replace("7", "8"))
    assert score(reward, text) == expected


def test_an_evaluation_reads_the_same_answer():
    """S4: answers that are counted per group come from the text after the last think block too."""
    assert extract_answer("<think>\\boxed{7}</think>\\boxed{8}") == "8"
    assert extract_answer("<think>\\boxed{7}") is None
    assert extract_final_text([{"role": "assistant", "content": "a</think>b"}]) == "b"


@pytest.mark.parametrize("reward", [math_verify, pure_accuracy_math])
@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (True, ["true", "True", "TRUE", r"\text{True}"], ["false", "1", "yes"]),
        (False, ["false", "False"], ["true", "0", "no"]),
        (18, ["18", "18.0", "$18"], ["19"]),
        (18.0, ["18", "18.0"], ["1.8"]),
        (0.5, ["0.5", "1/2", ".5"], ["0.05"]),
        (1e16, ["10000000000000000", "1e16", "1e+16"], ["1e15"]),
        (2.5e-07, ["0.00000025", "2.5e-7"], ["2.5e7"]),
        (-3, ["-3", "\u22123"], ["3"]),
        ([1, 2], ["[1, 2]", "[1,2]"], ["[2, 1]"]),
        ("True", ["true", "True"], ["False"]),
    ],
)
def test_a_typed_solution_is_compared_by_value(reward, gold, right, wrong):
    """S5: a boolean or a number equals its JSON spelling and every other spelling of the same value."""
    for answers, expected in ((right, 1.0), (wrong, 0.0)):
        scores = reward([f"<answer>{answer}</answer>" for answer in answers], [gold] * len(answers))
        assert scores == [expected] * len(answers), answers
