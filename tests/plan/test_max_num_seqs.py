"""P1: the number of completions that vLLM generates at the same time follows from the recipe and from memory."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import Assets
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import choose_max_num_seqs, make_plan, with_sources

from .model_folders import QWEN_7B, model_folder

GPUS = tuple(str(index) for index in range(8))
STEP = {"prompts_per_step": 105, "num_generations": 8, "max_prompt_length": 512, "max_completion_length": 1024}


def served(plan: Any, option: Any) -> str:
    return option(plan.process("server").argv, "--max-num-seqs")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_server_generates_all_completions_of_a_generation_at_the_same_time(
    planned: Any, option: Any, device: str
) -> None:
    keys = {**STEP, "model_name_or_path": "someone/unknown"}  # no known shape, so memory sets no limit
    assert served(planned(device=device, gpus=GPUS, **keys), option) == "840"
    assert served(planned(device=device, gpus=GPUS, **keys | {"prompts_per_step": 35}), option) == "280"


def test_a_generation_for_several_steps_counts_as_a_whole(planned: Any, option: Any) -> None:
    keys = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 5, "steps_per_generation": 10,
            "num_generations": 8, "prompts_per_step": None}  # fmt: skip
    assert served(planned(device="cpu", **keys), option) == "80"


@pytest.mark.parametrize(
    ("keys", "number"),
    [
        ({"vllm_max_num_seqs": 32}, 32),
        ({"prompts_per_step": 700}, 2048),
        ({"benchmarks": ["math_500"], "benchmark_samples": 4}, 1024),
        ({"eval_strategy": "steps", "eval_steps": 5, "eval_dataset_name": "data.jsonl", "num_processes": 7,
          "per_device_eval_batch_size": 160}, 1120),
        ({"prompts_per_step": 7, "atropos_environment": "mine.py"}, 256),
    ],
    ids=str,
)  # fmt: skip
def test_the_recipes_number_or_the_most_that_the_run_requests(read: Any, keys: dict[str, Any], number: int) -> None:
    assert make_plan(read(**{**STEP, **keys}), Resources("cuda", GPUS, 16), {}).max_num_seqs == number


@pytest.mark.parametrize("number", [0, 2049])
def test_a_number_that_vllm_rejects_is_rejected_before_the_start(read: Any, number: int) -> None:
    with pytest.raises(ConfigError, match="vllm_max_num_seqs"):
        read(vllm_max_num_seqs=number)


def test_each_vllm_inside_a_trainer_has_a_part_of_the_generation(planned: Any, option: Any) -> None:
    keys = {**STEP, "prompts_per_step": 104, "vllm_mode": "colocate"}
    for parallel, number in ((1, "104"), (2, "208")):
        plan = planned(gpus=GPUS, vllm_tensor_parallel_size=parallel, **keys)
        assert option(plan.process("trainer").argv, "--vllm_max_num_seqs") == number


@pytest.fixture
def bounded(read: Any, planned: Any, tmp_path: Any) -> Any:
    """``bounded(GIB_OF_A_GPU, KEY=VALUE, ...)``: the bound of a 7B model on eight GPUs."""
    model = model_folder(tmp_path / "model")

    def number(gib: float | None, device: str = "cuda", **keys: Any) -> int | None:
        recipe = read(**{**STEP, "model_name_or_path": model, "dtype": "bfloat16", "learning_rate": 1e-3, **keys})
        return choose_max_num_seqs(recipe, planned(recipe=recipe, gpus=GPUS, device=device), gib)

    return number


def test_memory_bounds_the_number_down_to_the_default_of_vllm(bounded: Any) -> None:
    assert bounded(80) == bounded(None) == 840
    assert 256 < bounded(30) < 840
    assert bounded(20) == 256
    assert bounded(None, device="cpu", bf16=False) == 128
    assert bounded(20, vllm_max_num_seqs=2000) == 2000  # the recipe's number is passed unchanged


def test_a_run_without_its_own_vllm_has_no_number(planned: Any) -> None:
    assert planned(use_vllm=False).max_num_seqs is None


def test_a_launch_bounds_the_number_by_the_fetched_model(read: Any, planned: Any, tmp_path: Any) -> None:
    recipe = read(**STEP, model_name_or_path=model_folder(tmp_path / "model"), dtype="bfloat16", learning_rate=1e-3)
    plan = planned(recipe=recipe, gpus=GPUS)
    bounded = with_sources(plan, recipe, Resources("cuda", GPUS, 16, gpu_gib=30.0), Assets([], []))
    assert plan.max_num_seqs == 840 > (bounded.max_num_seqs or 0) > 256


def test_the_kv_cache_of_a_plan_on_cpu_does_not_bound_the_number_at_the_launch(
    read: Any, planned: Any, tmp_path: Any
) -> None:
    small = {"vocab_size": 8000, "num_hidden_layers": 4, "num_key_value_heads": 2}
    keys = {"prompts_per_step": 64, "num_generations": 16, "vllm_max_model_length": 600, "dtype": "float32"}
    keys |= {"bf16": False, "model_name_or_path": model_folder(tmp_path / "model", QWEN_7B | small)}
    recipe = read(**keys)
    plan = planned(recipe=recipe, device="cpu")
    at_launch = with_sources(plan, recipe, Resources("cpu", (), 4), Assets([], []))
    assert plan.max_num_seqs == at_launch.max_num_seqs == 1024
    assert plan.kv_cache_bytes == at_launch.kv_cache_bytes == 2**30
    assert planned(device="cpu", **keys, vllm_args={"kv_cache_memory_bytes": 2**26}).max_num_seqs < 1024
