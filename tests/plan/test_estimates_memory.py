"""The memory estimate: the effect of each option, and the distance from recorded peaks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from grpo_recipes.fetch.assets import Assets
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.models import UnknownShape, compute_model_sizes
from grpo_recipes.plan.needs import GIB
from grpo_recipes.plan.plan import with_sources
from grpo_recipes.plan.workload import _CUDA_CONTEXT, _GAPS, _ZERO3_LIVE, Workload

from .model_folders import QWEN_7B, model_folder
from .shipped_models import SHIPPED

RESULTS = Path(__file__).parents[2] / "bench/results"
WORK = {
    **compute_model_sizes(QWEN_7B), "device": "cuda", "mode": "server", "accelerator": "ddp", "world_size": 8,
    "dtype": "bfloat16", "low": True, "optim": "adamw_torch_fused", "reference": False,
    "gradient_checkpointing": True,
    "attn_implementation": None, "use_peft": False, "lora_r": 16, "lora_modules_to_save": None,
    "per_device_train_batch_size": 4,
    "completions": 8, "sequence": 1536, "completion": 1024,
    "vllm_max_model_length": 2048, "vllm_max_num_seqs": 840, "bridge": "nccl", "vllm_tensor_parallel_size": 1,
    "vllm_gpu_memory_utilization": 0.9, "vllm_enable_sleep_mode": False, "gpu_shared": False, "fsdp_cpu_offload": False,
    "replicas": 1, "teacher": {}, "reward_models": [], "cpu_kv_cache": GIB,
}  # fmt: skip
P = WORK["parameters"]
LAYER_SIDES = 7 * 3584 + 2 * (28 + 4) * 128 + 3 * 18944  # inputs and outputs of the linear layers


def work(**changes) -> Workload:
    return Workload({**WORK, **changes})


def parts(**changes) -> dict[str, int]:
    return work(**changes).trainer()


def recorded() -> dict:
    return json.loads((RESULTS / "memory_estimate.json").read_text())["cases"]


def recorded_on_gpu() -> dict:
    return json.loads((RESULTS / "gpu_step.json").read_text())["memory"]


GPU_ROWS = [(lengths, trainer) for lengths, trainers in recorded_on_gpu()["found"].items() for trainer in trainers]


@pytest.mark.parametrize("role", ["trainer", "server"])
@pytest.mark.parametrize("name", sorted(recorded()))
def test_the_estimate_is_within_15_percent_of_the_recorded_peak(name, role):
    case = recorded()[name]
    run = Workload({**case["workload"], **compute_model_sizes(case["config"])})
    estimate = sum({"trainer": run.trainer, "server": run.server}[role]().values())
    assert estimate == pytest.approx(case[role]["measured"], rel=0.15)
    assert estimate == case[role]["estimated"], "run python bench/memory_estimate.py --recompute"


@pytest.mark.parametrize(("lengths", "trainer"), GPU_ROWS)
def test_the_estimate_is_at_most_12_percent_above_the_recorded_memory_of_a_gpu(lengths, trainer):
    """M14: no row of docs/measurements.md is estimated below the memory that the GPU held."""
    record = recorded_on_gpu()
    row = record["found"][lengths][trainer]
    rows = row["tokens_per_micro_batch"] // record["workload"]["sequence"]
    run = Workload({**record["workload"], "per_device_train_batch_size": rows})
    parts = run.trainer()
    assert 1 <= sum(parts.values()) / (row["reserved"] + row["beside torch"]) <= 1.12
    tensors = sum(size for name, size in parts.items() if name not in ("libraries", "allocator gaps"))
    assert 1 <= tensors / row["allocated"] <= 1.06
    estimated = {name: size for name, size in row["estimated"].items() if name != "total"}
    assert parts == estimated, "run python bench/gpu_step.py --recompute"


def test_the_constants_of_a_gpu_cover_every_recorded_row():
    """M14: the context of CUDA, and the gaps of torch's allocator, are just above the largest that was measured."""
    rows = [row for trainers in recorded_on_gpu()["found"].values() for row in trainers.values()]
    assert len(rows) == 8
    assert 1 <= _CUDA_CONTEXT / max(row["beside torch"] for row in rows) < 1.05
    assert 0 <= _GAPS - max(row["reserved"] / row["allocated"] - 1 for row in rows) < 0.01


def test_vllm_inside_a_trainer_on_cpu_adds_its_cache_and_weights_alone():
    # Recorded for the smoke recipe in two processes: a peak of 1.75 GiB each, including 1.0 GiB without vLLM.
    apart, inside = (work(device="cpu", mode=mode, bridge=None).server() for mode in ("server", "colocate"))
    assert apart.pop("libraries") > inside.pop("libraries") == 0
    assert apart == inside and inside["KV cache"] == GIB


def test_the_server_on_cpu_has_the_kv_cache_of_the_recipe(planned, read, tmp_path):
    """``vllm_args`` sets its size."""
    keys = {"model_name_or_path": str(model_folder(tmp_path, QWEN_7B)), "vllm_args": {"kv_cache_memory_bytes": 2**29}}
    plan = planned(device="cpu", **keys)
    assert Workload.of(read(**keys), plan).server()["KV cache"] == 2**29


def test_three_sizes_were_measured():
    counts = sorted({case["parameters"] for name, case in recorded().items() if name != "constant"})
    assert len(counts) >= 3
    assert all(larger > 2 * smaller for smaller, larger in pairwise(counts))


def test_qwen_7b_has_the_parameters_it_is_known_for():
    assert pytest.approx(7.616e9, rel=1e-3) == P


def test_whole_weights_gradients_and_states_by_dtype():
    low, high = parts(accelerator="single"), parts(accelerator="single", dtype="float32", low=False)
    for name, low_bytes, high_bytes in (("weights", 2, 4), ("gradients", 2, 4), ("optimizer", 4, 8)):
        assert (low[name], high[name]) == (low_bytes * P, high_bytes * P)
    assert parts(accelerator="single", dtype="auto") == low  # as config.json says


def test_autocast_keeps_16_bit_copies_of_float32_weights_during_a_forward_pass():
    copies, whole = 2 * 28 * WORK["layer"], {"accelerator": "single", "dtype": "float32"}
    assert parts(**whole, gradient_checkpointing=False)["16-bit copies"] == copies
    # With gradient checkpointing they are gone before the backward pass, which is worse only with many tokens.
    few, many = (parts(**whole, per_device_train_batch_size=size, completions=512) for size in (1, 64))
    assert few["16-bit copies"] == copies and "16-bit copies" not in many
    assert few["activations"] < work(**whole, per_device_train_batch_size=1).activations
    for changes in ({}, {"dtype": "bfloat16"}, {"accelerator": "zero2"}, {"accelerator": "fsdp2"}, {"low": False}):
        changed = work(**{**whole, **changes})
        assert changed.autocast_copies == (0 if changes else copies)
    frozen = {**whole, "use_peft": True, "bridge": "lora"}
    assert [
        work(**frozen, gradient_checkpointing=checkpointing).autocast_copies for checkpointing in (True, False)
    ] == [0, copies]


def test_gaps_of_the_allocator_grow_with_the_tensors_of_a_gpu():
    sizes = parts()
    gaps = sizes.pop("allocator gaps")
    assert gaps == int(0.16 * (sum(sizes.values()) - sizes["libraries"]))
    assert "allocator gaps" not in parts(device="cpu")


def test_nccl_is_counted_if_several_gpus_or_its_weight_sync_use_it():
    alone = {"world_size": 1, "accelerator": "single"}
    assert parts(**alone, bridge=None)["libraries"] == GIB * 4 // 5
    assert parts(**alone)["libraries"] == parts(bridge=None)["libraries"] == GIB


def test_ddp_keeps_gradients_twice():
    assert parts()["gradients"] == 2 * parts(accelerator="single")["gradients"]


def test_zero_shards_what_it_says():
    zero2, zero3 = parts(accelerator="zero2"), parts(accelerator="zero3")
    assert zero2["weights"] == 2 * P
    assert zero2["optimizer"] == zero3["optimizer"] == 12 * P // 8
    assert zero3["weights"] == 2 * (P // 8 + 1_000_000_000)
    assert parts(accelerator="zero3", world_size=16)["optimizer"] == 12 * P // 16
    assert parts(accelerator="zero2", low=False)["weights"] == 4 * P


def test_fsdp_shards_float32_weights():
    fsdp = parts(accelerator="fsdp2")
    assert fsdp["optimizer"] == 8 * P // 8
    assert 4 * P // 8 < fsdp["weights"] < 4 * P // 8 + 4 * GIB


def test_what_fsdp_offloads_to_the_cpu_is_not_on_the_gpu():
    resident = parts(accelerator="fsdp2", reference=True)
    offloaded = parts(accelerator="fsdp2", reference=True, fsdp_cpu_offload=True)
    assert offloaded.keys() & {"optimizer", "gradients", "reference"} == set()
    assert resident["weights"] - offloaded["weights"] == 4 * P // 8 and 0 < offloaded["weights"] < 4 * GIB
    assert offloaded["activations"] == parts(accelerator="fsdp2", completions=4)["activations"]
    sizes = work(accelerator="fsdp2"), work(accelerator="fsdp2", fsdp_cpu_offload=True)
    assert sizes[0].checkpoint() == sizes[1].checkpoint()
    assert parts(fsdp_cpu_offload=True) == parts(), "only fsdp2 offloads"


@pytest.mark.parametrize(
    ("optim", "per_element"),
    [
        ("sgd", 0),
        ("adamw_bnb_8bit", 2),
        ("paged_adamw_32bit", 8),
        ("lion_8bit", 1),
        ("x", 4),
        ("adamw_torch_4bit", 1),
        ("paged_ademamix_8bit", 3),
        ("ademamix", 6),
    ],
)
def test_the_optimizer_decides_its_states(optim, per_element):
    assert parts(optim=optim).get("optimizer", 0) == per_element * P


def test_an_adapter_trains_little_and_keeps_the_base_weights():
    lora, count = parts(accelerator="single", use_peft=True, bridge="lora"), work(use_peft=True).trained
    assert count == 28 * 16 * LAYER_SIDES < P / 50
    assert lora["weights"] == 2 * P + 4 * count
    assert lora["gradients"] == 4 * count
    assert work(use_peft=True, lora_r=32).trained == 2 * count
    assert work(use_peft=True, lora_modules_to_save=["lm_head"]).trained == count + WORK["embedding"]


def test_a_reference_is_a_second_model():
    assert "reference" not in parts()
    assert parts(reference=True)["reference"] == 2 * P
    assert parts(reference=True, accelerator="zero3")["reference"] == 2 * P // 8
    assert "reference" not in parts(reference=True, use_peft=True)  # the model under the adapter is it


def test_a_teacher_is_a_model_of_its_own_size_in_the_type_of_the_forward_pass():
    sizes = compute_model_sizes({**QWEN_7B, "num_hidden_layers": 40, "intermediate_size": 30_000})
    count, gathered = sizes["parameters"], 2 * (sizes["layer"] + sizes["embedding"])
    assert "teacher" not in parts()
    for keys in ({}, {"dtype": "float32"}, {"use_peft": True}, {"accelerator": "zero2"}):
        assert parts(teacher=sizes, **keys)["teacher"] == 2 * count
    assert parts(teacher=sizes, dtype="float32", low=False)["teacher"] == 4 * count
    assert parts(teacher=sizes, accelerator="zero3")["teacher"] == 2 * (count // 8 + _ZERO3_LIVE)
    assert parts(teacher=sizes, accelerator="fsdp2")["teacher"] == 2 * (gathered + count // 8)
    assert parts(teacher=sizes, accelerator="fsdp2", fsdp_cpu_offload=True)["teacher"] == 2 * gathered
    wide = {**sizes, "intermediate": 10**7}
    assert parts(teacher=wide)["activations"] > parts(teacher=sizes)["activations"] == parts()["activations"]


def test_reward_models_are_copies_that_score_all_completions_in_one_pass():
    sizes = compute_model_sizes(QWEN_7B)
    count = sizes["parameters"]
    assert "reward models" not in parts()
    assert parts(reward_models=[sizes, sizes])["reward models"] == 2 * 2 * count
    assert parts(reward_models=[sizes], accelerator="fsdp2")["reward models"] == 2 * count
    assert parts(reward_models=[sizes], accelerator="zero3")["reward models"] == 2 * (count // 8 + _ZERO3_LIVE)
    many = {"completions": 1000}
    assert parts(reward_models=[sizes], **many)["activations"] > parts(**many)["activations"]


def test_the_plan_reads_the_size_of_a_reward_model(planned, read, tmp_path):
    keys = {"max_prompt_length": 100, "model_name_or_path": model_folder(tmp_path / "model")}
    scorer = {**QWEN_7B, "num_hidden_layers": 2, "architectures": ["Qwen2ForSequenceClassification"]}
    scorer["id2label"] = {"0": "LABEL_0"}
    recipe = read(**keys, reward_funcs=["format_tags", model_folder(tmp_path / "scorer", scorer)])
    plan = with_sources(planned(recipe=recipe), recipe, Resources("cuda", ("0",), 8), Assets([], []))
    assert [sizes["layers"] for sizes in Workload.of(recipe, plan)["reward_models"]] == [2]
    assert plan.reward_models == (str(tmp_path / "scorer"),)


def test_the_plan_reads_the_size_of_the_teacher(planned, read, tmp_path):
    keys = {"max_prompt_length": 100, "model_name_or_path": model_folder(tmp_path / "model")}
    recipe = read(
        **keys, teacher_model_name_or_path=model_folder(tmp_path / "teacher", {**QWEN_7B, "num_hidden_layers": 2})
    )
    plan = planned(recipe=recipe)
    assert Workload.of(recipe, plan)["teacher"]["layers"] == 2
    assert plan.teacher == str(tmp_path / "teacher")


@pytest.mark.parametrize(
    ("changes", "direction"),
    [
        ({"gradient_checkpointing": False}, 1),
        ({"per_device_train_batch_size": 8}, 1),
        ({"sequence": 3072}, 1),
        ({"attn_implementation": "eager"}, 1),
        ({"per_device_train_batch_size": 2}, -1),
    ],
)
def test_activations_follow_batch_length_and_checkpointing(changes, direction):
    assert (work(**changes).activations > work().activations) == (direction > 0)


def test_queries_and_keys_that_are_normalised_head_by_head_count():
    config, _ = SHIPPED["Qwen3-4B"]
    with_norms, plain = (compute_model_sizes({**config, "model_type": kind}) for kind in ("qwen3", "llama"))
    added = work(**with_norms).activations - work(**plain).activations
    assert added == 4 * 1536 * (32 + 8) * 128 * 8  # tokens, width of queries and keys, bytes of a norm


def test_zeros_of_a_config_are_estimated_all_the_same():
    nothing = compute_model_sizes({**dict.fromkeys(QWEN_7B, 0), "model_type": "qwen2", "head_dim": 128})
    assert work(**nothing).sequence_cache(100) == 0
    assert work(**nothing).checkpoint() == 0


def test_logits_are_a_tile_never_batch_by_sequence_by_vocabulary():
    whole = 4 * 4 * 1024 * WORK["vocabulary"]
    gradient = (4 + 2) * WORK["embedding"]
    assert parts()["output layer"] - gradient < whole / 5
    assert work(per_device_train_batch_size=64).output_layer < 2 * work(per_device_train_batch_size=8).output_layer


def test_the_worst_moment_of_a_step_counts():
    assert {"gradients", "activations"} <= parts().keys()
    # DeepSpeed's optimizer step copies the gradients to float32, and counts if it needs more than a backward pass.
    tiny = {"per_device_train_batch_size": 1, "sequence": 16, "completion": 8, "accelerator": "zero2", "world_size": 1}
    assert parts(**tiny)["gradients"] == 2 * (P + 500_000_000) + 4 * P
    assert "activations" not in parts(**tiny)


def test_one_pass_a_step_has_no_gradients_beside_its_activations():
    wide = {"per_device_train_batch_size": 64, "gradient_checkpointing": False}
    once = parts(**wide, completions=64)
    assert "gradients" not in once and "activations" in once
    assert {"gradients", "activations"} <= parts(**wide, completions=128).keys()


def test_the_file_bridge_sends_a_copy():
    short = {"per_device_train_batch_size": 1, "sequence": 16, "completion": 8}
    small = {**short, "device": "cpu", "use_peft": True, "accelerator": "single"}
    assert parts(**small, bridge="file")["weights in transit"] == 2 * P
    assert "weights in transit" not in parts(**small, bridge=None)


def test_rank_0_has_the_buffers_of_a_transfer_by_nccl():
    """G2: they are the worst moment of a run that trains little, at most the weights themselves."""
    small = {"per_device_train_batch_size": 1, "sequence": 16, "completion": 8, "use_peft": True}
    assert parts(**small)["weights in transit"] == 2 * GIB + 2 * WORK["embedding"]
    assert work(parameters=10**8).packed_buffers == 2 * 10**8
    assert "weights in transit" not in parts(**small, bridge="lora")


def test_transformers_generation_keeps_a_cache_for_every_completion():
    cached = parts(mode="transformers", sequence=32768, completions=4 * 64, bridge=None)
    assert cached["KV cache"] == 4 * 64 * 32768 * 2 * 28 * 4 * 128 * 2


def test_a_server_is_split_over_its_gpus():
    single, double = work(), work(vllm_tensor_parallel_size=2)
    assert single.server()["weights"] == 2 * P == 2 * double.server()["weights"]
    assert single.sequence_cache(100) == 2 * double.sequence_cache(100)
    assert single.sequence_cache(1) == 2 * 28 * 4 * 128 * 2
    split = work(vllm_tensor_parallel_size=28)  # each GPU's part of the MLP is narrower than the model
    assert split.server()["activations"] == 8192 * 4 * 3584 * 2


def test_a_server_on_cpu_has_the_parts_and_caches_of_all_its_workers():
    single, double = (work(device="cpu", vllm_tensor_parallel_size=size).server() for size in (1, 2))
    assert single["weights"] == double["weights"] and 2 * single["KV cache"] == double["KV cache"]


def test_replicas_have_their_own_weights_and_cache() -> None:
    """On a GPU the need is that of one of the server's GPUs, on CPU that of the whole server."""
    assert work(replicas=2).server() == work().server()
    one, two = (work(device="cpu", bridge="file", replicas=count).server() for count in (1, 2))
    assert two == {name: size if name == "libraries" else 2 * size for name, size in one.items()}


def test_a_server_of_float32_weights_holds_them_in_the_precision_of_the_trainer():
    """G4: weights and KV cache of the server are half of the trainer's weights, except if both share one copy."""
    low, shared = work(dtype="float32"), work(dtype="float32", bridge="shared")
    assert (low.server()["weights"], shared.server()["weights"]) == (2 * P, 4 * P)
    assert 2 * low.sequence_cache(100) == shared.sequence_cache(100)


def test_a_checkpoint_holds_the_states_of_all_processes():
    assert work().checkpoint() == 2 * P + 4 * P
    assert work(accelerator="zero3").checkpoint() == 2 * P + 12 * P + 2 * P


def test_the_workload_of_a_plan(planned, read, tmp_path):
    keys = {"max_prompt_length": 100, "max_completion_length": 300, "beta": 0.1, "attn_implementation": "eager",
            "model_name_or_path": model_folder(tmp_path / "model")}  # fmt: skip
    recipe = read(**keys, dtype="bfloat16", optim="sgd", gradient_checkpointing=False, accelerator="zero2")
    workload = Workload.of(recipe, planned(recipe=recipe))
    assert (workload["sequence"], workload["completion"], workload["vllm_max_model_length"]) == (400, 300, 2048)
    assert (workload["reference"], workload["gradient_checkpointing"], workload["low"]) == (True, False, True)
    assert (workload["accelerator"], workload["world_size"], workload["optim"]) == ("zero2", 3, "sgd")
    assert workload.element == 2 and workload.keys() == WORK.keys()
    adapted = read(**keys, use_peft=True, lora_r=8, lora_modules_to_save=["lm_head"])
    workload = Workload.of(adapted, planned(recipe=adapted))
    assert (workload["use_peft"], workload["lora_r"], workload["lora_modules_to_save"]) == (True, 8, ["lm_head"])


@pytest.mark.parametrize(
    ("keys", "environment", "message"),
    [
        ({"vllm_max_model_length": None}, {}, "max_prompt_length"),
        ({}, {"CONFIG_FILE": "custom.yaml"}, "CONFIG_FILE"),
    ],
)
def test_what_cannot_be_estimated_is_said(keys, environment, message, planned, read, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("custom.yaml").write_text("distributed_type: MULTI_GPU\n")
    recipe = read(model_name_or_path=model_folder(tmp_path / "model"), **keys)
    with pytest.raises(UnknownShape, match=message):
        Workload.of(recipe, planned(recipe=recipe, environment=environment))
