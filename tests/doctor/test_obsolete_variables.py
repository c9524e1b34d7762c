"""Variables of the guide's scripts that nothing reads today are told, each with what to do."""

from __future__ import annotations

import pytest

from grpo_recipes.doctor import environment


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("TRANSFORMERS_CACHE", "HF_HOME"),
        ("HF_HUB_ENABLE_HF_TRANSFER", "HF_XET_HIGH_PERFORMANCE"),
        ("HF_HUB_REQUEST_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"),
        ("TORCH_LOAD_WEIGHTS_ONLY", "unset it"),
        ("TORCH_FORCE_FULL_STATE_DICT", "unset it"),
        ("FLASH_ATTENTION_FORCE_DISABLED", "attn_implementation"),
        ("TRANSFORMERS_NO_FLASH_ATTN", "attn_implementation"),
    ],
)
def test_an_old_variable_is_told_with_what_to_do(machine, name, fix):
    found = environment.old_variables(machine(**{name: "1"}))
    assert found.status == "warning" and name in found.value and fix in found.fix


@pytest.mark.parametrize("name", ["VLLM_ATTENTION_BACKEND", "VLLM_USAGE_STATS_PATH", "VLLM_URL"])
def test_a_variable_that_vllm_no_longer_knows_is_told(machine, name):
    found = environment.vllm_variables(machine(**{name: "x"}))
    assert found.status == "warning" and name in found.value and name in found.fix
