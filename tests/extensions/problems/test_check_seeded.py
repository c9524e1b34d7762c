"""Output of `grpo check` and `grpo check-rewards` for a recipe with problems from seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden import compare_messages, golden_files

from grpo_recipes import cli
from grpo_recipes.fetch.assets import find_assets, list_assets
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check, notes

pytestmark = pytest.mark.usefixtures("beside_the_recipe")

SAT = {"dataset_name": "seeded:sat", "reward_funcs": ["satisfiability"]}
GRAPH = {"dataset_name": "seeded:graph_coloring", "reward_funcs": ["modebench"]}
STEPS = {"eval_strategy": "steps", "eval_steps": 5}
Read = Callable[..., Recipe]


@pytest.mark.parametrize("path", golden_files(__file__, "seeded"))
def test_a_wrong_recipe_is_told_and_the_right_one_passes(read: Read, path: Path) -> None:
    compare_messages(path, read)


def test_seeds_of_two_generators_are_never_shared(read: Read) -> None:
    keys = GRAPH | STEPS | {"eval_dataset_name": "seeded:countdown", "eval_problem_seed_start": 1000}
    assert check(read(**keys), {}) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"problem_seeds": 9}, "problem_seeds does nothing without a dataset seeded:..."),
        (STEPS | {"eval_problem_seeds": 9, "eval_dataset_name": "openai/gsm8k"},
         "eval_problem_seeds does nothing without a dataset seeded:..."),
        (SAT | {"eval_problem_seeds": 9}, "eval_problem_seeds does nothing without eval_strategy"),
        (SAT | {"problem_seeds": 9}, None),
        (SAT | STEPS | {"eval_problem_seeds": 9}, None),
        (GRAPH | {"modebench_hidden": 4}, None),
        (GRAPH | {"modebench_prompts": 4}, "modebench_prompts does nothing without the dataset or benchmark"),
        (GRAPH | {"modebench_numbers": 4}, "modebench_numbers does nothing without the dataset or benchmark"),
    ],
)  # fmt: skip
def test_keys_that_nothing_reads_are_told(read: Read, keys: dict[str, Any], message: str | None) -> None:
    told = [note for note in notes(read(**keys)) if "problem_seed" in note or "modebench_" in note]
    assert (not told) if message is None else (len(told) == 1 and message in told[0])


def test_nothing_is_fetched_and_other_seeds_are_other_data(read: Read) -> None:
    recipes = [read(**SAT, problem_seed_start=start) for start in (0, 0, 1)]
    assert [asset.id for asset in list_assets(recipes[0])] == ["Qwen/Qwen2.5-1.5B-Instruct"]
    marks = [{source.commit for source in find_assets(recipe, {}).present} for recipe in recipes]
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize(
    ("keys", "reward"),
    [("sat", "satisfiability"), ("arithmetic", "pure_accuracy_math"), ("sums", "pure_accuracy_math")],
)
def test_its_reward_tells_right_from_wrong(
    keys: str, reward: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\nreward_funcs: [{reward}]\nproblem_seeds: 40\n"
        f"dataset_name: seeded:{keys}\nprompts_per_step: 4\nnum_generations: 4\n"
    )
    assert cli.main(["check-rewards", str(recipe), "--rows", "30"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[0] == reward and cells[2:4] == ["1.000", "0"] and cells[5:] == ["0.000", "0", "0"]
    assert int(cells[1]) >= 60 and int(cells[4]) >= 60
