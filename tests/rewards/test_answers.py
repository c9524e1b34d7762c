"""When two answers are the same, and that no input breaks the comparison."""

from __future__ import annotations

import inspect
import random
import sys
import time
from pathlib import Path

import pytest

from grpo_recipes.rewards.answers import (
    LONGEST_ANSWER,
    extract_last_answer,
    extract_last_boxed,
    get_completion_text,
    is_correct,
    is_same_answer,
    normalize,
)

SAME = [
    (" 18\n", "18"),
    (r"\boxed{18}", "18"),
    (r"\boxed{\boxed{18}}", "18"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    ("$18$", "18"),
    ("$$ 18 $$", "18"),
    (r"\(18\)", "18"),
    (r"\[ 18 \]", "18"),
    ("$18", "18"),
    (r"\$18", "18"),
    (r"$\$18$", "18"),
    ("18$", "18"),
    ("$18 dollars", "18 dollars"),
    ("€5", "5 euros"),
    ("18.0", "18"),
    ("18.00", "18"),
    ("18.", "18"),
    (".5", "0.5"),
    ("007", "7"),
    ("+5", "5"),
    ("-0", "0"),
    ("\u22125", "-5"),
    ("- 5", "-5"),
    ("-$5", "$-5"),
    ("1,000", "1000"),
    ("1,234,567.50", "1234567.5"),
    ("1{,}000", "1000"),
    (r"1\,000", "1000"),
    (r"10,\!000", "10000"),
    ("1/2", r"\frac{1}{2}"),
    (r"\dfrac12", "0.5"),
    (r"\tfrac{12}5", "12/5"),
    (r"\frac1{72}", "1/72"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("18/1", "18"),
    ("6/4", "3/2"),
    ("1 1/2", "1.5"),
    (r"1\frac{1}{2} cups", "3/2"),
    ("18 dollars", "18"),
    ("18 dollars per day", "18"),
    ("18 eggs.", "18"),
    ("18 %", "18"),
    (r"18\%", "18 percent"),
    ("5cm", "5 centimeters"),
    (r"5 \text{ cm}^2", "5 cm^2"),
    ("5 m²", "5 m^2"),
    (r"5\text{ miles}", "5 mi"),
    (r"18\text{eggs}", "18"),
    ("60 km/h", "60 kilometers per hour"),
    (r"90^\circ", "90 degrees"),
    (r"\boxed{5}\text{ dollars}", "5"),
    ("x=5", "5"),
    ("x = 5", "x=5"),
    (r"x=\boxed{5}", "5"),
    ("= 5", "5"),
    ("**18**", "18"),
    ("The final answer is $\\boxed{18}$.", "18"),
    ("Answer: 18", "18"),
    ("{5}", "5"),
    ("(1, 2)", r"\left(1,2\right)"),
    (r"\text{Evelyn}", "Evelyn"),
    ("x^2 + 1", "x^2+1"),
]

DIFFERENT = [
    ("3", "33"),
    ("12", "1,2"),
    ("1.2", "1,2"),
    ("100", "1,00"),
    ("10000", "1,0000"),
    ("1", "0,001"),
    ("12", "1 2"),
    ("5", "-5"),
    ("5", r"-\boxed{5}"),
    ("3", r"12\boxed{3}"),
    ("5", r"\boxed{3} \boxed{5}"),
    ("5", "--5"),
    ("18", "19"),
    ("18", "18.01"),
    ("1/3", "0.333333"),
    ("1/2", "1/2/3"),
    ("1", "1/0"),
    ("0.1", "10%"),
    ("18 dollars", "18 cents"),
    ("$18", "£18"),
    ("5 cm", "5 m"),
    ("5 cm", "5 cm^2"),
    ("x=5", "y=5"),
    ("5", "x<5"),
    ("5", "x>=5"),
    ("5", "5 million"),
    ("5", "$5 million"),
    ("2", "2 dozen"),
    ("5", "5 or more"),
    ("3", "3 or 4"),
    ("5", "5 below zero"),
    ("5", "5x"),
    ("2", "2 i"),
    ("5", "5 pi"),
    ("5", r"5\pi"),
    ("5", "5!"),
    ("5", "5^2"),
    ("5", "5²"),
    ("5", "5k"),
    ("5", "5e3"),
    ("5", "5:30"),
    ("5", "5-3"),
    ("5", r"\sqrt{5}"),
    ("232", "2**3**2"),
    ("2.5", "1 3/2"),
    ("3", "\u0663"),
    ("", ""),
    ("", "5"),
    ("(1, 2)", "(2, 1)"),
    ("A", "B"),
]


@pytest.mark.parametrize("text", ["{}, 5", "(5, {})", "[+ and 5]", "(+, 5)"])
def test_a_list_with_an_empty_item_equals_itself_alone(text):
    assert is_same_answer(text, text) and not is_same_answer(text, "5")


@pytest.mark.parametrize(("answer", "other"), SAME)
def test_ways_to_write_one_answer(answer, other):
    assert is_same_answer(answer, other) and is_same_answer(other, answer)


@pytest.mark.parametrize(("answer", "other"), DIFFERENT)
def test_answers_that_only_look_alike(answer, other):
    assert not is_same_answer(answer, other) and not is_same_answer(other, answer)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>7</answer>", "7"),
        ("<answer>7</answer> no, <answer>8</answer>", "8"),
        ("<answer>7</answer> and <answer>8", "7"),
        ("<answer>7 <answer>8</answer>", "8"),
        ("<answer>7</answer></answer>", "7"),
        ("</answer><answer>7", None),
        ("7</answer>", None),
        ("", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_answer_tag_counts(text, answer):
    assert extract_last_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{7}.", "7"),
        (r"\boxed{7}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7} \boxed{8}", "8"),
        (r"\boxed{7}, so again \boxed{7} and \boxed{7}", "7"),
        (r"$\boxed{7}$ or \(\boxed{\frac{1}{2}}\)", r"\boxed{7}$ or \(\boxed{\frac{1}{2}}"),
        (r"\boxed{5}. Now \boxed{6},\boxed{7}\text{ and }\boxed{8}.", r"\boxed{6},\boxed{7}\text{ and }\boxed{8}"),
        (r"\boxed{7}, \boxed{8", None),
        (r"\boxed{7" + "}" * 80 + r", \boxed{8}", "8"),
        (r"\boxed{7", None),
        ("7", None),
    ],
)
def test_the_last_box_counts(text, answer):
    assert extract_last_boxed(text) == answer


def test_the_examples_of_the_docs_hold():
    page = (Path(__file__).parents[2] / "docs/rewards.md").read_text()
    lines = page.split("spellings of one answer:")[1].split("```")[1].splitlines()[1:]
    assert len(lines) >= 12
    for line in lines:
        first, *spellings = (part.strip() for part in line.split("|"))
        for other in spellings:
            assert is_same_answer(other, first), (other, first)


def test_strict_matching_compares_text():
    assert is_correct("<answer> 18 </answer>", "18", "strict")
    assert not is_correct("<answer>18.0</answer>", "18", "strict")
    assert is_correct("<answer>18.0</answer>", "18", "normalized")
    assert not is_correct("<answer></answer>", "", "strict")


PIECES = [
    *"0123456789.,/-+$%{}()[]\\^_=*: \n<>¤°²\u0663\u2212é漢😀\x00",
    *(
        "\\boxed{",
        "\\frac{",
        "\\frac",
        "\\text{",
        "\\$",
        "\\(",
        "\\)",
        "\\!",
        "\\,",
        "\\circ",
        "1,000",
        "1/0",
        "dollars",
    ),
    *("<answer>", "</answer>", "answer:", "**", "x=", "million", "cm", "٣", "0" * 50),
    *(", ", ",100", " and ", "or", "; ", "\\{", "\\}", "\\pm", "[", "y = 2"),
]


@pytest.mark.slow
def test_random_answers_neither_raise_nor_equal_a_number_they_do_not_hold():
    draw = random.Random(7)
    for _ in range(20_000):
        text = "".join(draw.choice(PIECES) for _ in range(draw.randint(0, 25)))
        form = normalize(text)
        assert form == normalize(f" {text}\n")
        assert not is_same_answer(text, "918273645") and not is_same_answer(text, "918, 273645")
        assert form.value == "" or is_same_answer(text, text)
        extract_last_boxed(text)
        is_correct(f"<answer>{text}</answer>", text, "normalized")


def test_brackets_inside_brackets_need_little_of_the_stack():
    text = "(1," * 90 + "2" + ")" * 90
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        assert is_same_answer(text, text.replace(",", ", ")) and not is_same_answer(text, "2")
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    "text",
    [
        "<answer>" * 50_000,
        "</answer>" * 50_000,
        "<answer>" + "9" * 400_000 + "</answer>",
        r"\boxed{" * 50_000,
        r"\boxed{1}, " * 50_000,
        r"\boxed{" * 50_000 + r"1}, \boxed{2}",
        "<answer>" + "1, " * 166 + "</answer>",
        "<answer>" + "1 cm, 1," * 62 + "2</answer>",
        "<answer>" + "(1," * 160 + "</answer>",
        "<answer>" + "(" * 240 + "1,2" + ")" * 240 + "</answer>",
        "<answer>" + "(1," * 120 + "2" + ")" * 120 + "</answer>",
        "<answer>" + "1 and " * 80 + "</answer>",
        "<answer>" + ",100" * 120 + "</answer>",
        "<answer>" + r"\pm1," * 80 + "</answer>",
        "<answer>" + r"\boxed{" * 70 + "</answer>",
        "<answer>" + r"\text{a}" * 62 + "</answer>",
        "<answer>" + "1,111" * 100 + "x</answer>",
        "<answer>" + " " * 490 + "^</answer>",
        "<answer>" + "a " * 249 + "</answer>",
        "<answer>" + "$" * 500 + "</answer>",
        "<answer>" + "9" * LONGEST_ANSWER + "/" + "</answer>",
    ],
)
def test_no_answer_takes_long(text):
    start = time.process_time()
    is_correct(text, "18", "normalized")
    extract_last_boxed(text)
    assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("7", "7"),
        ("", ""),
        ([], ""),
        ([{"role": "assistant", "content": "7"}], "7"),
        ([{"role": "assistant", "content": "6"}, {"role": "assistant", "content": "7"}], "7"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant", "tool_calls": []}], ""),
    ],
)
def test_the_text_of_a_completion(completion, text):
    assert get_completion_text(completion) == text
