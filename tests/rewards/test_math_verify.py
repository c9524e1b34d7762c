"""Equality by sympy, one completion at a time."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from grpo_recipes.rewards.math_verify import math_verify


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"1/\sqrt{2}", r"\frac{\sqrt{2}}{2}"),
        ("x^2+2x+1", "(x+1)^2"),
        ("(0.5, 3)", "(1/2,3)"),
        (r"\{2,1\}", r"\{1,2\}"),
        (r"\frac{\pi}{3}", r"\dfrac{2\pi}{6}"),
        (r"2\sqrt{3}", r"\sqrt{12}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        ("18 dollars", "18"),
        (r"\text{yes}", "yes"),
    ],
)
def test_equal_expressions_are_right(answer, gold):
    completions = [f"<answer>{answer}</answer>", rf"<answer>\boxed{{{answer}}}</answer>", rf"so \boxed{{{answer}}}"]
    assert math_verify(completions, [gold] * 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\sqrt{3}", r"\sqrt{2}"),
        ("x^2+1", "(x+1)^2"),
        ("(3, 0.5)", "(1/2,3)"),
        ("0.333", "1/3"),
        ("18 cents", "18 dollars"),
        ("sey", "yes"),
        (r"\frac{", "18"),
        ("no idea!!", r"\sqrt{2}"),
        ("", r"\sqrt{2}"),
    ],
)
def test_other_answers_are_wrong(answer, gold):
    assert math_verify([f"<answer>{answer}</answer>"], [gold]) == [0.0]


def test_without_a_final_answer_a_completion_is_wrong():
    assert math_verify(["it is 18", r"\boxed{18", ""], ["18"] * 3) == [0.0, 0.0, 0.0]


def test_a_tag_counts_before_a_box():
    assert math_verify([r"<answer>17</answer> \boxed{18}"], ["18"]) == [0.0]


@pytest.mark.parametrize("gold", [r"\frac{", ""])
def test_a_reference_that_cannot_be_read_is_unscored(gold):
    assert math_verify(["<answer>18</answer>", "18", "<answer></answer>"], [gold] * 3) == [None] * 3


def test_it_judges_alike_outside_the_main_thread():
    scores: list[list[float | None]] = []
    completions = [r"<answer>1/\sqrt{2}</answer>", r"<answer>\sqrt{2}</answer>"]
    thread = threading.Thread(target=lambda: scores.append(math_verify(completions, [r"\frac{\sqrt{2}}{2}"] * 2)))
    thread.start()
    thread.join()

    assert scores == [[1.0, 0.0]]


def test_it_prints_nothing():
    code = r"""
from grpo_recipes.rewards.math_verify import math_verify
assert math_verify([r"<answer>1/\sqrt{2}</answer>"], [r"\frac{\sqrt{2}}{2}"]) == [1.0]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        (r"We have $6 \cdot 7 = 42$, hence the answer is $\boxed{42}$.", "42", "41"),
        (r"First $\boxed{7}$ of them, so that \[x = \frac12\] and $\boxed{\frac{1}{2}}$", "0.5", "7"),
        (r"\boxed{42}", "42", "41"),
    ],
)
def test_of_a_solution_in_words_the_last_box_counts(gold, right, wrong):
    for answer, score in ((right, 1.0), (wrong, 0.0)):
        assert math_verify([f"<answer>{answer}</answer>", rf"so \boxed{{{answer}}}"], [gold, gold]) == [score, score]
