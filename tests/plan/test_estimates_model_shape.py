"""The sizes that a config.json tells, against the models transformers builds from it."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from grpo_recipes.plan.models import _KNOWN, UnknownShape, compute_model_sizes, read_model

SIZES = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", sorted(_KNOWN))
def test_parameters_are_those_of_the_built_model(kind, tied):
    config = AutoConfig.for_model(kind, **SIZES, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert compute_model_sizes(config.to_dict())["parameters"] == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_numbers_a_file_may_leave_out():
    plain = {key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")}
    llama = compute_model_sizes({**plain, "model_type": "llama", "torch_dtype": "bfloat16"})
    assert (llama["queries"], llama["keys"], llama["kv_heads"], llama["saved"]) == (64, 64, 4, "bfloat16")
    gemma = compute_model_sizes({**plain, "model_type": "gemma"})
    assert llama["parameters"] - gemma["parameters"] == gemma["embedding"]  # gemma ties its embeddings by default


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**SIZES, "model_type": "mixtral"}, "type 'mixtral'"),
        ({"model_type": "qwen2", "hidden_size": 8}, "intermediate_size"),
        ({**SIZES, "model_type": "qwen2", "hidden_size": "wide"}, "wide"),
        ({**SIZES, "model_type": "qwen2", "num_attention_heads": 0, "head_dim": None}, "Zero"),
        ([], "not a JSON mapping"),
    ],
)
def test_what_is_not_counted_is_said(config, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownShape, match=message):
        read_model(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"), [(None, "grpo fetch"), ("{", "not a JSON mapping"), ("\udcff", "not a JSON mapping")]
)
def test_a_model_that_is_not_here_or_broken(text, message, tmp_path):
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UnknownShape, match=message):
        read_model(str(tmp_path))


def test_a_name_that_no_folder_can_have():
    with pytest.raises(UnknownShape, match="not on this machine"):
        read_model("x" * 300)
