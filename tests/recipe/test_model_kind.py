"""M2: `grpo check` says what can be trained of a model that reads pictures, and rejects an encoder-decoder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.model_kind import check_unused_weights, kind_note

PICTURES = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"depth": 1}}


def model(folder: Path, **config: object) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def problems_of_kind(recipe, environment=None) -> list[str]:
    problems = check(recipe, environment or {}, "cuda")
    return [str(problem) for problem in problems if "pictures" in problem.what or "encoder" in problem.what]


@pytest.fixture(params=[True, False], ids=["with torchvision", "without"])
def torchvision(request, monkeypatch: pytest.MonkeyPatch) -> bool:
    find = importlib.util.find_spec
    spec = find("json") if request.param else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "torchvision" else find(name))
    return request.param


def test_a_model_with_pictures_is_rejected_if_vllm_cannot_serve_it(tmp_path, read, torchvision) -> None:
    name = model(tmp_path / "model", **PICTURES)
    problems = problems_of_kind(read(model_name_or_path=name))
    if torchvision:
        assert problems == []
    else:
        (problem,) = problems
        assert "without torchvision" in problem and "or set use_vllm: false" in problem
    assert problems_of_kind(read(model_name_or_path=name, use_vllm=False)) == []
    assert problems_of_kind(read()) == []


def test_a_model_with_pictures_in_the_cache_is_known_too(tmp_path, read) -> None:
    commit = tmp_path / "hub/models--a--b/snapshots/1234"
    commit.parent.mkdir(parents=True)
    model(commit, **PICTURES)
    recipe = read(model_name_or_path="a/b")
    note = "a/b reads pictures; only its text part is trained, on prompts without pictures"
    assert kind_note(recipe, {"HF_HOME": str(tmp_path)}) == note
    assert kind_note(recipe, {"HF_HOME": str(tmp_path / "other")}) == ""


@pytest.mark.parametrize("text", ["", "[]", "{", '{"vision_config": null}'])
def test_a_damaged_or_plain_configuration_is_not_a_model_with_pictures(tmp_path, read, text: str) -> None:
    recipe = read(model_name_or_path=model(tmp_path / "model"))
    (tmp_path / "model/config.json").write_text(text)
    assert kind_note(recipe, {}) == "" and problems_of_kind(recipe) == []


def test_an_encoder_decoder_is_rejected(tmp_path, read) -> None:
    name = model(tmp_path / "model", architectures=["T5ForConditionalGeneration"], is_encoder_decoder=True)
    (problem,) = problems_of_kind(read(model_name_or_path=name, use_vllm=False))
    assert "the model is an encoder-decoder, and GRPO trains only decoders" in problem
    assert "Fix: set model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct or another text model" in problem


@pytest.mark.parametrize("replicas", [2, "auto"])
@pytest.mark.parametrize("config", [{"num_experts": 8}, {"text_config": {"n_routed_experts": 64}}], ids=str)
def test_replicas_of_a_mixture_of_experts_are_rejected(tmp_path, read, config, replicas) -> None:
    """vLLM shards experts over all replicas, so the guard would find no replica with the whole model."""
    keys = {"model_name_or_path": model(tmp_path / "model", **config), "vllm_data_parallel_size": replicas}
    problems = [str(problem) for problem in check(read(**keys), {}, "cuda")]
    assert any(
        "mixture of experts" in problem and problem.endswith("Fix: set vllm_data_parallel_size: 1")
        for problem in problems
    )
    for changed in ({"vllm_data_parallel_size": 1}, {"model_name_or_path": model(tmp_path / "dense", num_experts=0)}):
        problems = check(read(**{**keys, **changed}), {}, "cuda")
        assert not [problem for problem in problems if "experts" in problem.what]


def test_several_ddp_trainers_of_a_model_with_pictures_need_unused_weights(tmp_path, read) -> None:
    """DDP waits for gradients of the weights for pictures, and step 2 failed."""
    keys = {"model_name_or_path": model(tmp_path / "model", **PICTURES)}
    with pytest.raises(ConfigError, match="Fix: set ddp_find_unused_parameters: true"):
        check_unused_weights(read(**keys), {}, "ddp", 2)
    check_unused_weights(read(**keys), {}, "fsdp2", 2)
    check_unused_weights(read(**keys), {}, "ddp", 1)
    for fixed in ({"ddp_find_unused_parameters": True}, {"gradient_checkpointing": False}, {"use_peft": True}):
        check_unused_weights(read(**keys, **fixed), {}, "ddp", 2)
    check_unused_weights(read(), {}, "ddp", 2)


SCORER = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (SCORER, None),
        ({**SCORER, "architectures": ["Qwen2ForCausalLM"]}, "for sequence classification, got Qwen2ForCausalLM"),
        ({"architectures": SCORER["architectures"]}, "expected a model with 1 label, got 2"),
        (None, "has no config.json, so it is not a model folder"),
    ],
)
def test_a_folder_in_reward_funcs_is_a_reward_model(tmp_path, read, config: dict | None, fault: str | None) -> None:
    folder = tmp_path / "scorer"
    model(folder, **config) if config else folder.mkdir()
    problems = check(read(reward_funcs=["format_tags", str(folder)]), {})
    assert [fault in problem.what for problem in problems] == ([True] if fault else [])


def test_a_reward_model_of_the_hub_has_the_form_of_a_hub_id(read) -> None:
    assert check(read(reward_funcs=["acme/reward-model"]), {}) == []
    (problem,) = check(read(reward_funcs=["acme/models/reward"]), {})
    assert problem.what == "'acme/models/reward' is not a local folder or a hub id"
