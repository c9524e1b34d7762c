"""Notes on a correct recipe."""

from __future__ import annotations

import pytest

from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.check import notes


@pytest.mark.parametrize(
    ("keys", "cure", "message"),
    [
        ({"cosine_max_len": 9}, {"reward_funcs": ["cosine_length"]}, "does nothing without cosine_length"),
        ({"answer_matching": "strict", "reward_funcs": ["format_tags"]}, {"reward_funcs": ["pure_accuracy_math"]},
         "answer_matching does nothing without pure_accuracy_math or cosine_length"),
        ({"soft_punish_cache": 9}, {"reward_funcs": ["soft_overlong"]}, "does nothing without soft_overlong"),
        ({"benchmark_samples": 4}, {"benchmarks": ["gsm8k"]}, "benchmark_samples does nothing without benchmarks"),
        ({"hub_revision": "x"}, {"push_to_hub": True}, "hub_revision does nothing without push_to_hub"),
        ({"eval_max_prompts": 9}, {"eval_strategy": "epoch"}, "eval_max_prompts does nothing without eval_strategy"),
        ({"wandb_project": "x"}, {"report_to": ["wandb"]}, "wandb_project does nothing without report_to: wandb"),
        ({"reward_timeout": 9.0}, {"reward_funcs": ["math_verify"]}, "reward_timeout does nothing"),
    ],
)  # fmt: skip
def test_a_key_that_does_nothing_is_told(read, keys, cure, message):
    (note,) = notes(read(prompts_per_step=12, **keys))
    assert message in note and note.startswith("recipe.yaml:")
    assert notes(read(prompts_per_step=12, **{**keys, **cure})) == []


def test_a_bridge_without_vllm_is_told(read):
    assert any(
        "weight_sync does nothing without use_vllm" in note for note in notes(read(use_vllm=False, weight_sync="file"))
    )


def test_what_a_base_or_the_shell_sets_for_all_recipes_is_not_told(tmp_path):
    (tmp_path / "root.yaml").write_text("prompts_per_step: 4\nbenchmark_samples: 4\n")
    (tmp_path / "recipe.yaml").write_text("base: root.yaml\n")
    assert notes(read_recipe(tmp_path / "recipe.yaml", [], {"WANDB_PROJECT": "x"})) == []


def test_a_batch_that_follows_the_number_of_processes_is_told(read):
    (note,) = notes(read(without="prompts_per_step", num_generations=12))
    assert "whole groups of 12 only if the number of training processes is a multiple of 3" in note
