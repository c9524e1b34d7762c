"""Check each rule of LoRA keys with a recipe that breaks it and with the corrected recipe."""

from __future__ import annotations

import pytest

from grpo_recipes.recipe.check import check

PEFT = {"use_peft": True}


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ({"lora_r": 8}, {"lora_r": 8, **PEFT}, "lora_r does nothing without use_peft"),
        ({"lora_target_modules": ["q_proj"]}, {}, "lora_target_modules does nothing without use_peft"),
        ({"use_dora": True}, {"use_dora": True, **PEFT}, "use_dora does nothing without use_peft"),
        ({"use_rslora": True}, {"use_rslora": False}, "use_rslora does nothing without use_peft"),
        ({"accelerator": "zero3", **PEFT}, {"accelerator": "zero2", **PEFT}, "accelerator: zero3 has not been shown"),
        ({"accelerator": "fsdp2", **PEFT}, {"accelerator": "ddp", **PEFT}, "accelerator: fsdp2 has not been shown"),
        (
            {"sync_ref_model": True, "beta": 0.1, **PEFT},
            {"sync_ref_model": True, "beta": 0.1},
            "sync_ref_model and use_peft can't be combined",
        ),
        (
            {"disable_dropout": True, "lora_dropout": 0.1, **PEFT},
            {"disable_dropout": True, **PEFT},
            "disable_dropout turns lora_dropout 0.1 off",
        ),
        ({"cast_lm_head_to_fp32": True, **PEFT}, {"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32"),
        ({"lora_target_parameters": ["experts.w"], **PEFT}, PEFT, "adapters on parameters that are not layers"),
        ({"lora_target_modules": [], **PEFT}, PEFT, "lora_target_modules is empty"),
        (
            {"lora_target_modules": ["all-linear", "q_proj"], **PEFT},
            {"lora_target_modules": ["all-linear"], **PEFT},
            "all-linear and other lora_target_modules",
        ),
        (
            {"lora_target_modules": ["q_proj", "model.lm_head"], **PEFT},
            {"lora_target_modules": ["q_proj"], "lora_modules_to_save": ["lm_head"], **PEFT},
            "an adapter on 'model.lm_head' is not supported",
        ),
        ({"load_in_4bit": True, **PEFT}, PEFT, "load_in_4bit is not supported"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_a_broken_rule_is_told_and_the_correction_passes(read, wrong, right, message):
    (problem,) = check(read(**wrong), {})
    assert message in str(problem) and problem.fix
    assert problem.where.startswith("recipe.yaml")
    assert check(read(**right), {}) == []


def test_every_adapter_key_needs_use_peft_and_is_told_with_the_others(read):
    problems = check(read(lora_alpha=8, lora_dropout=0.1, lora_modules_to_save=["norm"]), {})
    assert [problem.fix for problem in problems] == [
        f"add use_peft: true, or remove {key}" for key in ("lora_alpha", "lora_dropout", "lora_modules_to_save")
    ]
