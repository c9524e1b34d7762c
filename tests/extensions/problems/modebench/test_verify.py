r"""Correct and wrong completions: the position of the answer, and attacks that the verifier rejects."""

from __future__ import annotations

import json
import random
import time

import pytest

from grpo_recipes.extensions.problems.modebench.dataset import (
    TASKS,
    Settings,
    extract_answer,
    find_mode,
    list_right_answers,
    list_wrong_answers,
    make_rows,
    parse_problem,
)
from grpo_recipes.rewards.score import make_reward

SETTINGS = Settings(30, 30, 0, 2, 24, 3, None, 8, 5)
FOUR = Settings(30, 30, 0, 2, 24, 4, 8, 8, 5)
COUNTDOWN = json.dumps({"task": "countdown", "numbers": [2, 4, 8], "target": 6, "modes": 3})
GRAPH = json.dumps({"task": "graph_coloring", "edges": [[1, 2], [1, 3], [2, 3]], "partial": "1??", "modes": 2})
KEY = "2+8-4"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1}", "1"),
        (r"so \boxed{ 1 } is it", "1"),
        (r"\boxed{1} or \boxed{2}", "2"),
        (r"\boxed{1} or \boxed{2", "1"),
        (r"\boxed{\boxed{1}}", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{}", ""),
        (r"} { \boxed{1}", "1"),
        ("1", "1"),
        (" 1\n", "1"),
        ("answer is 1", "1"),
        ("The final answer is: 1", "1"),
        ("Answer: 1", "1"),
        ("= 1", "1"),
        ("1\n2", None),
        ("<answer>1</answer>", None),
        ("1" * 161, None),
        ("", ""),
    ],
)
def test_where_the_answer_is(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("2+8-4", True),
        ("8 - 4 + 2", True),
        ("(8-4)+2 = 6", True),
        ("6=8-4+2", True),
        (r"8-4 \div 2", True),
        ("8\N{MINUS SIGN}4\N{DIVISION SIGN}2", True),
        (r"(4+8)/2\times1", False),
        ("-4+8+2", True),
        ("8-4+2+0", False),
        ("8-2", False),
        ("8-4+2-2+2", False),
        ("2*4-8", False),
        ("88-4-2", False),
        ("6", False),
        ("6=6", False),
        ("2+4+8 = 8-4+2", False),
        ("8-4+2 = 2+8-4", False),
        ("8-4+2 = 6 = 6", False),
        ("8-4+2 = 7", False),
        ("2.0+8-4", False),
        ("02+8-4", False),
        ("8^2-4", False),
        ("8**2-4", False),
        (r"\frac{4}{2}+8", False),
        ("x=8-4+2", False),
        ("$8-4+2$", False),
        ("\uff18-4+2", False),
        ("", False),
    ],
)
def test_countdown(answer: str, right: bool) -> None:
    mode = find_mode(rf"\boxed{{{answer}}}", COUNTDOWN)
    assert (mode is not None) == right
    assert mode in (None, *list_right_answers(COUNTDOWN))


def test_one_idea_cannot_be_many_modes() -> None:
    writings = ["2+8-4", "8+2-4", "(2+8)-4", "2+(8-4)", "8-(4-2)", "2-(4-8)", "-4+2+8", "-(4-2-8)", "--2+8-4", "2--8-4"]
    assert {find_mode(rf"\boxed{{{text}}}", COUNTDOWN) for text in writings} == {KEY}


@pytest.mark.parametrize(("answer", "right"), [("23", True), ("132", True), ("22", False), ("2 3", False), ("", False)])
def test_graph_coloring(answer: str, right: bool) -> None:
    assert (find_mode(rf"\boxed{{{answer}}}", GRAPH) is not None) == right


def test_short_and_full_answers_are_one_mode() -> None:
    assert find_mode(r"\boxed{23}", GRAPH) == find_mode("123", GRAPH) == "123"


@pytest.mark.parametrize("settings", [SETTINGS, FOUR])
@pytest.mark.parametrize("task", TASKS)
def test_every_mode_of_every_problem_scores_1_and_wrong_answers_do_not(task: str, settings: Settings) -> None:
    reward = make_reward("modebench", None, None)
    for row in make_rows(task, "train", settings):
        right, wrong = list_right_answers(row["answer"]), list_wrong_answers(row["answer"])
        texts = [rf"\boxed{{{text}}}" for text in (*right, *wrong)]
        scores = reward(completions=texts, answer=[row["answer"]] * len(texts))
        assert scores == [1.0] * len(right) + [0.0] * len(wrong) and wrong
        assert len({find_mode(text, row["answer"]) for text in texts[: len(right)]}) == row["modes"]


def test_garbage_neither_passes_nor_hangs() -> None:
    rng = random.Random(0)
    pieces = [
        r"\boxed{",
        "}",
        "{",
        "(",
        ")",
        "-",
        "2",
        "4",
        "8",
        "**",
        "=",
        "6",
        " ",
        "9" * 50,
        "\\",
        "\n",
        "<",
        "+",
        "/",
    ]
    began = time.perf_counter()
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=30))
        for problem in (COUNTDOWN, GRAPH):
            assert find_mode(text, problem) in (None, *list_right_answers(problem), "123", "132")
    for text in (r"\boxed{" * 5000, r"\boxed{" + "(" * 5000 + "}", r"\boxed{" + "-" * 10**5 + "2}", "9" * 10**6):
        assert find_mode(text, COUNTDOWN) is None
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    "answer", ["", "7", "[]", "{}", '{"task": "countdown"}', '{"task": "sums", "modes": 1}', "null"]
)
def test_another_reference_solution_is_not_judged(answer: str) -> None:
    with pytest.raises(ValueError, match="not a problem of ModeBench"):
        parse_problem(answer)
    assert make_reward("modebench", None, None)(completions=["6"], answer=[answer]) == [None]
