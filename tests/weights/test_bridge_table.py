"""The table of weight bridges: each refused cell is refused by name, each of the others has a run that shows it."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import bridge_cells
import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node
from grpo_recipes.recipe.registry import BRIDGES, ON_CPU, ON_GPUS, SETUPS, YES, bridges_for

ROOT = Path(__file__).resolve().parents[2]
CELLS = [(bridge, setup) for bridge in BRIDGES for setup in SETUPS]
SHOWN = [(bridge, setup) for bridge, setup in CELLS if BRIDGES[bridge].serves[setup] in (YES, ON_CPU)]
# A plan of each setup: the keys of a recipe.
KEYS = {
    "single": {"num_processes": 1},
    "ddp": {"num_processes": 2, "accelerator": "ddp"},
    **{name: {"num_processes": 2, "accelerator": name} for name in ("zero2", "zero3", "fsdp2")},
    "custom": {"num_processes": 2},
    "full": {},
    "lora": {"use_peft": True},
    "tensor_parallel": {"vllm_tensor_parallel_size": 2},
    "nodes": {"vllm_node": "own"},
    "colocate": {"vllm_mode": "colocate"},
}


def test_every_bridge_says_something_of_every_setup():
    assert all(bridge.serves.keys() == SETUPS.keys() for bridge in BRIDGES.values())
    assert KEYS.keys() == SETUPS.keys()


def cell_plan(planned, tmp_path, bridge, setup, device="cuda"):
    """The plan of a recipe in which the bridge meets the setup, with what it needs beside."""
    keys = {"weight_sync": bridge, **KEYS[setup]}
    if setup != "full" and BRIDGES[bridge].serves["full"] not in (YES, ON_GPUS, ON_CPU):
        keys["use_peft"] = True
    environment = {}
    if setup == "custom":
        (tmp_path / "mine.yaml").write_text("distributed_type: MULTI_GPU\n")
        environment["CONFIG_FILE"] = str(tmp_path / "mine.yaml")
    nodes = [Node(tuple("0123"), 8, f"10.0.0.{number}", "eth0") for number in (1, 2)] if setup == "nodes" else ()
    return planned(environment=environment, nodes=nodes, device=device, dtype="float32", **keys)


@pytest.mark.parametrize(("bridge", "setup"), CELLS)
def test_what_a_bridge_does_not_serve_is_refused_by_name(planned, tmp_path, bridge, setup):
    served = BRIDGES[bridge].serves[setup]
    if served in (YES, ON_GPUS, ON_CPU):
        devices = ["cuda"] if served == ON_GPUS else ["cpu", "cuda"]
        assert {cell_plan(planned, tmp_path, bridge, setup, device).bridge for device in devices} == {bridge}
        return
    with pytest.raises(ConfigError) as refused:
        cell_plan(planned, tmp_path, bridge, setup)
    said = str(refused.value)
    assert "weight_sync" in said and "Fix: " in said
    if setup != "colocate":  # there weight_sync itself has no meaning
        assert f"{bridge} does not work with {SETUPS[setup]}: {served}. Fix: write " in said
        assert "weight_sync: " in said.partition("Fix: ")[2]


def test_a_bridge_that_needs_gpus_is_refused_on_cpu(planned):
    with pytest.raises(ConfigError, match=r"nccl needs GPUs.* Fix: write weight_sync: file"):
        planned(weight_sync="nccl", device="cpu", dtype="float32")


def test_the_fix_names_bridges_that_serve_the_setup():
    fit = [name for name in BRIDGES if BRIDGES[name].refusal(["zero3", "full"]) is None]
    assert bridges_for(["zero3", "full"]) == fit
    assert "nccl" not in bridges_for(["single"], "cpu") and "file" in bridges_for(["single"], "cpu")


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if BRIDGES[cell[0]].serves[cell[1]] in (YES, ON_CPU)], ids="-".join
)
def test_every_cell_that_says_yes_is_run_on_cpu(cell):
    assert (cell in bridge_cells.RUNS) != (cell in bridge_cells.ELSEWHERE)
    if where := bridge_cells.ELSEWHERE.get(cell):
        file, name = where.split("::")
        found = [one for one in ast.parse((ROOT / file).read_text()).body if isinstance(one, ast.FunctionDef)]
        assert name in [one.name for one in found]


def test_no_run_shows_a_cell_that_is_not_served():
    cells = [*bridge_cells.RUNS, *bridge_cells.ELSEWHERE]
    assert [cell for cell in cells if cell not in SHOWN] == []
    assert all(one != other for one, other in pairwise(sorted(cells)))
