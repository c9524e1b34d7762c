"""The most tokens of a micro-batch: given, TRL's by default, and fewer where a GPU cannot hold those."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from grpo_recipes.fetch.assets import Assets
from grpo_recipes.plan.commands import with_processes
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.estimates import GIB, Workload, estimate_memory, needs, suggest
from grpo_recipes.plan.plan import describe, micro_batch_tokens, with_sources
from grpo_recipes.plan.types import Names

from .model_folders import model_folder

LONG = {"max_prompt_length": 512, "max_completion_length": 1024, "dtype": "bfloat16", "bf16": True,
        "learning_rate": 1e-3, "prompts_per_step": 105, "num_generations": 8, "per_device_train_batch_size": 8,
        "accelerator": "zero3", "gradient_checkpointing": False}  # fmt: skip
GPUS = tuple(str(index) for index in range(8))


@pytest.fixture
def tokens(read: Any, planned: Any, tmp_path: Any) -> Any:
    """``tokens(GIB_OF_A_GPU, KEY=VALUE, ...)`` of a 7B model on eight GPUs."""
    model = model_folder(tmp_path / "model")

    def found(gib: float | None, **keys: Any) -> int | None:
        recipe = read(**{**LONG, "model_name_or_path": model, **keys})
        return micro_batch_tokens(recipe, planned(recipe=recipe, gpus=GPUS), gib)

    return found


def test_by_default_a_micro_batch_has_what_one_of_trl_has_at_most(tokens: Any) -> None:
    assert tokens(None) == tokens(None, tokens_per_micro_batch="auto") == 8 * 1536
    assert tokens(None, per_device_train_batch_size=4) == 4 * 1536
    assert tokens(1000) == 8 * 1536


def test_a_smaller_gpu_gets_smaller_micro_batches_until_they_fit(
    tokens: Any, read: Any, planned: Any, tmp_path: Any
) -> None:
    smaller = tokens(80)
    assert smaller is not None and 1536 <= smaller < 8 * 1536 and smaller % 1536 == 0
    recipe = read(**LONG, model_name_or_path=model_folder(tmp_path / "again"))
    work = Workload.of(recipe, planned(recipe=recipe, gpus=GPUS))
    fits = [
        needs(Workload({**work, "tokens_per_micro_batch": size}), 80 * GIB)["trainer"].fits
        for size in (smaller, smaller + 1536)
    ]
    assert fits == [True, False]
    assert tokens(20) == 1536  # a row is never cut


def test_a_number_is_taken_as_it_is_and_its_fix_is_a_smaller_one(
    tokens: Any, read: Any, planned: Any, tmp_path: Any
) -> None:
    assert tokens(80, tokens_per_micro_batch=50_000) == 50_000
    recipe = read(**LONG, model_name_or_path=model_folder(tmp_path / "again"), tokens_per_micro_batch=50_000)
    plan = replace(planned(recipe=recipe, gpus=GPUS), micro_batch_tokens=50_000)
    need = estimate_memory(recipe, plan, 80)["trainer"]
    assert not need.fits and need.fix.startswith("tokens_per_micro_batch: ")
    size = int(need.fix.split()[-1])
    assert estimate_memory(recipe, replace(plan, micro_batch_tokens=size), 80)["trainer"].fits
    assert suggest("trainer", recipe, Workload.of(recipe, plan), 80 * GIB) == need.fix


@pytest.mark.parametrize(
    "keys",
    [{"trim_padding": False}, {"top_entropy_quantile": 0.5}, {"use_adaptive_entropy": True}],
    ids=str,
)
def test_micro_batches_of_trl_have_no_number(tokens: Any, keys: dict[str, Any]) -> None:
    assert tokens(80, **keys) is None


def test_the_plan_shows_the_number_and_the_trainer_gets_it(read: Any, planned: Any, tmp_path: Any) -> None:
    recipe = read(**LONG, model_name_or_path=model_folder(tmp_path / "model"))
    resources = Resources("cuda", GPUS, 16)
    plan = with_sources(planned(recipe=recipe, gpus=GPUS), recipe, resources, Assets([], []))
    assert "passes     of at most 12,288 tokens, rows of about one length together" in describe(plan).splitlines()
    names = Names(tmp_path / "run", "run", "run-abcd", "stamp")
    argv = with_processes(plan, recipe, resources, {}, names).process("trainer").argv
    assert argv[argv.index("--tokens_per_micro_batch") + 1] == "12288"
