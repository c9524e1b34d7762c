"""Whether a plan fits its GPUs: the key that is named, set to the value that is named, makes it fit."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from grpo_recipes.plan import estimates
from grpo_recipes.plan.devices import find_gpu_memory
from grpo_recipes.plan.estimates import (
    GIB,
    Estimates,
    Need,
    Workload,
    estimate_memory,
    find_needs,
    suggest_fix,
)  # fmt: skip
from grpo_recipes.plan.models import read_model
from grpo_recipes.plan.needs import Disk
from grpo_recipes.plan.speed import Speed
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import read_recipe

from .model_folders import model_folder
from .shipped_models import SHIPPED

REPOSITORY = Path(__file__).parents[2]

KEYS = {"max_prompt_length": 512, "max_completion_length": 1024, "dtype": "bfloat16", "bf16": True,
        "learning_rate": 1e-3, "prompts_per_step": 105, "num_generations": 8,
        "per_device_train_batch_size": 8}  # fmt: skip
GPUS = tuple(str(index) for index in range(8))


@pytest.fixture
def estimate(read, planned, tmp_path):
    """``estimate(GIB_OF_A_GPU, KEY=VALUE, ...)``: the estimate of a 7B model on eight GPUs."""
    model = model_folder(tmp_path / "model")

    def estimate_it(gib, gpus=GPUS, **keys):
        recipe = read(**{**KEYS, "model_name_or_path": model, **keys})
        plan = planned(recipe=recipe, gpus=gpus)
        return Estimates(estimate_memory(recipe, plan, gib), None, Speed(None, 0, None, None))

    return estimate_it


def fits(estimates: Estimates) -> bool:
    return all(need.fits for need in estimates.memory.values())


def fix(estimates: Estimates) -> str:
    return next(need.fix for need in estimates.memory.values() if not need.fits)


def test_a_shipped_size_fits_and_shows_its_parts(estimate):
    memory = estimate(80, accelerator="zero3")
    assert fits(memory) and not any(need.fix for need in memory.memory.values())
    verdict, first, second, _ = memory.lines()
    assert verdict == "verdict    memory and disk space are sufficient"
    assert re.match(r"memory     trainer \d+\.\d of 80\.0 GiB: libraries 1\.0, weights \d", first)
    assert re.match(r"memory     server 75\.0 of 75\.0 GiB: .*KV cache \d\d\.\d, weights in transit 3\.0$", second)


def test_without_the_memory_of_a_gpu_nothing_is_judged(estimate):
    memory = estimate(None, accelerator="ddp")
    assert fits(memory)
    verdict, first, *_ = memory.lines()
    assert verdict == "verdict    no known limit for memory of the trainer, memory of the server"
    assert " of " not in first
    with_disk = replace(memory, disk=Disk({"checkpoints": 10}, 20))
    assert with_disk.verdict() == f"disk space of the run is sufficient; {verdict.removeprefix('verdict    ')}"


@pytest.mark.parametrize(
    ("gib", "keys", "gpus", "key"),
    [
        (80, {"accelerator": "zero3", "gradient_checkpointing": False}, GPUS, "per_device_train_batch_size"),
        (70, {"accelerator": "ddp"}, GPUS, "accelerator"),
        (36, {"accelerator": "zero2"}, GPUS, "accelerator"),
        (70, {"optim": "sgd", "accelerator": "single", "vllm_gpu_memory_utilization": 0.6}, ("0",),
         "vllm_gpu_memory_utilization"),
        (48, {"accelerator": "ddp"}, ("0", "1"), "use_peft"),
        (
            30,
            {"accelerator": "zero3", "gradient_checkpointing": False, "per_device_train_batch_size": 1,
             "max_prompt_length": 1024, "vllm_gpu_memory_utilization": 0.85},
            GPUS,
            "gradient_checkpointing",
        ),
        (16, {"vllm_max_model_length": 32768, "use_peft": True, "vllm_gpu_memory_utilization": 0.97,
              "per_device_train_batch_size": 1, "accelerator": "ddp"}, GPUS, None),
        (24, {"vllm_gpu_memory_utilization": 0.7, "use_peft": True, "accelerator": "ddp",
              "per_device_train_batch_size": 1}, GPUS, "vllm_gpu_memory_utilization"),
        (24, {"vllm_max_model_length": 40960, "vllm_gpu_memory_utilization": 0.85, "use_peft": True,
              "accelerator": "ddp", "per_device_train_batch_size": 1}, GPUS, "vllm_max_model_length"),
    ],
)  # fmt: skip
def test_the_key_that_is_named_makes_it_fit(gib, keys, gpus, key, estimate):
    memory = estimate(gib, gpus, **keys)
    assert not fits(memory)
    assert any(line.endswith(f"Fix: {fix(memory)}") for line in memory.lines())
    if key is None:
        assert "no single key" in fix(memory)
        return
    named = yaml.safe_load(fix(memory))
    assert list(named) == [key]
    assert fits(estimate(gib, gpus, **{**keys, **named}))


def test_a_server_on_rank_0s_gpu_takes_its_share_first(estimate):
    apart, together = (estimate(80, accelerator="ddp", weight_sync=bridge).memory for bridge in ("file", "shared"))
    assert apart["trainer"].available == 80 * GIB and apart["server"].available == int(80 * GIB * 0.9)
    assert together["trainer"].available == pytest.approx(80 * GIB * 0.7) and together["server"].available == int(
        80 * GIB * 0.3
    )
    # A model split over trainers or workers, and an adapter, are refused with it.
    assert together["trainer"].fix == "no single key makes it fit; use larger GPUs"
    keys = {"accelerator": "ddp", "weight_sync": "shared", "vllm_max_model_length": 2048, "optim": "sgd"}
    tight = estimate(60, **keys, per_device_train_batch_size=1, vllm_gpu_memory_utilization=0.2).memory
    assert tight["server"].fix == "no single key makes it fit; use larger GPUs for the server"


def test_a_vllm_that_sleeps_leaves_its_share_to_the_update(estimate):
    keys = {"vllm_mode": "colocate", "accelerator": "zero2", "gradient_checkpointing": True,
            "per_device_train_batch_size": 1, "vllm_gpu_memory_utilization": 0.4}  # fmt: skip
    assert fix(estimate(54, **keys)) == "vllm_enable_sleep_mode: true"
    trainer = estimate(54, **keys, vllm_enable_sleep_mode=True).memory["trainer"]
    # While vLLM generates, it keeps its share next to everything except the update.
    assert trainer.available == 54 * GIB and trainer.parts["vLLM awake"] == int(54 * GIB * 0.4)
    assert trainer.fits and "gradients" not in trainer.parts
    assert not estimate(48, **keys, vllm_enable_sleep_mode=True).memory["trainer"].fits
    plenty = estimate(54, **{**keys, "vllm_gpu_memory_utilization": 0.1}, vllm_enable_sleep_mode=True).memory["trainer"]
    assert "vLLM awake" not in plenty.parts


def test_the_batch_of_trl_keeps_its_size(estimate):
    keys = {"prompts_per_step": None, "gradient_accumulation_steps": 15, "per_device_train_batch_size": 56,
            "accelerator": "zero3", "gradient_checkpointing": False}  # fmt: skip
    size, steps = map(int, re.findall(r": (\d+)", fix(estimate(80, **keys))))
    assert size * steps == 56 * 15
    assert fits(estimate(80, **{**keys, "per_device_train_batch_size": size, "gradient_accumulation_steps": steps}))


def workload(read, planned, model, **keys):
    recipe = read(**{**KEYS, "model_name_or_path": model, **keys})
    return recipe, Workload.of(recipe, planned(recipe=recipe, gpus=GPUS))


def test_larger_gpus_are_named_where_no_key_is_enough(read, planned, tmp_path):
    recipe, work = workload(read, planned, model_folder(tmp_path / "model"))
    larger = "no single key makes it fit; use larger GPUs"
    assert suggest_fix("server", recipe, work, GIB) == f"{larger} for the server"
    for changes, ending in (
        ({}, ", or more GPUs with accelerator: zero3"),
        ({"accelerator": "zero3"}, ", or more GPUs"),
        ({"use_peft": True}, ""),
    ):
        assert suggest_fix("trainer", recipe, Workload({**work, **changes}), GIB) == larger + ending


def test_a_server_is_split_where_one_gpu_is_too_small(read, planned, tmp_path):
    recipe, work = workload(read, planned, model_folder(tmp_path / "model"), vllm_gpu_memory_utilization=0.75)
    device = 16 * GIB
    assert not find_needs(work, device)["server"].fits
    assert suggest_fix("server", recipe, work, device) == "vllm_tensor_parallel_size: 2"
    assert find_needs(Workload({**work, "vllm_tensor_parallel_size": 2}), device)["server"].fits


def test_the_server_needs_room_for_its_longest_sequence(estimate):
    short, long = (estimate(22, vllm_max_model_length=most, weight_sync="file") for most in (2048, 32768))
    assert short.memory["server"].fits
    assert not long.memory["server"].fits


def test_a_transfer_by_nccl_needs_memory_outside_of_the_servers_share(estimate):
    """G2: vLLM's two packed buffers of 1 GiB, and the tensor that filled the first buffer."""
    embedding = 2 * 152064 * 3584
    for gib, fits_in in ((80, True), (24, False)):
        server = estimate(gib, accelerator="zero3").memory["server"]
        assert server.parts["weights in transit"] == 2 * GIB + embedding and server.fits is fits_in
    assert server.fix == "vllm_gpu_memory_utilization: 0.85"
    assert estimate(24, accelerator="zero3", vllm_gpu_memory_utilization=0.85).memory["server"].fits
    assert "weights in transit" not in estimate(24, weight_sync="file").memory["server"].parts


def test_on_cpu_the_parts_are_told_and_nothing_is_judged(read, planned, tmp_path):
    recipe = read(**{**KEYS, "model_name_or_path": model_folder(tmp_path / "model"), "bf16": False})
    memory = estimate_memory(recipe, planned(recipe=recipe, device="cpu"), 1)
    assert all(need.fits for need in memory.values())
    assert "weights in transit" in memory["server"].parts


def test_a_model_that_is_not_here_is_not_guessed(read, planned, tmp_path):
    recipe = read(**{**KEYS, "model_name_or_path": "some/model"})
    names = Names(tmp_path / "runs/fine-now", "fine", "fine", "now")
    result = estimates.estimate(planned(recipe=recipe), recipe, names, 80, None)
    plain = json.loads(json.dumps(asdict(result)))
    assert (plain["memory"], plain["disk"]) == ({}, None) and "grpo fetch" in plain["unknown"]
    assert plain["speed"] == {"seconds": None, "runs": 0, "walltime": None, "steps": None}
    assert result.lines()[0] == "verdict    memory and disk space unknown"
    assert result.lines()[1:3] == [f"{topic:<10} not estimated: {result.unknown}" for topic in ("memory", "disk")]


@pytest.mark.parametrize("folder", sorted(SHIPPED))
def test_shipped_recipes_fit_eight_gpus_of_80_gb(folder, planned, tmp_path):
    config, billions = SHIPPED[folder]
    model = model_folder(tmp_path / "model", config)
    assert read_model(model)["parameters"] == pytest.approx(1e9 * billions, rel=1e-3)
    recipes = sorted((REPOSITORY / "recipes" / folder).rglob("*.yaml"))
    assert recipes
    for path in recipes:
        recipe = read_recipe(path, ["--model_name_or_path", model])
        memory = estimate_memory(recipe, planned(recipe=recipe, gpus=GPUS), 79.6)
        assert all(need.fits for need in memory.values()), (path.name, memory)


def test_every_shipped_model_is_counted():
    folders = {path.name for path in (REPOSITORY / "recipes").iterdir() if path.is_dir()}
    assert folders - {"base", "smoke", "examples", "environments", "atropos"} == SHIPPED.keys()
    paths = [
        path for folder in ("environments", "atropos") for path in (REPOSITORY / "recipes" / folder).glob("*.yaml")
    ]
    models = {read_recipe(path, [])["model_name_or_path"] for path in paths}
    assert {name.rpartition("/")[2] for name in models if not name.startswith("smoke:")} <= SHIPPED.keys()


def test_a_need_in_numbers():
    need = Need({"weights": GIB, "optimizer": 2 * GIB}, 2 * GIB)
    assert (need.total, need.fits, str(need)) == (3 * GIB, False, "3.0 of 2.0 GiB: weights 1.0, optimizer 2.0")


@pytest.mark.parametrize(("printed", "gib"), [
    ("0, GPU-a, 81559\n1, GPU-b, 40536\n", 40536 / 1024), ("0, GPU-a, [N/A]\n", None), ("", None),
])  # fmt: skip
def test_the_driver_names_the_smallest_gpu(printed, gib, tmp_path, monkeypatch):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find_gpu_memory({}) == gib
    for visible in ("0", "GPU-a"):
        assert find_gpu_memory({"CUDA_VISIBLE_DEVICES": visible}) == (gib and 81559 / 1024)
    assert find_gpu_memory({"CUDA_VISIBLE_DEVICES": "MIG-1"}) is None  # a slice has only a part of a GPU


def test_without_a_driver_no_memory_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpu_memory({}) is None
