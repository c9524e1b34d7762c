"""Models that are known to be gated."""

from __future__ import annotations

import pytest

from grpo_recipes.fetch.hub import describe_gated_model


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-4b-it"])
def test_a_gated_model_is_named_with_its_page_and_the_way_in(model: str) -> None:
    assert describe_gated_model(model) == (
        f"{model} is gated: accept its license at https://huggingface.co/{model}, then export HF_TOKEN or run "
        "hf auth login; grpo fetch tests it"
    )


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-0.5B-Instruct", "./meta-llama/mine", "smoke:sums", ""])
def test_nothing_is_said_of_others(model: str) -> None:
    assert describe_gated_model(model) is None
