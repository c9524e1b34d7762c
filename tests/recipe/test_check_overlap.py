"""Environments and overlap_generation. The other rejections are files in ``tests/wrong_recipes``."""

from __future__ import annotations

from grpo_recipes.recipe.check import check


def test_prompts_of_environments_are_not_known_before(read) -> None:
    keys = {"dataset_name": None, "environment": "textarena:Game-v0", "reward_funcs": ["environment"]}
    messages = [problem.what for problem in check(read(**keys, overlap_generation=True), {})]
    assert any("overlap_generation samples completions of prompts ahead" in message for message in messages)
    assert not any("overlap_generation" in problem.what for problem in check(read(**keys), {}))
