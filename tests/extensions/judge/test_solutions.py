"""``llm_judge`` reads the column of solutions, unless its prompt does not show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.solutions import requires_solutions


@pytest.mark.parametrize(
    ("keys", "requires"),
    [
        ({}, True),
        ({"judge_prompt": "Grade {completion}"}, False),
        ({"judge_prompt": "Is {first} better than {second}?", "judge_mode": "pairwise"}, True),
    ],
)
def test_solutions_are_required_if_the_judge_sees_them(keys: dict[str, Any], requires: bool) -> None:
    args = ScriptArguments(reward_funcs=["llm_judge"], **keys)
    assert requires_solutions(args.__getattribute__, []) is requires


def test_a_missing_column_is_explained(read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text((json.dumps({"problem": "?", "gold": "1"}) + "\n") * 12)
    recipe = {
        "dataset_name": "rows.jsonl",
        "reward_funcs": ["llm_judge"],
        "judge_base_url": "http://localhost/v1",
        "judge_model": "x",
    }

    (problem,) = check(read(**recipe), {})

    assert "'rows.jsonl' has no column 'answer'" in problem.what and problem.fix == "write one of problem, gold"
    assert check(read(**recipe, dataset_solution_column="gold"), {}) == []
