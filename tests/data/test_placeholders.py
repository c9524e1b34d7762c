"""The rows of a run on groups of Atropos' environments: nothing but as many as the sampler asks for."""

from __future__ import annotations

import pytest

from grpo_recipes.extensions.atropos.rollouts import AtroposRollouts
from grpo_recipes.recipe.configs import ScriptArguments


@pytest.mark.parametrize(("least", "rows"), [(1, 1024), (48, 1056), (5000, 5000)])
def test_an_epoch_is_of_whole_generations(least: int, rows: int) -> None:
    args = ScriptArguments(atropos_environment="arithmetic")
    prompts = AtroposRollouts.training_prompts(args, 0, least)
    assert len(prompts.dataset) == rows and rows % least == 0
    assert prompts.dataset[rows - 1]["prompt"] == [{"role": "user", "content": "arithmetic"}]
    assert str(prompts).startswith("groups of arithmetic")


def test_it_is_named_by_all_its_environments_or_by_where_they_are() -> None:
    mixture = {"environments": [{"id": "arithmetic"}, {"id": "own.py:Maze", "weight": 2.0}]}
    several = AtroposRollouts.training_prompts(ScriptArguments(atropos_mixture=mixture), 0, 1)
    assert several.title == "groups of arithmetic, own.py:Maze"
    elsewhere = AtroposRollouts.training_prompts(ScriptArguments(atropos_api_url="http://localhost:8000"), 0, 1)
    assert elsewhere.title == "groups of http://localhost:8000"
