"""Recipes with an external server, and evaluations with separate sampling keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_recipes.plan.commands import longest_sequence
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check, notes

URL = {"vllm_server_base_url": "http://10.0.0.3:30000", "vllm_mode": "server"}
STEPS = {"eval_strategy": "steps", "eval_steps": 5}
Read = Callable[..., Recipe]


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ({"vllm_server_base_url": "far:30000"}, {},
         "expected an http or https URL, got 'far:30000'. Fix: set vllm_server_base_url"),
        ({"weight_sync": "file"}, {}, "weight_sync can't be combined with vllm_server_base_url"),
        ({"vllm_mode": "colocate"}, {}, "be combined with vllm_mode: colocate"),
        ({"generation_kwargs": {"stop": ["x"]}}, {}, "generation_kwargs is not sent"),
        ({"max_completion_length": None}, {}, "needs a limit. Fix: set max_completion_length"),
        ({"server_backend": "hf"}, {}, "server_backend"),
        (STEPS | {"eval_temperature": 0.0}, STEPS | {"eval_temperature": 0.0, "num_generations_eval": 1},
         "eval_temperature 0 makes all completions of a prompt equal. Fix: set num_generations_eval: 1"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_is_told_and_the_right_one_passes(
    read: Read, wrong: dict[str, Any], right: dict[str, Any], message: str
) -> None:
    assert check(read(**URL | right), {}) == []
    if "server_backend" in wrong:
        with pytest.raises(Exception, match=message):
            read(**URL | wrong)
        return
    (problem,) = check(read(**URL | wrong), {})
    assert message in str(problem)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (URL | {"vllm_server_port": 8001}, "vllm_server_port does nothing without a server that the launch starts"),
        ({"server_backend": "sglang_server"}, "server_backend does nothing without vllm_server_base_url"),
        (
            {"max_concurrent_requests": 3, "vllm_mode": "colocate"},
            "max_concurrent_requests does nothing without a vLLM",
        ),
        (URL | {"max_concurrent_requests": 3}, None),
        (URL | {"server_backend": "sglang_server"}, None),
    ],
)
def test_a_key_that_changes_nothing_is_told(read: Read, keys: dict[str, Any], message: str | None) -> None:
    lines = [line for line in notes(read(**keys)) if "does nothing" in line and "vllm_max_model_length" not in line]
    assert len(lines) == (message is not None) and (message is None or message in lines[0])


def test_the_plan_has_no_server_and_the_weights_lie_where_the_other_one_can_read_them(
    read: Read, tmp_path: Any
) -> None:
    names = Names(tmp_path / "runs/one", "one", "served", "now")
    environment = {"OPENAI_API_KEY": "key", "CACHE_ROOT": str(tmp_path)}
    for url, remote in (("http://10.0.0.3:30000", True), ("http://localhost:30000", False)):
        plan = make_plan(
            read(**URL | {"vllm_server_base_url": url}), Resources("cuda", ("0", "1"), 8), environment, names
        )
        assert (plan.mode, plan.bridge, plan.server_gpus, plan.batch.world_size) == ("external", None, (), 2)
        (trainer,) = plan.processes
        assert trainer.environment.get("GRPO_SYNC_DIR") == (str(names.run_dir / "sync") if remote else None)
        assert "OPENAI_API_KEY" in trainer.keeps and trainer.after == ()
        assert url in plan.vllm


def test_the_server_is_started_for_the_longer_completions_of_evaluations(read: Read) -> None:
    keys = {"max_prompt_length": 100, "max_completion_length": 50, "eval_max_completion_length": 200}
    keys["vllm_max_model_length"] = None
    assert longest_sequence(read(**keys)) == 150  # nothing is evaluated
    assert longest_sequence(read(**keys, **STEPS)) == 300
    (problem,) = check(read(**keys | STEPS | {"vllm_max_model_length": 299}), {})
    assert "prompt 100 + completion 200 tokens exceed vllm_max_model_length 299" in str(problem)


def test_an_episode_has_one_limit(read: Read) -> None:
    keys = STEPS | {"environment": "reasoning_gym:chain_sum", "reward_funcs": ["environment"]}
    problems = check(read(**keys | {"dataset_name": None, "eval_max_completion_length": 9}), {})
    assert "does nothing with environment or tools: evaluations use" in " ".join(map(str, problems))
