"""Check recipes that would complete and learn nothing, and similar recipes that learn."""

from __future__ import annotations

import pytest

from grpo_recipes.recipe.check import check, notes


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ({"dtype": "bfloat16", "accelerator": "ddp"}, {"dtype": "bfloat16", "accelerator": "zero2"}, "rounded away"),
        ({"dtype": "bfloat16", "accelerator": "ddp"}, {"dtype": "float32", "accelerator": "ddp"}, "rounded away"),
        ({"dtype": "bfloat16", "accelerator": "ddp"}, {"dtype": "auto", "accelerator": "ddp"}, "rounded away"),
        ({"dtype": "bfloat16", "accelerator": "single"}, {"dtype": "bfloat16"}, "rounded away"),
        (
            {"dtype": "bfloat16", "accelerator": "single", "learning_rate": 9e-5},
            {"dtype": "bfloat16", "accelerator": "single", "learning_rate": 1e-4},
            "rounded away",
        ),
        (
            {"dtype": "bfloat16", "accelerator": "fsdp2", "bf16": False},
            {"dtype": "bfloat16", "accelerator": "fsdp2"},
            "rounded away",
        ),
        (
            {"dtype": "bfloat16", "accelerator": "ddp", "use_peft": True, "lora_modules_to_save": ["lm_head"]},
            {"dtype": "bfloat16", "accelerator": "ddp", "use_peft": True, "lora_target_modules": ["all-linear"]},
            "lora_modules_to_save: ",
        ),
        (
            {"dtype": "float16", "accelerator": "ddp", "learning_rate": 1e-3},
            {"dtype": "float16", "accelerator": "zero2"},
            "of any size",
        ),
        ({"learning_rate": 0.0}, {"learning_rate": 1e-9}, "so no weight changes"),
        ({"learning_rate": 1.0}, {"learning_rate": 1.0, "optim": "sgd"}, "moves every weight"),
        ({"warmup_steps": 2000, "max_steps": 20}, {"warmup_steps": 1000, "max_steps": 20}, "no step uses more"),
        (
            {"warmup_steps": 2000, "max_steps": 20},
            {"warmup_steps": 2000, "max_steps": 20, "lr_scheduler_type": "constant"},
            "no step uses more",
        ),
        ({"warmup_steps": 0.5, "max_steps": 1}, {"warmup_steps": 0.5, "max_steps": 2}, "no step uses more"),
        ({"warmup_steps": 2000, "max_steps": 20}, {"warmup_steps": 2000}, "no step uses more"),
        (
            {"reward_funcs": ["format_tags"], "reward_weights": [0.0]},
            {"reward_funcs": ["format_tags", "pure_accuracy_math"], "reward_weights": [0.0, 1.0]},
            "every reward has weight 0",
        ),
        (
            {"vllm_importance_sampling_clip_max": 0.0},
            {"vllm_importance_sampling_clip_max": 0.0, "vllm_importance_sampling_correction": False},
            "multiplies every gradient by 0",
        ),
    ],
)
def test_what_cannot_learn_is_refused(read, wrong, right, message):
    (problem,) = check(read(**wrong), {})
    assert message in problem.what
    assert check(read(**right), {}) == []


def test_a_file_of_accelerate_is_left_to_the_trainer(read):
    recipe = read(dtype="bfloat16", accelerator="ddp")
    assert check(recipe, {"CONFIG_FILE": "mine.yaml"}) == [] != check(recipe, {})


@pytest.mark.parametrize(
    ("warmup", "start"), [(100, "warmup_steps 100 with max_steps 20: the learning rate reaches 19% of"), (19, "")]
)
def test_a_warmup_that_does_not_end_is_noted(read, warmup, start):
    told = [note for note in notes(read(warmup_steps=warmup, max_steps=20)) if "warmup" in note]
    assert [note.startswith(start) for note in told] == ([True] if start else [])


@pytest.mark.parametrize(("hides", "count"), [(True, 1), (False, 0), (None, 0)])
def test_a_loss_that_is_no_number_is_not_hidden(read, hides, count):
    recipe = read() if hides is None else read(logging_nan_inf_filter=hides)
    assert sum("logging_nan_inf_filter hides nothing here" in note for note in notes(recipe)) == count
