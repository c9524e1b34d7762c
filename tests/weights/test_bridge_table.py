"""The table of weight bridges: each refused cell is refused by name, each of the others has a run that shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import bridge_cells
import pytest

from grpo_recipes import cli
from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node, Resources, environment_device
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.registry import (
    COLOCATE,
    NOT_WITH_LORA,
    ON_CPU,
    ON_GPUS,
    SETUPS,
    SYNC_METHODS,
    SYNC_TABLE,
    YES,
    sync_methods_for,
)

ROOT = Path(__file__).resolve().parents[2]
SMOKE = str(ROOT / "recipes/smoke/grpo.yaml")
CELLS = [(way, setup) for way in SYNC_TABLE for setup in SETUPS]
SERVED = (YES, ON_GPUS, ON_CPU)
SHOWN = [(way, setup) for way, setup in CELLS if SYNC_TABLE[way].serves[setup] in (YES, ON_CPU)]
# A plan of each setup: the keys of a recipe.
KEYS = {
    "single": {"num_processes": 1},
    "ddp": {"num_processes": 2, "accelerator": "ddp"},
    **{name: {"num_processes": 2, "accelerator": name} for name in ("zero2", "zero3", "fsdp2")},
    "custom": {"num_processes": 2},
    "full": {},
    "lora": {"use_peft": True},
    "tensor_parallel": {"vllm_tensor_parallel_size": 2},
    "replicas": {"vllm_data_parallel_size": 2},
    "nodes": {"vllm_node": "own"},
}

Ask = Callable[..., str | None]


def test_every_way_says_something_of_every_setup():
    assert all(method.serves.keys() == SETUPS.keys() for method in SYNC_TABLE.values())
    assert KEYS.keys() == SETUPS.keys() and SYNC_TABLE.keys() == {*SYNC_METHODS, COLOCATE}


@pytest.fixture(params=["check", "plan"])
def asks(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def ask(asks: str, read: Callable[..., Recipe], tmp_path: Path) -> Ask:
    """``ask(way, setup, device, KEY=VALUE)``: the bridge of a right recipe that meets the setup; a ConfigError says no.

    `grpo check` and `grpo plan` are both asked, the plan without the check before it.
    """

    def asked(way: str, setup: str, device: str = "cuda", **changes: Any) -> str | None:
        keys = {"vllm_mode": COLOCATE} if way == COLOCATE else {"weight_sync": way}
        keys |= {**KEYS[setup], "dtype": "float32", **changes}
        if way == COLOCATE:
            keys |= {"nodes": {"vllm_node": "shared"}, "tensor_parallel": {"num_processes": 2}}.get(setup, {})
        environment = {"CACHE_ROOT": str(tmp_path / "cache")}
        if setup == "custom":
            (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_GPU\n")
            environment["CONFIG_FILE"] = str(tmp_path / "mine.yaml")
        recipe = read((), environment, **keys)
        if asks == "check":
            if problems := check(recipe, environment, device):
                raise ConfigError(*problems)
            return None if way == COLOCATE else str(recipe["weight_sync"])
        nodes = [Node(tuple("0123"), 8, f"10.0.0.{number}", "eth0") for number in (1, 2)] if setup == "nodes" else ()
        resources = Resources(device, tuple("0123") if device == "cuda" else (), 8, None, tuple(nodes))
        return make_plan(recipe, resources, environment).bridge

    return asked


def said(ask: Ask, *arguments: str, **changes: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        ask(*arguments, **changes)
    return str(refused.value)


def needed(way: str, setup: str) -> dict[str, Any]:
    """Return the keys that a cell's recipe needs besides its setup: an adapter, if the way sends only adapters."""
    return {"use_peft": True} if setup != "full" and SYNC_TABLE[way].serves["full"] not in SERVED else {}


@pytest.mark.parametrize(("way", "setup"), CELLS)
def test_what_a_way_does_not_serve_is_refused_by_name(ask, way, setup):
    served = SYNC_TABLE[way].serves[setup]
    if served in SERVED:
        devices = ["cuda"] if ON_GPUS in SYNC_TABLE[way].serves.values() else ["cpu", "cuda"]
        bridges = {ask(way, setup, device, **needed(way, setup)) for device in devices}
        assert bridges == {None if way == COLOCATE else way}
        return
    answer = said(ask, way, setup, **needed(way, setup))
    assert f"{way} does not work with {SETUPS[setup]}: {served}. Fix: write " in answer
    fix = answer.rpartition("Fix: ")[2]
    if way == "lora" and setup in NOT_WITH_LORA:
        assert fix == "write accelerator: ddp or zero2"  # with LoRA no other bridge works either
    else:
        assert "weight_sync: " in fix


@pytest.mark.parametrize("setup", SETUPS)
def test_the_co_located_row_is_enforced(ask, asks, setup, monkeypatch):
    served = {**SYNC_TABLE[COLOCATE].serves, setup: "of a test"}
    monkeypatch.setitem(SYNC_TABLE, COLOCATE, replace(SYNC_TABLE[COLOCATE], serves=served))
    if (asks, setup) == ("check", "nodes"):  # only the plan has the nodes of the job
        assert ask(COLOCATE, setup) is None
        return
    answer = said(ask, COLOCATE, setup)
    assert f"vllm_mode: colocate does not work with {SETUPS[setup]}: of a test. " in answer
    assert "vllm_mode: server and weight_sync: file or nccl or " in answer.partition("Fix: write ")[2]


def test_a_bridge_has_no_meaning_inside_the_trainers(read):
    (problem,) = check(read(vllm_mode="colocate", weight_sync="file"), {}, "cuda")
    assert "weight_sync does nothing with vllm_mode: colocate" in str(problem)


@pytest.mark.parametrize(
    ("way", "setup", "device", "changes", "fix"),
    [
        ("nccl", "single", "cpu", {},
         "nccl needs GPUs, this is a CPU environment. Fix: write weight_sync: file or shared"),
        ("shared", "fsdp2", "cpu", {}, "Fix: write weight_sync: file or restart"),
        ("shared", "fsdp2", "cuda", {}, "Fix: write weight_sync: file or nccl or restart"),
        ("lora", "zero3", "cpu", {"use_peft": True}, "Fix: write accelerator: ddp or zero2"),
        ("shared", "fsdp2", "cuda", {"use_peft": True}, "Fix: write accelerator: ddp or zero2"),
        ("lora", "full", "cpu", {}, "Fix: write use_peft: true, or weight_sync: file or shared or restart"),
        ("lora", "zero3", "cpu", {}, "Fix: write weight_sync: file or restart"),
        # vLLM's Triton kernels for adapters assert 16 bits (lora_shrink_op.py); its code for CPU does not.
        ("lora", "single", "cuda", {"use_peft": True, "bf16": False},
         "lora needs bf16 or fp16 on GPUs: vLLM's kernels for adapters do not compute in float32. "
         "Fix: write bf16: true, or weight_sync: file"),
        # accelerator: auto takes ZeRO-2 for weights in 16 bits.
        ("shared", "single", "cpu", {"dtype": "bfloat16", "num_processes": 2},
         "DeepSpeed ZeRO-2: DeepSpeed keeps the weights in its own buffers. "
         "Fix: write dtype: float32, or weight_sync: file or restart"),
    ],
)  # fmt: skip
def test_the_fix_is_one_that_nothing_else_refuses(ask, way, setup, device, changes, fix):
    assert fix in said(ask, way, setup, device, **changes)


@pytest.mark.skipif(environment_device() != "cpu", reason="of a CPU environment")
@pytest.mark.parametrize("command", ["check", "plan"])
@pytest.mark.parametrize(
    ("flags", "config", "named"),
    [
        (("shared", "--dtype", "bfloat16", "--num_processes", "2"), False, "DeepSpeed ZeRO-2"),
        (("shared",), True, "CONFIG_FILE"),
        (("nccl",), False, "nccl needs GPUs, this is a CPU environment"),
    ],
)
def test_grpo_check_refuses_what_grpo_plan_refuses(command, flags, config, named, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_CPU\n")
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "mine.yaml") if config else "")
    assert cli.main([command, SMOKE, "--weight_sync", *flags]) == 2
    told = capsys.readouterr()
    assert named in told.out + told.err and "Fix: " in told.out + told.err


def test_the_fix_names_bridges_that_serve_the_setup():
    fit = [name for name in SYNC_METHODS if SYNC_METHODS[name].refusal(["zero3", "full"]) is None]
    assert sync_methods_for(["zero3", "full"]) == fit
    assert "nccl" not in sync_methods_for(["single"], "cpu") and "file" in sync_methods_for(["single"], "cpu")


@pytest.fixture(scope="module")
def collected() -> set[str]:
    """The tests of the files that show cells, each with its parameters, as pytest collects them."""
    files = {"tests/e2e/test_bridges.py", *(test.partition("::")[0] for test in bridge_cells.ELSEWHERE.values())}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
@pytest.mark.parametrize("cell", SHOWN, ids="-".join)
def test_every_cell_that_says_yes_is_run_on_cpu(cell, collected):
    assert (cell in bridge_cells.RUNS) != (cell in bridge_cells.ELSEWHERE)
    test_id = f"tests/e2e/test_bridges.py::test_the_server_has_the_weights_of_every_step[{'-'.join(cell)}]"
    assert bridge_cells.ELSEWHERE.get(cell, test_id) in collected


def test_no_run_shows_a_cell_that_is_not_served():
    cells = [*bridge_cells.RUNS, *bridge_cells.ELSEWHERE]
    assert [cell for cell in cells if cell not in SHOWN] == []
    assert all(cell != other for cell, other in pairwise(sorted(cells)))
