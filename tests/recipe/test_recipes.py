"""The recipes that are shipped: right, alike on every number of GPUs, and usable from a copy."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from grpo_recipes import cli
from grpo_recipes.extensions.environments.episode import play_turns
from grpo_recipes.extensions.environments.recipe import list_episode_environments
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.registry import OBJECTIVES

MODELS = {
    "Qwen2.5-0.5B-Instruct", "Qwen2.5-1.5B-Instruct", "Qwen2.5-3B-Instruct", "Qwen2.5-7B-Instruct", "Qwen3-0.6B",
    "Qwen3-4B", "Llama-3.1-8B-Instruct",
}  # fmt: skip
MATH = sorted((find_code_root() / "recipes").glob("*/grpo/config_math.yaml"))
MAXENT = sorted((find_code_root() / "recipes").glob("*/maxent/config_math*.yaml"))
GPUS = (2, 4, 7, 8)


def test_there_is_one_for_each_model() -> None:
    assert {path.parents[1].name for path in MATH} == MODELS
    for path in MATH:
        assert read_recipe(path)["model_name_or_path"].endswith(f"/{path.parents[1].name}")
        assert len(yaml.safe_load(path.read_text())) <= 8, "values that recipes share are in the base"


def test_there_is_one_for_each_model_and_objective() -> None:
    assert len(MAXENT) == len(MODELS) * len(OBJECTIVES)
    for path in MAXENT:
        recipe, grpo = read_recipe(path), read_recipe(path.parents[1] / "grpo" / "config_math.yaml")
        named = path.stem.removeprefix("config_math").removeprefix("_") or "listwise"
        assert recipe["maxent_objective"] == named
        differing = {key for key in catalogue() if recipe[key] != grpo[key]}
        allowed = {"maxent_objective", "run_name", *(["maxent_policy_spread"] if named == "listwise" else [])}
        assert differing <= allowed, "the experiment differs from GRPO only in the objective"
        written = yaml.safe_load(path.read_text()).keys()
        assert written == {"base", *allowed}, "default values are in registry.py"
    names = [read_recipe(path)["run_name"] for path in (*MATH, *MAXENT)]
    assert len(set(names)) == len(names)


def test_the_smoke_task_of_maxent_is_that_of_grpo() -> None:
    grpo, maxent = (read_recipe(find_code_root() / "recipes/smoke" / name) for name in ("grpo.yaml", "maxent.yaml"))
    assert maxent["maxent_objective"] == "listwise"
    assert {key for key in catalogue() if maxent[key] != grpo[key]} <= {"maxent_objective", "run_name"}


@pytest.mark.parametrize(
    "path", [*MATH, *MAXENT], ids=lambda path: f"{path.parents[1].name}-{path.parent.name}-{path.stem}"
)
def test_the_same_batch_on_every_number_of_gpus(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = read_recipe(path)
    assert check(recipe, {}) == []
    names = Names(tmp_path, "name", "name-abcd", "stamp")
    batches = []
    for count in GPUS:
        resources = Resources("cuda", tuple(map(str, range(count))), 8)
        plan = make_plan(recipe, resources, {"CACHE_ROOT": str(tmp_path)}, names)
        assert plan.batch.world_size == count - 1 and plan.unused_gpus == ()
        assert plan.task == path.parent.name and (find_code_root() / plan.entry).is_file()
        batches.append(plan.batch)
    for nodes in (2, 4):
        assert cli.main(["plan", str(path), "--gpus", "8", "--nodes", str(nodes), "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["task"] == path.parent.name
        assert told["batch"]["world_size"] >= 8 * nodes - 2 and len(told["unused_gpus"]) <= 1
        assert [process["node"] for process in told["processes"]] == [0, *range(nodes)]
        batches.append(replace(batches[0], **told["batch"]))
    assert {(batch.completions, batch.tokens) for batch in batches} == {(840, 840 * 1536)}
    for batch in batches:
        assert batch.world_size * batch.per_device * batch.accumulation == batch.completions
        assert batch.completions % batch.num_generations == 0
        assert batch.per_device <= recipe["per_device_train_batch_size"]


@pytest.mark.parametrize("path", MATH, ids=lambda path: path.parents[1].name)
def test_right_for_the_models_they_train(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe["dtype"] == "bfloat16" and recipe["bf16"] is True, "TRL's default is float32"
    assert recipe["hub_private_repo"] is True
    assert recipe["max_prompt_length"] + recipe["max_completion_length"] <= recipe["vllm_max_model_length"]
    assert recipe["trust_remote_code"] is False
    billions = float(recipe["model_name_or_path"].split("-")[-2 if "Instruct" in path.parents[1].name else -1][:-1])
    assert recipe["accelerator"] == ("zero3" if billions >= 4 else "zero2"), "ddp would update the bfloat16 weights"


def test_a_copied_recipe_still_finds_its_base(tmp_path: Path) -> None:
    copied = tmp_path / "mine.yaml"
    shutil.copy(MATH[0], copied)
    assert read_recipe(copied)["prompts_per_step"] == 105
    assert read_recipe(copied).source("prompts_per_step").startswith(f"{find_code_root()}/recipes/base/math.yaml:")


def test_batches_on_several_nodes_need_the_gpus_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(MATH[0]), "--nodes", "2"]) == 2
    message = "--nodes: needs --gpus, the number of GPUs of a node. Fix: add --gpus 8"
    assert message in capsys.readouterr().err
    assert cli.main(["plan", str(MATH[0]), "--nodes", "0", "--gpus", "8"]) == 2
    assert cli.main(["plan", str(MATH[0]), "--nodes", "2", "--gpus", "8"]) == 0
    assert "15 trainers x 4 per device x 14 accumulated" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((find_code_root() / "recipes/environments").glob("*.yaml")), ids=lambda path: path.stem
)
def test_recipes_of_environments_are_right_and_play_what_they_name(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("reasoning_gym")
    pytest.importorskip("verifiers")
    monkeypatch.chdir(find_code_root())
    recipe = read_recipe(path)
    assert check(recipe, {}) == []
    device = "cpu" if path.stem.endswith("_smoke") else "cuda"
    gpus = () if device == "cpu" else tuple(map(str, range(8)))
    plan = make_plan(
        recipe, Resources(device, gpus, 8), {"CACHE_ROOT": str(tmp_path)}, Names(tmp_path, "n", "n-a", "s")
    )
    if not recipe["tools"]:  # then a dataset has the prompts
        assert plan.data is not None and all(name in plan.data.text for name in recipe["benchmarks"])
    for index in range(len(list_episode_environments(recipe.__getitem__))):
        *_, last = play_turns(recipe, index, 0, lambda _: "<answer>0</answer>")
        assert last.done


def test_recipes_of_atropos_train_the_models_of_those_with_datasets_on_groups(tmp_path: Path) -> None:
    pytest.importorskip("atroposlib")
    smoke, gsm8k = (read_recipe(find_code_root() / f"recipes/atropos/{name}.yaml") for name in ("smoke", "gsm8k"))
    assert check(smoke, {}) == check(gsm8k, {}) == []
    alike = read_recipe(find_code_root() / "recipes/smoke/grpo.yaml")
    differing = {key for key in catalogue() if smoke[key] != alike[key]}
    assert differing == {"run_name", "dataset_name", "atropos_environment", "reward_funcs"}, "else it is the same task"
    batches = []
    for count in GPUS:
        resources, names = Resources("cuda", tuple(map(str, range(count))), 8), Names(tmp_path, "n", "n-a", "s")
        plan = make_plan(gsm8k, resources, {"CACHE_ROOT": str(tmp_path)}, names)
        assert plan.batch.world_size == count - 1 and plan.unused_gpus == ()
        assert [process.role for process in plan.processes] == ["run-api", "server", "trainer", "environment-dataset"]
        batches.append(plan.data.text)
    assert len(set(batches)) == 1 and batches[0].startswith("dataset; 840 sequences (105 groups of 8) a batch")
    assert gsm8k["max_steps"] == 7473 // 105, "about an epoch"
