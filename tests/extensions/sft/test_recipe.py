"""``task: sft`` in a recipe: checked, and planned without a server and without groups of completions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import trl

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.sft.rules import ONLY_GRPO
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.estimates import find_needs
from grpo_recipes.plan.models import UnknownShape
from grpo_recipes.plan.plan import format_plan, make_plan
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.plan.workload import Workload
from grpo_recipes.recipe import Recipe, configs
from grpo_recipes.recipe.check import check, resolve_recipe
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.recipe.rules import matching_keys
from grpo_recipes.recipe.tasks import requested_task, require_same_task, task_of, with_task

SMOKE = find_code_root() / "recipes/smoke/sft.yaml"
GPUS = Resources("cuda", ("0", "1", "2", "3"), 16, gpu_gib=80)


def resolve(*flags: str, **environment: str) -> Recipe:
    return resolve_recipe(str(SMOKE), None, flags, environment, "cpu")


def plan_of(recipe: Recipe, resources: Resources, tmp_path: Path) -> Plan:
    names = Names(tmp_path / "run", "run", "run-1", "20260101-000000")
    return make_plan(recipe, resources, {"CACHE_ROOT": str(tmp_path)}, names)


def test_all_gpus_train_and_nothing_samples(tmp_path: Path) -> None:
    plan = plan_of(resolve("--per_device_train_batch_size", "10"), GPUS, tmp_path)
    assert [process.role for process in plan.processes] == ["trainer"]
    assert plan.processes[0].gpus == ("0", "1", "2", "3") and not plan.unused_gpus
    assert plan.processes[0].argv.count(str(find_code_root() / "src/sft.py")) == 1
    assert plan.entry == "src/sft.py" and plan.task == "sft"
    shown = format_plan(plan, argv=False).splitlines()
    assert "batch      80 rows per step = 4 trainers x 10 per device x 2 accumulated" in shown
    assert "vllm       none (task: sft samples nothing)" in shown


def test_the_memory_of_a_step_follows_from_the_longest_row(tmp_path: Path) -> None:
    def estimate(*flags: str) -> int:
        recipe = resolve("--model_name_or_path", "Qwen/Qwen2.5-1.5B-Instruct", *flags)
        needs = find_needs(Workload.of(recipe, plan_of(recipe, GPUS, tmp_path)), None)
        assert needs.keys() == {"trainer"} and "KV cache" not in needs["trainer"].parts
        return sum(needs["trainer"].parts.values())

    assert estimate("--sft_max_length", "2048") > estimate("--sft_max_length", "256")
    with pytest.raises(UnknownShape, match="set sft_max_length"):
        estimate()
    plan = plan_of(resolve("--sft_max_length", "32"), GPUS, tmp_path)
    assert str(plan.batch).endswith("at most 2,560 tokens")


def test_one_gpu_needs_no_vllm(tmp_path: Path) -> None:
    plan = plan_of(resolve(), Resources("cuda", ("0",), 8, gpu_gib=80), tmp_path)
    assert [process.role for process in plan.processes] == ["trainer"] and plan.max_num_seqs is None


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("num_generations", "4"),
        ("reward_funcs", "[pure_accuracy_math]"),
        ("use_vllm", "true"),
        ("temperature", "0.7"),
        ("benchmarks", "[smoke:sums]"),
        ("beta", "0.1"),
        ("judge_model", "m"),
        ("shuffle_dataset", "false"),
        ("eval_dataset_name", "smoke:sums"),
    ],
)
def test_a_key_that_only_grpo_reads_is_rejected_by_name(flag: str, value: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(f"--{flag}", value)
    (problem,) = error.value.problems
    assert problem.where == f"--{flag}" and f"{flag} does nothing with task: sft" in str(problem)


def test_variables_for_the_next_run_are_ignored(tmp_path: Path) -> None:
    variables = {"MAXENT": "1", "VLLM_MODE": "colocate", "VLLM_PORT": "8100"}
    recipe = resolve(**variables)
    assert task_of(recipe) == "sft" and recipe["maxent_objective"] is None
    assert plan_of(recipe, GPUS, tmp_path).entry == "src/sft.py"
    require_same_task(recipe, requested_task(variables), "sft")


def test_an_option_for_another_task_is_rejected() -> None:
    recipe, request = resolve(), requested_task({}, "maxent")
    (problem,) = with_task(recipe, request)[1]
    assert str(problem) == "--task: requests maxent, but the recipe sets task: sft. Fix: remove --task"
    with pytest.raises(ConfigError, match="this run is sft"):
        require_same_task(recipe, request, "sft")


def test_the_learning_rate_of_grpo_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("\n".join(line for line in SMOKE.read_text().splitlines() if "learning_rate" not in line))
    with pytest.raises(ConfigError, match=r"too small for task: sft\. Fix: set learning_rate: 2e-5"):
        resolve_recipe(str(path), None, (), {}, "cpu")
    path.write_text(f"{path.read_text()}\nlearning_rate: 2e-5\n")
    assert not check(resolve_recipe(str(path), None, (), {}, "cpu"), {})


def test_every_key_is_either_read_or_rejected() -> None:
    """A key of TRL's GRPOConfig that SFTConfig lacks is rejected, unless the launcher or our code reads it."""
    ours = {
        "chat_template_kwargs", "max_requeues", "prompts_per_step", "stall_timeout", "wandb_entity", "wandb_project",
        "wandb_run_group", "hub_revision",
    }  # fmt: skip
    read = {field.name for field in dataclasses.fields(trl.SFTConfig)} | ours
    keys = {key for key, entry in catalogue().items() if entry["config"] == configs.GRPOConfig.__name__}
    rejected = {*matching_keys(ONLY_GRPO), *matching_keys("maxent_*")}
    assert not keys - read - rejected
    assert not set(ONLY_GRPO.split()) - {name for name in ONLY_GRPO.split() if matching_keys(name)}
    assert not ours & rejected
