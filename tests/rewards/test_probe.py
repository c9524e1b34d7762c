"""Correct and wrong completions for a reference solution, and the problems a reward shows with them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.rewards.answers import is_same_answer
from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.rewards.probe import find_problems, make_wrong_answers, probe_reward

REPOSITORY = Path(__file__).parents[2]
ROWS = [
    {"prompt": [{"role": "user", "content": f"{a}+{a}="}], "answer": str(2 * a), "difficulty": a} for a in range(1, 9)
]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("18", ["19", "181", "7", ""]),
        ("9", ["0", "91", "7", ""]),
        ("1,000", ["1,001", "1,0001", "7", ""]),
        ("x^2+1", ["x^2+2", "x^2+11", "7", ""]),
        (r"\frac{1}{2}", [r"\frac{1}{3}", r"\frac{1}{21}", "7", ""]),
        ("yes", ["yes1", "7", ""]),
        ("7", ["8", "71", ""]),
        (r"\frac{0}{5}", ["7", ""]),
    ],
)
def test_wrong_answers_near_a_right_one(answer, wrong):
    assert make_wrong_answers(answer, [answer, "7"]) == wrong
    assert not any(is_same_answer(text, answer) for text in wrong)


def test_a_reward_that_judges_well_has_no_fault():
    finding = probe_reward("pure_accuracy_math", pure_accuracy_math, ROWS)

    assert finding.faults == [] and finding.failures == []
    assert (finding.right, finding.wrong) == (16, 64)
    assert (finding.right_mean, finding.wrong_mean, finding.missed, finding.taken) == (1.0, 0.0, 0, 0)
    assert finding.distinguishes


def test_with_strict_matching_the_bare_solution_alone_is_right():
    def strict(completions, answer, **_):
        return pure_accuracy_math(completions, answer, answer_matching="strict")

    assert probe_reward("pure_accuracy_math", strict, ROWS, strict=True).faults == []
    assert probe_reward("pure_accuracy_math", strict, ROWS).missed == len(ROWS)


def test_right_answers_without_their_1_are_a_fault():
    finding = probe_reward("pure_accuracy_math", lambda completions, **_: [0.0] * len(completions), ROWS)

    assert [problem for problem, _ in finding.faults] == ["does not give 1 to 16 of 16 right answers"]
    assert not finding.distinguishes
    first = finding.failures[0]
    assert (first.prompt, first.answer, first.completion, first.value) == ("1+1=", "2", "<answer>2</answer>", 0.0)
    assert len(finding.failures) == 5


def test_wrong_answers_with_a_1_are_a_fault():
    finding = probe_reward("math_verify", lambda completions, **_: [1.0] * len(completions), ROWS)

    assert [problem for problem, _ in finding.faults] == ["accepts 96 of 96 wrong answers as right"]
    assert finding.missed == 0 and not finding.failures[0].right


def test_cosine_length_must_prefer_right_answers():
    def upside_down(completions, answer, **_):
        return [1.0 - (score or 0.0) for score in pure_accuracy_math(completions, answer)]

    assert probe_reward("cosine_length", pure_accuracy_math, ROWS).faults == []
    assert probe_reward("cosine_length", upside_down, ROWS).taken == 64


def test_a_reward_gets_what_trl_gives_it():
    arguments: dict[str, Any] = {}

    def note(**columns):
        arguments.update(arguments or columns)  # the first completions; a second call tries the other completions
        return [float(difficulty) for difficulty in columns["difficulty"]]

    probe_reward("my.py:note", note, ROWS)

    assert set(arguments) == {"prompts", "completions", "completion_ids", "answer", "difficulty"}
    assert len({len(values) for values in arguments.values()}) == 1
    assert arguments["completions"][0] == [{"role": "assistant", "content": "2"}]
    assert arguments["prompts"][0] == ROWS[0]["prompt"]


def test_the_users_reward_is_shown_by_the_writing_it_reads():
    def boxed(completions, answer, **_):
        pairs = zip(completions, answer, strict=True)
        return [float(text[-1]["content"] == rf"\boxed{{{gold}}}") for text, gold in pairs]

    finding = probe_reward("my.py:boxed", boxed, ROWS)

    assert (finding.right_mean, finding.wrong_mean) == (1.0, 0.0)
    assert finding.distinguishes and finding.missed is None and finding.faults == []


def readme_reward() -> Any:
    """Return the reward function that README shows."""
    (code,) = re.findall(r"```python\n(def ends_with_answer.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    return namespace["ends_with_answer"]


def by_pattern(pattern: str) -> Any:
    """Return a reward for completions that match ``pattern``; SOLUTION is replaced with the reference solution."""

    def reward(completions, answer, **_):
        pairs = [
            (text[-1]["content"], pattern.replace("SOLUTION", re.escape(gold)))
            for text, gold in zip(completions, answer, strict=True)
        ]
        return [float(re.search(expression, text, re.DOTALL) is not None) for text, expression in pairs]

    return reward


def last_integer(completions, answer, **_):
    numbers = [re.findall(r"-?[0-9]+", text[-1]["content"]) for text in completions]
    return [float(integers[-1:] == [gold]) for integers, gold in zip(numbers, answer, strict=True)]


@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize(
    "reward",
    [
        readme_reward(),
        last_integer,
        by_pattern(r"^\s*SOLUTION\s*$"),
        by_pattern(r"#### SOLUTION$"),
        by_pattern(r"(?i)answer:\s*SOLUTION$"),
        by_pattern(r"^<think>.*</think>\s*<answer>\s*SOLUTION\s*</answer>$"),
    ],
    ids=["README", "last integer", "bare", "####", "Answer:", "think and answer"],
)
def test_rewards_that_read_usual_formats_tell_right_from_wrong(reward, rows, read):
    """R1: a reward that reads no tag and no box, such as README's sample, is accepted."""
    shown = [{**ROWS[0], "answer": str(11 + 7 * index)} for index in range(rows)]
    finding = probe_reward("my.py:reward", reward, shown)

    assert finding.distinguishes and finding.faults == []
    assert find_problems(read(reward_funcs=["math_verify"]), shown, [finding]) == []


def test_a_reward_that_reads_no_format_is_rejected_with_the_formats(read):
    """R1: the fix lists formats, and a reward that reads one of them is accepted (test above)."""
    finding = probe_reward("my.py:reward", by_pattern("<<SOLUTION>>"), ROWS)
    (problem,) = find_problems(read(reward_funcs=["math_verify"]), ROWS, [finding])

    assert "no reward distinguishes right from wrong answers" in problem.what
    assert problem.fix.endswith(
        r"one of these formats: 42, <answer>42</answer>, \boxed{42}, <answer>\boxed{42}</answer>, #### 42, Answer: 42, "
        "<think> reasoning </think> <answer> 42 </answer>"
    )


BOXED = r"Put the final answer into \boxed{}."


@pytest.mark.parametrize(
    ("system", "rewards", "told"),
    [
        (BOXED, ["pure_accuracy_math"], True),
        (BOXED, ["math_verify", "format_tags"], True),
        (BOXED, ["math_verify"], False),
        (BOXED + " Write it inside <answer> and </answer>.", ["pure_accuracy_math"], False),
        (None, ["pure_accuracy_math"], False),
        ("in the prompts", ["cosine_length"], True),
    ],
)
def test_a_prompt_that_asks_for_another_format_than_the_reward_reads_is_a_fault(read, system, rewards, told):
    rows = (
        [{**row, "prompt": [{"role": "user", "content": BOXED}]} for row in ROWS]
        if system == "in the prompts"
        else ROWS
    )
    problems = find_problems(read(reward_funcs=rewards, system_prompt=system), rows, [])
    assert len(problems) == told
    if told:
        assert rf"the prompt asks for \boxed{{}}, but reward '{rewards[-1]}' reads only <answer>" in problems[0].what
        assert "set reward_funcs: [math_verify], which reads both" in problems[0].fix


def test_too_few_scores_are_a_fault():
    def half(completions, **_):
        return [None if index % 2 else 1.0 for index in range(len(completions))]

    assert probe_reward("my.py:half", half, ROWS, most_missing=0.5).faults == []
    ((problem, _),) = probe_reward("my.py:half", half, ROWS, most_missing=0.4).faults
    assert problem.startswith("leaves 140 of 280 completions unscored (it returned None")


def test_one_value_that_is_no_number_is_a_fault():
    calls: list[int] = []

    def nan_once(completions, **_):
        calls.append(len(completions))
        return [math.nan if len(calls) == 1 else 1.0, *[1.0] * (len(completions) - 1)]

    finding = probe_reward("my.py:nan_once", nan_once, ROWS)

    assert finding.faults == [("leaves 1 of 280 completions unscored (not a number: nan)", "correct it")]
    assert finding.failures[0].reason == "not a number: nan"
