"""Keys that the guide passes to TRL unchanged: a recipe's value is the value in the trainer's configs."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path

import pytest
from ledgers import read_rows

trl = pytest.importorskip("trl")

from grpo_recipes.recipe import configs, read_recipe  # noqa: E402
from grpo_recipes.recipe.keys import catalogue  # noqa: E402

# None of them is the default.
VALUES = {
    "model_name_or_path": "a/model",
    "model_revision": "abc",
    "attn_implementation": "sdpa",
    "trust_remote_code": True,
    "dtype": "bfloat16",
    "dataset_name": "a/dataset",
    "dataset_config": "main",
    "dataset_prompt_column": "question",
    "dataset_solution_column": "gold",
    "system_prompt": "Think.",
    "chat_template": "{{ messages }}",
    "reward_funcs": ["pure_accuracy_math", "format_tags"],
    "reward_weights": [1.0, 0.5],
    "num_generations": 6,
    "max_completion_length": 77,
    "temperature": 0.7,
    "top_p": 0.8,
    "learning_rate": 3e-6,
    "gradient_accumulation_steps": 3,
    "per_device_train_batch_size": 12,
    "per_device_eval_batch_size": 6,
    "bf16": False,
    "gradient_checkpointing": False,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "logging_nan_inf_filter": False,
    "save_strategy": "no",
    "save_steps": 7,
    "save_total_limit": 3,
    "lr_scheduler_type": "cosine",
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-7,
    "max_grad_norm": 0.3,
    "log_completions": True,
    "num_completions_to_print": 2,
    "push_to_hub": True,
    "hub_model_id": "me/mine",
    "hub_revision": "second",
    "seed": 7,
    "run_name": "mine",
    "report_to": ["tensorboard"],
    "ignore_data_skip": True,
    "warmup_steps": 0.2,
    "eval_strategy": "steps",
    "eval_steps": 5,
    "beta": 0.04,
    "epsilon": 0.05,
    "epsilon_high": 0.3,
    "scale_rewards": "batch",
    "loss_type": "dr_grpo",
    "log_unique_prompts": True,
    "use_vllm": True,
    "vllm_mode": "server",
    "vllm_server_port": 9000,
    "vllm_group_port": 9001,
    "wandb_project": "project",
    "wandb_entity": "team",
    "wandb_run_group": "group",
}
# TRL 1.16's defaults, which differ from the guide's versions; the last two are ours.
DEFAULTS = {
    "beta": 0.0,
    "loss_type": "dapo",
    "scale_rewards": "group",
    "num_generations": 8,
    "max_completion_length": 512,
    "report_to": "none",
    "gradient_checkpointing": True,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_mode": "server",
    "vllm_gpu_memory_utilization": 0.9,
}
# The launcher's plan sets these keys and passes them to the trainer with the recipe.
ALWAYS_GIVEN = {"vllm_mode"}


def test_what_a_recipe_says_is_what_trl_is_given(tmp_path: Path) -> None:
    written, frozen = tmp_path / "mine.yaml", tmp_path / "recipe.yaml"
    written.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in VALUES.items()))
    frozen.write_text(read_recipe(written).as_yaml())

    parser = trl.TrlParser(configs.CONFIGS, allow_abbrev=False)
    parsed = parser.parse_args_and_config(
        ["--config", str(frozen), "--output_dir", str(tmp_path / "out"), "--use_cpu", "true"]
    )

    values = {spec.name: getattr(config, spec.name) for config in parsed for spec in dataclasses.fields(config)}
    for key, value in VALUES.items():
        assert _plain(values[key]) == value, key
        assert catalogue()[key]["default"] != value or key in ALWAYS_GIVEN, f"{key}: a default shows nothing"


def test_every_key_of_the_rows_that_rest_on_it_has_a_value() -> None:
    name = f"tests/{Path(__file__).name}::test_what_a_recipe_says_is_what_trl_is_given"
    resting = {key.partition(".")[0] for row in read_rows() if name in row.tests for key in row.keys}
    assert resting and resting - VALUES.keys() == set()


@pytest.mark.parametrize("key", DEFAULTS)
def test_defaults_that_have_changed_since_the_guide(key: str) -> None:
    (trl_default,) = (spec.default for spec in dataclasses.fields(trl.GRPOConfig) if spec.name == key)
    assert catalogue()[key]["default"] == DEFAULTS[key]
    assert (trl_default == DEFAULTS[key]) is not (key in ("vllm_mode", "vllm_gpu_memory_utilization"))


def _plain(value: object) -> object:
    return value.value if isinstance(value, enum.Enum) else value
