"""``vllm_data_parallel_size: auto`` chooses the number of replicas from the seconds of an earlier run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node, Resources
from grpo_recipes.plan.estimates import estimate_memory
from grpo_recipes.plan.needs import GIB
from grpo_recipes.plan.plan import format_plan, make_plan
from grpo_recipes.plan.types import Plan

EIGHT = tuple("01234567")
# 840 completions divide among 1 to 8 trainers, 48 completions among 1, 2, 3, 4 and 6.
ANY, FEW = {"prompts_per_step": 105, "num_generations": 8}, {"prompts_per_step": 6, "num_generations": 8}


@pytest.fixture
def plan_auto(planned: Callable[..., Plan], tmp_path: Path) -> Callable[..., Plan]:
    """``plan_auto(KEY=VALUE)``: a plan with the number of replicas that ``auto`` chooses on eight GPUs."""

    def plan(**changes: Any) -> Plan:
        keys = {"gpus": EIGHT, "run_root": str(tmp_path / "runs"), "vllm_data_parallel_size": "auto", **ANY}
        return planned(**{**keys, **changes})

    return plan


@pytest.fixture
def ran(plan_auto: Callable[..., Plan], tmp_path: Path) -> Callable[..., Path]:
    """``ran(sample, update, replicas, KEY=VALUE)``: an earlier run of the recipe with these seconds per step.

    A list has the seconds of each step.
    """

    def make(
        sample: list[float] | float | None, update: float, replicas: int = 1, number: int = 1, score: float = 0.0,
        **changes: Any,
    ) -> Path:  # fmt: skip
        keys = {**ANY, "vllm_data_parallel_size": replicas, **changes}
        folder = tmp_path / f"runs/recipe-{number}"
        folder.mkdir(parents=True)
        plan = plan_auto(**keys)
        (folder / "recipe.yaml").write_text(Path(plan.recipe).read_text())
        (folder / "plan.json").write_text(json.dumps(plan.as_json()))
        (folder / "run.json").write_text(json.dumps({"run_name": "recipe"}))
        rows: list[dict[str, Any]] = [{"step": 1, "seconds/sample": 900.0, "seconds/update": 900.0}]
        for step, seconds in enumerate(sample if isinstance(sample, list) else [sample, sample], 2):
            times = {"seconds/sample": seconds, "seconds/update": update, "seconds/score": score}
            rows.append({"step": step, **times})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.mark.parametrize(
    ("sample", "update", "replicas", "chosen"),
    [
        (20.0, 10.0, 1, 3),  # 1 + 7 GPUs: 30 s, 2 + 6: 21.7 s, 3 + 5: 20.7 s, 4 + 4: 22.5 s
        (10.0, 10 * 7 / 6, 2, 3),  # the same speed, measured on 2 + 6 GPUs
        (5.0, 20.0, 1, 1),
        (5.0, 20.0, 4, 3),  # 1 + 7 GPUs: 31.4 s, 2 + 6: 23.3 s, 3 + 5: 22.7 s
        (100.0, 1.0, 1, 6),
    ],
)
def test_the_number_with_the_shortest_step_is_chosen(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path], sample: float, update: float, replicas: int, chosen: int
) -> None:
    ran(sample, update, replicas)
    plan = plan_auto()
    assert (plan.replicas, plan.batch.world_size, len(plan.server_gpus)) == (chosen, 8 - chosen, chosen)
    (note,) = plan.notes
    times = f"sampled {sample:.3g} s and updated {update:.3g} s per step on {replicas} + {8 - replicas} GPUs"
    assert note == f"{chosen} replica{'s' * (chosen > 1)}: run recipe-1 {times}"
    assert f"note       {note}" in format_plan(plan)


def test_the_newest_comparable_run_with_seconds_decides(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path]
) -> None:
    ran(5.0, 20.0, number=1)
    ran(20.0, 10.0, number=2)
    ran(None, 10.0, number=3)
    assert plan_auto().replicas == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct"},
        {"prompts_per_step": 35},
        {"vllm_tensor_parallel_size": 2},
        {"overlap_generation": True},
    ],
    ids=str,
)
def test_without_a_comparable_run_the_number_is_1(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path], changes: dict[str, Any]
) -> None:
    reason = "1 replica: no earlier run in run_root with this name, model and batch"
    assert (plan_auto().replicas, plan_auto().notes) == (1, [reason])
    ran(20.0, 10.0, **changes)
    assert (plan_auto().replicas, plan_auto().notes) == (1, [reason])


def test_models_of_earlier_stages_with_the_same_first_model_are_comparable(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path], tmp_path: Path
) -> None:
    """The second recipe of `grpo launch sft.yaml grpo.yaml` starts from another folder in each launch."""
    models = []
    for stage, name in (("sft-1", "Qwen/Qwen3-0.6B"), ("sft-2", "Qwen/Qwen3-0.6B"), ("sft-3", "Qwen/Qwen3-4B")):
        folder = tmp_path / "stages" / stage
        (folder / "model").mkdir(parents=True)
        (folder / "model/config.json").write_text(json.dumps({"model_type": "qwen2"}))
        (folder / "run.json").write_text("{}")
        (folder / "recipe.yaml").write_text(f"model_name_or_path: {name}\n")
        models.append(str(folder / "model"))
    ran(20.0, 10.0, model_name_or_path=models[0])
    assert [plan_auto(model_name_or_path=model).replicas for model in (models[1], "Qwen/Qwen3-0.6B", models[2])] == [
        3,
        3,
        1,
    ]
    (tmp_path / "stages/sft-2/recipe.yaml").write_text("[")
    assert plan_auto(model_name_or_path=models[1]).replicas == 1


def test_steps_without_a_generation_count(plan_auto: Callable[..., Plan], ran: Callable[..., Path]) -> None:
    """A generation of 60 s for four updates takes 15 s per step."""
    ran([60.0, 0.0, 0.0, 0.0], 5.0, num_iterations=4)
    assert plan_auto(num_iterations=4).replicas == 3  # 1 + 7 GPUs: 20 s, 2 + 6: 13.3 s, 3 + 5: 12 s, 4 + 4: 12.5 s
    assert plan_auto().notes == ["1 replica: no earlier run in run_root with this name, model and batch"]


def test_the_batch_divides_among_the_trainers_and_stays_the_same(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path]
) -> None:
    ran(20.0, 10.0, **FEW)  # on 1 + 6 GPUs
    plan = plan_auto(**FEW)  # 2 + 6: 20 s, 3 + 4: 21.7 s
    assert (plan.replicas, plan.batch.world_size, plan.batch.completions) == (2, 6, 48)


def test_the_batch_of_a_recipe_without_prompts_per_step_does_not_change(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path]
) -> None:
    keys = {"prompts_per_step": None, "num_generations": 7, "per_device_train_batch_size": 7}
    ran(20.0, 10.0, **keys)
    assert plan_auto(**keys).replicas == 1
    ran(20.0, 10.0, number=2, num_processes=4, **keys)
    assert plan_auto(num_processes=4, **keys).replicas == 4  # 4 trainers in any case


def test_with_overlap_the_longer_part_counts(plan_auto: Callable[..., Plan], ran: Callable[..., Path]) -> None:
    """A wait of 10 s after an update of 10 s is a generation of 20 s."""
    ran(10.0, 10.0, overlap_generation=True)
    plan = plan_auto(overlap_generation=True)  # 1 + 7 GPUs: 20 s, 2 + 6: 11.7 s, 3 + 5: 14 s
    assert plan.replicas == 2


def test_with_overlap_the_server_also_samples_during_the_scores(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path]
) -> None:
    """A wait of 20 s after scores of 30 s and an update of 10 s is a generation of 60 s."""
    ran(20.0, 10.0, score=30.0, overlap_generation=True)
    plan = plan_auto(overlap_generation=True)  # 1 + 7 GPUs: 60 s, 2 + 6: 41.7 s, 3 + 5: 44 s
    assert plan.replicas == 2


def test_replicas_stay_on_the_servers_node(plan_auto: Callable[..., Plan], ran: Callable[..., Path]) -> None:
    nodes = [Node(EIGHT[:2], 8, f"10.0.0.{number}", "eth0") for number in (1, 2, 3, 4)]
    keys = {"gpus": EIGHT[:2], "nodes": nodes, "vllm_node": "own"}
    ran(20.0, 10.0, **keys)
    assert plan_auto(**keys).replicas == 2


def test_a_plan_that_does_not_fit_into_memory_is_left_out(
    plan_auto: Callable[..., Plan], ran: Callable[..., Path], read: Callable[..., Any], tmp_path: Path
) -> None:
    ran(20.0, 10.0, accelerator="zero3")
    keys = {**ANY, "accelerator": "zero3", "run_root": str(tmp_path / "runs")}
    resources, environment = Resources("cuda", EIGHT, 8), {"CACHE_ROOT": str(tmp_path / "cache")}

    def trainer_gib(replicas: int) -> float:
        recipe = read(vllm_data_parallel_size=replicas, **keys)
        need = estimate_memory(recipe, make_plan(recipe, resources, environment), None)["trainer"]
        return need.total / GIB

    between = (trainer_gib(2) + trainer_gib(3)) / 2  # 6 or 5 trainers share the optimizer
    recipe = read(vllm_data_parallel_size="auto", **keys)
    for gib, chosen in ((None, 3), (2 * between, 3), (between, 2)):
        assert make_plan(recipe, replace(resources, gpu_gib=gib), environment).replicas == chosen


def test_on_cpu_and_with_one_gpu_the_number_is_1(plan_auto: Callable[..., Plan], ran: Callable[..., Path]) -> None:
    plan = plan_auto(device="cpu")
    assert (plan.replicas, plan.notes) == (1, ["1 replica: auto is 1 on CPU"])
    assert plan_auto(device="cpu", vllm_data_parallel_size=2).replicas == 2
    one_gpu = plan_auto(gpus=["0"])
    assert (one_gpu.replicas, one_gpu.mode) == (1, "colocate")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vllm_gpu": "shared"}, "vllm_gpu: shared and vllm_data_parallel_size: auto can't be combined"),
        ({"weight_sync": "shared", "dtype": "float32"}, "shared does not work with vllm_data_parallel_size above 1"),
        ({"vllm_mode": "colocate"}, "does not work with vllm_data_parallel_size above 1"),
    ],
)
def test_combinations_without_replicas_are_rejected(
    plan_auto: Callable[..., Plan], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_auto(**keys)
    plan_auto(**keys, vllm_data_parallel_size=1)
