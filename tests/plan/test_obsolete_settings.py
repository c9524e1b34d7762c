"""Settings that today's vLLM, transformers and hub do not read: no process of a run gets such a setting."""

from __future__ import annotations

import pytest

from grpo_recipes.plan.commands import run_environment, server_environment
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.secrets import MASK, mask_environment

FLAGS = ["--swap-space", "--disable-log-requests"]
VARIABLES = [
    "VLLM_ATTENTION_BACKEND", "VLLM_USAGE_STATS_PATH", "HF_HUB_ENABLE_HF_TRANSFER", "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_REQUEST_TIMEOUT", "TRANSFORMERS_CACHE", "TORCH_LOAD_WEIGHTS_ONLY", "TORCH_FORCE_FULL_STATE_DICT",
    "FLASH_ATTENTION_FORCE_DISABLED", "TRANSFORMERS_NO_FLASH_ATTN",
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_obsolete_is_set(planned, tmp_path, device):
    plan = planned(device=device)
    shared = run_environment({"HOME": str(tmp_path)}, Scratch(tmp_path, tmp_path), tmp_path, "mark")
    assert len(plan.processes) == 2
    for process in plan.processes:
        assert not set(FLAGS) & set(process.argv)
        assert not set(VARIABLES) & {*process.environment, *shared}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_usage_statistics_are_off(device):
    assert server_environment(device, None, {})["VLLM_NO_USAGE_STATS"] == "1"


def test_a_token_under_its_old_name_is_masked():
    assert mask_environment({"HUGGING_FACE_HUB_TOKEN": "anything"}) == {"HUGGING_FACE_HUB_TOKEN": MASK}
