"""``code_tests`` reads the column of solutions, unless the dataset has a column of tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.solutions import requires_solutions


@pytest.mark.parametrize(("columns", "requires"), [([], True), (["verification_info"], False)])
def test_solutions_are_required_without_a_column_of_tests(columns: list[str], requires: bool) -> None:
    args = ScriptArguments(reward_funcs=["code_tests"])
    assert requires_solutions(args.__getattribute__, columns) is requires


def test_a_missing_column_is_explained(read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo_recipes.extensions.code.jail.find_jail_problem", lambda: None)
    Path("rows.jsonl").write_text((json.dumps({"problem": "?", "gold": "1"}) + "\n") * 12)
    recipe = {"dataset_name": "rows.jsonl", "reward_funcs": ["code_tests"]}

    (problem,) = check(read(**recipe), {})

    assert "'rows.jsonl' has no column 'answer'" in problem.what and problem.fix == "write one of problem, gold"
    assert check(read(**recipe, dataset_solution_column="gold"), {}) == []
