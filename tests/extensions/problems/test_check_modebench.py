"""Output of `grpo check` and `grpo check-rewards` for a ModeBench recipe."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from golden import compare_messages, golden_files

from grpo_recipes import cli
from grpo_recipes.fetch.assets import find_assets, list_assets
from grpo_recipes.paths import find_code_root
from grpo_recipes.recipe import Recipe, read_recipe
from grpo_recipes.recipe.check import check, notes
from grpo_recipes.recipe.keys import catalogue

pytestmark = pytest.mark.usefixtures("beside_the_recipe")

RIGHT = {"dataset_name": "modebench:countdown", "reward_funcs": ["modebench"]}
GRAPH = {"dataset_name": "modebench:graph_coloring", "reward_funcs": ["modebench"]}
Read = Callable[..., Recipe]


@pytest.mark.parametrize("path", golden_files(__file__, "modebench"))
def test_a_wrong_recipe_is_told_and_the_right_one_passes(read: Read, path: Path) -> None:
    compare_messages(path, read)


@pytest.mark.parametrize(
    ("keys", "condition"),
    [
        (RIGHT | {"modebench_hidden": 4}, "the dataset or benchmark modebench:graph_coloring"),
        (GRAPH | {"modebench_numbers": 4}, "the dataset or benchmark modebench:countdown"),
        ({"modebench_seed": 3}, "the dataset or benchmark modebench:countdown or modebench:graph_coloring"),
        (RIGHT | {"modebench_numbers": 4, "modebench_seed": 3}, None),
        (RIGHT | {"modebench_hidden": 4, "benchmarks": ["modebench:graph_coloring"]}, None),
    ],
)
def test_keys_that_nothing_reads_are_told(read: Read, keys: dict[str, Any], condition: str | None) -> None:
    told = [note for note in notes(read(**keys)) if "modebench_" in note]
    if condition is None:
        assert not told
    else:
        assert len(told) == 1 and told[0].endswith(f"does nothing without {condition}")


def test_nothing_is_fetched_and_a_change_of_a_key_is_a_change_of_the_data(read: Read) -> None:
    recipes = [read(**RIGHT, benchmarks=["modebench:countdown"], modebench_seed=seed) for seed in (0, 0, 1)]
    assert [asset.id for asset in list_assets(recipes[0])] == ["Qwen/Qwen2.5-1.5B-Instruct"]
    marks = [{source.commit for source in find_assets(recipe, {}).present} for recipe in recipes]
    assert marks[0] == marks[1] != marks[2]


@pytest.mark.parametrize("task", ["countdown", "graph_coloring"])
def test_its_reward_tells_right_from_wrong(task: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct\nreward_funcs: [modebench]\nmodebench_prompts: 40\n"
        f"dataset_name: modebench:{task}\nprompts_per_step: 4\nnum_generations: 4\n"
    )
    assert cli.main(["check-rewards", str(recipe), "--rows", "30"]) == 0
    cells = capsys.readouterr().out.splitlines()[1].split()
    assert cells[0] == "modebench" and cells[2:4] == ["1.000", "0"] and cells[5:] == ["0.000", "0", "0"]
    assert int(cells[1]) > 60 and int(cells[4]) >= 60


RECIPES = find_code_root() / "recipes/Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize("task", ["countdown", "graph_coloring"])
def test_the_shipped_recipes_are_one_experiment_on_every_number_of_gpus(task: str, planned: Any) -> None:
    grpo, maxent = (read_recipe(RECIPES / kind / f"config_modebench_{task}.yaml") for kind in ("grpo", "maxent"))
    assert check(grpo, {}) == check(maxent, {}) == []
    assert grpo["dataset_name"] == f"modebench:{task}" and grpo["benchmarks"] == [f"modebench:{task}"]
    differing = {key for key in catalogue() if grpo[key] != maxent[key]}
    assert differing <= {"maxent_objective", "maxent_policy_spread", "run_name"} and maxent.is_set("maxent_objective")
    arms = sorted(RECIPES.glob(f"*/config_modebench_{task}_*.yaml"))
    assert [path.stem.rpartition("_")[2] for path in arms] == ["entropy", "kl", "maxrl", "tempered"]
    for path in arms:
        arm = read_recipe(path)
        assert check(arm, {}) == [] and [note for note in notes(arm) if "maxent" in note] == []
        changed_keys = {key for key in catalogue() if arm[key] != grpo[key] and not key.startswith("maxent_")}
        assert changed_keys in ({"run_name", "entropy_coef"}, {"run_name", "beta"}, {"run_name"})
    batches = [planned(recipe=grpo, gpus=[str(gpu) for gpu in range(count)]).batch for count in (2, 4, 7, 8)]
    assert {(batch.completions, batch.tokens) for batch in batches} == {(672, 672 * 512)}
    assert [batch.world_size for batch in batches] == [1, 3, 6, 7]
