"""Recipes without solutions: a column of solutions is needed only if a reward reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.solutions import reads_solutions, requires_solutions
from grpo_recipes.recipe.user_code import copy_source

MINE = """
import functools

def length(completions, **columns):
    return [float(len(c[-1]["content"])) for c in completions]

def by_kind(completions, kind, **columns):
    return [float(k in c[-1]["content"]) for c, k in zip(completions, kind)]

def right(completions, solution):
    return [float(s == c[-1]["content"]) for c, s in zip(completions, solution)]

def keyword(completions, *, answer):
    return right(completions, answer)

def subscript(completions, **columns):
    return right(completions, columns["gold"])

def optional(completions, solution=None, **columns):
    return length(completions) if solution is None else right(completions, solution)

def maybe(completions, **columns):
    return [float("answer" in columns)] * len(completions)

def passed_on(completions, **columns):
    return optional(completions, **columns)

@functools.cache
def decorated(completions, answer):
    return []
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


def write_rows(row: dict[str, Any]) -> None:
    Path("rows.jsonl").write_text((json.dumps(row) + "\n") * 12)


@pytest.mark.parametrize(
    ("name", "requires", "reads"),
    [
        ("length", False, False), ("by_kind", False, False), ("right", True, True), ("keyword", True, True),
        ("subscript", True, True), ("optional", False, True), ("maybe", False, True), ("passed_on", False, True),
        ("decorated", False, True),
    ],
)  # fmt: skip
def test_the_source_of_a_reward_shows_whether_it_reads_solutions(
    mine: Path, name: str, requires: bool, reads: bool
) -> None:
    args = ScriptArguments(reward_funcs=[f"{mine}:{name}", "format_tags"], eval_dataset_solution_column="info.gold")
    lookup = args.__getattribute__
    assert (requires_solutions(lookup, ["kind"]), reads_solutions(lookup)) == (requires, reads)


@pytest.mark.parametrize(
    ("rewards", "columns", "requires"),
    [
        (["math_verify"], ["solution"], True),
        (["format_tags", "repetition_penalty", "soft_overlong"], [], False),
        (["org/reward-model"], [], False),
    ],
)
def test_built_in_rewards_say_whether_they_read_solutions(
    rewards: list[str], columns: list[str], requires: bool
) -> None:
    args = ScriptArguments(reward_funcs=rewards)
    assert requires_solutions(args.__getattribute__, columns) is requires


def test_a_dataset_without_solutions_passes_if_no_reward_needs_them(read, mine) -> None:
    write_rows({"problem": "?", "kind": "a"})
    recipe = {
        "dataset_name": "rows.jsonl",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset_name": "rows.jsonl",
    }
    assert check(read(**recipe, reward_funcs=["mine.py:by_kind", "mine.py:optional", "format_tags"]), {}) == []
    write_rows({"problem": "?", "solution": "1"})  # TRL's rewards get this column as it is
    assert check(read(**recipe, reward_funcs=["mine.py:right"]), {}) == []


@pytest.mark.parametrize("name", ["mine.py:right", "mine.py:keyword", "pure_accuracy_math"])
def test_a_missing_column_that_a_reward_needs_is_explained(read, mine, name: str) -> None:
    write_rows({"problem": "?", "gold": "1"})
    recipe = {"dataset_name": "rows.jsonl", "reward_funcs": [name]}
    (problem,) = check(read(**recipe), {})
    assert "'rows.jsonl' has no column 'answer'" in problem.what and problem.fix == "write one of problem, gold"
    assert check(read(**recipe, dataset_solution_column="gold"), {}) == []


def test_a_column_that_the_recipe_names_must_exist(read, mine) -> None:
    write_rows({"problem": "?"})
    (problem,) = check(
        read(dataset_name="rows.jsonl", reward_funcs=["mine.py:length"], dataset_solution_column="gold"), {}
    )
    assert "has no column 'gold'" in problem.what


def test_an_entry_of_a_mixture_needs_solutions_too(read, mine) -> None:
    write_rows({"problem": "?", "kind": "a"})
    entries = {"datasets": [{"id": "rows.jsonl", "columns": ["problem", "answer", "kind"]}]}
    recipe = {"dataset_name": None, "dataset_mixture": entries}
    (problem,) = check(read(**recipe, reward_funcs=["mine.py:keyword"]), {})
    assert "has no column 'answer'" in problem.what
    assert check(read(**recipe, reward_funcs=["mine.py:by_kind"]), {}) == []


def test_a_run_decides_by_its_copy_of_the_reward(mine, tmp_path, monkeypatch) -> None:
    copy_source(f"{mine}:right", tmp_path / "rewards")
    (tmp_path / "run.json").write_text("{}")
    mine.write_text(MINE.replace("completions, solution)", "completions, **columns)"))
    args = ScriptArguments(reward_funcs=[f"{mine}:right"])
    assert not requires_solutions(args.__getattribute__, [])
    monkeypatch.setenv("GRPO_RUN_DIR", str(tmp_path))  # as in a training process
    assert requires_solutions(args.__getattribute__, [])
