"""The two rewards of generated problems: columns, thinking blocks, and the answers that `grpo check-rewards` tries."""

from __future__ import annotations

import inspect

import pytest

from grpo_recipes.extensions.problems.datasets import REWARDS
from grpo_recipes.recipe.extensions import load
from grpo_recipes.rewards.score import make_reward

COLUMNS = {
    "answer": ['{"task": "countdown", "numbers": [2, 3], "target": 5, "modes": 1}'],
    "clauses": ["[[1]]"],
    "completion_ids": [[1, 2, 3]],
    "prompts": ["?"],
    "trainer_state": None,
}
RIGHT = {"modebench": r"\boxed{2+3}", "satisfiability": "<answer>x1=true</answer>"}


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.name)
def test_a_reward_has_its_name_and_takes_whatever_columns_come(reward) -> None:
    function = make_reward(reward.name)
    assert function.__name__ == reward.name and function.__doc__
    kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds
    assert function([RIGHT[reward.name]], **COLUMNS) == [1.0]
    assert function([""], **COLUMNS) == [0.0]


@pytest.mark.parametrize("name", RIGHT)
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
def test_only_the_text_after_the_last_think_block_has_an_answer(name: str, completion: str, expected: float) -> None:
    wrong = RIGHT[name].replace("3", "4").replace("true", "false")
    assert make_reward(name)([completion.format(right=RIGHT[name], wrong=wrong)], **COLUMNS) == [expected]


@pytest.mark.parametrize(
    ("reward", "row", "other_row"),
    [
        (REWARDS[0], {"answer": COLUMNS["answer"][0]}, {"answer": "7"}),
        (REWARDS[1], {"answer": "x1=true, x2=true", "clauses": "[[1, 2]]"}, {"answer": "7", "clauses": None}),
    ],
    ids=["modebench", "satisfiability"],
)
def test_the_answers_to_try_are_right_and_wrong_and_other_rows_have_none(reward, row, other_row) -> None:
    right, wrong = load(reward.answers)(row)
    columns = {name: [value] for name, value in row.items()}
    for answers, score in ((right, 1.0), (wrong, 0.0)):
        for answer in answers:
            assert make_reward(reward.name)([reward.writings[0] % answer], **columns) == [score], answer
    assert load(reward.answers)(other_row) is None


@pytest.mark.parametrize("reward", REWARDS, ids=lambda reward: reward.name)
@pytest.mark.parametrize(
    "row", [{}, {"answer": "[1, 2]"}, {"clauses": "the tenant pays"}, {"answer": "yes", "clauses": "[[1, -60]]"}]
)
def test_rows_of_other_datasets_have_no_answers_to_try(reward, row: dict[str, str]) -> None:
    """Every dataset is asked, also one without solutions, or with so many variables that trying takes forever."""
    assert load(reward.answers)(row) is None


def test_a_problem_without_a_reference_has_answers_to_try() -> None:
    right, wrong = load("grpo_recipes.extensions.problems.rewards:satisfiability_answers")({"clauses": "[[1]]"})
    assert right == ["x1=true"] and wrong == ["x1=false", "", ""]
