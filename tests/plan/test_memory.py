"""The memory estimate: what each option does to its part, and how near it was to recorded peaks."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from grpo_recipes.plan.memory import (
    BYTES,
    GIB,
    ModelShape,
    UnknownShape,
    Workload,
    checkpoint_states,
    sequence_cache,
    server_parts,
    trained,
    trainer_parts,
)

RECORDED = Path(__file__).parents[2] / "bench/results/memory_estimate.json"
SHAPE = ModelShape.of(
    {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    }
)  # fmt: skip
WORK = Workload(
    device="cuda", mode="server", accelerator="ddp", world_size=8, dtype="bfloat16", mixed="bf16",
    optim="adamw_torch_fused", reference=False, checkpointing=True, eager=False, adapter=0, adapted=(), whole=(),
    per_device=4, accumulation=2, sequence=1536, completion=1024, longest=2048, bridge="nccl", parallel=1, share=0.9,
)  # fmt: skip
P = SHAPE.parameters


def parts(**changes) -> dict[str, int]:
    return trainer_parts(SHAPE, replace(WORK, **changes))


def recorded() -> dict:
    return json.loads(RECORDED.read_text())["cases"]


@pytest.mark.parametrize("role", ["trainer", "server"])
@pytest.mark.parametrize("name", sorted(recorded()))
def test_the_estimate_is_within_15_percent_of_the_recorded_peak(name, role):
    case = recorded()[name]
    parts = {"trainer": trainer_parts, "server": server_parts}[role]
    estimate = sum(parts(ModelShape.of(case["config"]), Workload(**case["workload"])).values())
    assert estimate == pytest.approx(case[role]["measured"], rel=0.15)
    assert estimate == case[role]["estimated"], "run python bench/memory_estimate.py --recompute"


def test_three_sizes_were_measured():
    counts = sorted({case["parameters"] for name, case in recorded().items() if name != "constant"})
    assert len(counts) >= 3
    assert all(larger > 2 * smaller for smaller, larger in pairwise(counts))


def test_qwen_7b_has_the_parameters_it_is_known_for():
    assert pytest.approx(7.616e9, rel=1e-3) == P


def test_whole_weights_gradients_and_states_by_dtype():
    low, high = parts(accelerator="single"), parts(accelerator="single", dtype="float32", mixed="no")
    for name, low_bytes, high_bytes in (("weights", 2, 4), ("gradients", 2, 4), ("optimizer", 4, 8)):
        assert (low[name], high[name]) == (low_bytes * P, high_bytes * P)
    assert parts(accelerator="single", dtype="float32")["weights"] == 6 * P  # autocast keeps 16-bit copies
    assert parts(accelerator="single", dtype="auto") == low  # as config.json says


def test_ddp_keeps_gradients_twice():
    assert parts()["gradients"] == 2 * parts(accelerator="single")["gradients"]


def test_zero_shards_what_it_says():
    zero2, zero3 = parts(accelerator="zero2"), parts(accelerator="zero3")
    assert zero2["weights"] == 2 * P
    assert zero2["optimizer"] == zero3["optimizer"] == 12 * P // 8
    assert zero3["weights"] == 2 * (P // 8 + 1_000_000_000)
    assert parts(accelerator="zero3", world_size=16)["optimizer"] == 12 * P // 16
    assert parts(accelerator="zero2", mixed="no")["weights"] == 4 * P


def test_fsdp_shards_float32_weights():
    fsdp = parts(accelerator="fsdp2")
    assert fsdp["optimizer"] == 8 * P // 8
    assert 4 * P // 8 < fsdp["weights"] < 4 * P // 8 + 4 * GIB


@pytest.mark.parametrize(
    ("optim", "per_element"), [("sgd", 0), ("adamw_bnb_8bit", 2), ("paged_adamw_32bit", 8), ("lion_8bit", 1), ("x", 4)]
)
def test_the_optimizer_decides_its_states(optim, per_element):
    assert parts(optim=optim).get("optimizer", 0) == per_element * P


def test_an_adapter_trains_little_and_keeps_the_base_weights():
    lora = parts(accelerator="single", adapter=16, adapted=("all-linear",))
    count = trained(SHAPE, replace(WORK, adapter=16, adapted=("all-linear",)))
    assert lora["weights"] == 2 * P + 4 * count
    assert lora["gradients"] == 4 * count
    assert trained(SHAPE, replace(WORK, adapter=32, adapted=("q_proj",))) == 28 * 32 * (3584 + 3584)
    assert trained(SHAPE, replace(WORK, adapter=16)) < count < P / 50
    whole = trained(SHAPE, replace(WORK, adapter=16, adapted=("all-linear",), whole=("model.lm_head", "q_proj")))
    assert whole == count + SHAPE.embedding + 28 * 3584 * 3584


def test_a_reference_is_a_second_model():
    assert "reference" not in parts()
    assert parts(reference=True)["reference"] == 2 * P
    assert parts(reference=True, accelerator="zero3")["reference"] == 2 * P // 8


@pytest.mark.parametrize(
    ("changes", "direction"),
    [
        ({"checkpointing": False}, 1),
        ({"per_device": 8}, 1),
        ({"sequence": 3072}, 1),
        ({"eager": True}, 1),
        ({"per_device": 2}, -1),
    ],
)
def test_activations_follow_batch_length_and_checkpointing(changes, direction):
    assert (parts(**changes)["activations"] > parts()["activations"]) == (direction > 0)


def test_logits_are_a_tile_never_batch_by_sequence_by_vocabulary():
    whole = 4 * WORK.per_device * WORK.completion * SHAPE.vocabulary
    gradient = (4 + 2) * SHAPE.embedding
    assert parts()["output layer"] - gradient < whole / 5
    assert parts(per_device=64)["output layer"] < 2 * parts(per_device=8)["output layer"]


def test_one_pass_a_step_has_no_gradients_beside_its_activations():
    once = parts(accumulation=1, per_device=64, checkpointing=False)
    assert "gradients" not in once
    assert "activations" in once
    assert {"gradients", "activations"} <= parts(per_device=64, checkpointing=False).keys()


def test_the_file_bridge_sends_a_copy():
    small = {"device": "cpu", "adapter": 16, "per_device": 1, "sequence": 16, "completion": 8, "accelerator": "single"}
    assert parts(**small, bridge="file")["weights in transit"] == 2 * P
    assert "weights in transit" not in parts(**small, bridge=None)


def test_transformers_generation_keeps_a_cache_for_every_completion():
    cached = parts(mode="transformers", sequence=32768, accumulation=64, bridge=None)
    assert cached["KV cache"] == 4 * 64 * 32768 * 2 * 28 * 4 * 128 * 2


def test_a_server_is_split_over_its_gpus():
    one, two = server_parts(SHAPE, WORK), server_parts(SHAPE, replace(WORK, parallel=2))
    assert one["weights"] == 2 * P == 2 * two["weights"]
    assert sequence_cache(SHAPE, WORK, 100) == 2 * sequence_cache(SHAPE, replace(WORK, parallel=2), 100)
    assert sequence_cache(SHAPE, WORK, 1) == 2 * 28 * 4 * 128 * 2


def test_a_checkpoint_holds_the_states_of_all_processes():
    assert checkpoint_states(SHAPE, WORK) == 4 * P
    assert checkpoint_states(SHAPE, replace(WORK, accelerator="zero3")) == 12 * P + 2 * P


def test_the_workload_of_a_plan(planned, read):
    keys = {"max_prompt_length": 100, "max_completion_length": 300, "beta": 0.1, "attn_implementation": "eager"}
    recipe = read(**keys, dtype="bfloat16", optim="sgd", gradient_checkpointing=False, accelerator="zero2")
    work = Workload.of(recipe, planned(recipe=recipe))
    assert (work.sequence, work.completion, work.longest) == (400, 300, 2048)
    assert (work.reference, work.eager, work.checkpointing) == (True, True, False)
    assert (work.accelerator, work.world_size, work.optim, work.mixed) == ("zero2", 3, "sgd", "bf16")
    assert work.element(SHAPE) == BYTES["bfloat16"]
    adapted = read(**keys, use_peft=True, lora_r=8, lora_target_modules=["q_proj"], lora_modules_to_save=["lm_head"])
    work = Workload.of(adapted, planned(recipe=adapted))
    assert (work.reference, work.adapter, work.adapted, work.whole) == (False, 8, ("q_proj",), ("lm_head",))


@pytest.mark.parametrize(
    ("keys", "environment", "said"),
    [
        ({"vllm_max_model_length": None}, {}, "max_prompt_length"),
        ({}, {"CONFIG_FILE": __file__}, "CONFIG_FILE"),
    ],
)
def test_what_cannot_be_estimated_is_said(keys, environment, said, planned, read):
    recipe = read(**keys)
    with pytest.raises(UnknownShape, match=said):
        Workload.of(recipe, planned(recipe=recipe, environment=environment))
