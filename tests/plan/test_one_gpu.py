"""``weight_sync: shared`` on GPUs: server and rank 0 have one, as the memory that they share has."""

from __future__ import annotations

import pytest

from grpo_recipes.doctor import recipes
from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node
from grpo_recipes.plan.plan import describe

SHARED = {"weight_sync": "shared", "dtype": "float32"}
NODES = [Node(tuple("0123"), 8, f"10.0.0.{number}", "eth0") for number in (1, 2)]


@pytest.mark.parametrize("gpus", [("0",), ("0", "1", "2"), ("GPU-bbbb", "GPU-aaaa")])
def test_rank_0_sees_the_servers_gpu_first_and_the_other_ranks_the_next(planned, option, gpus):
    plan = planned(gpus=gpus, **SHARED)
    server, trainer = plan.processes
    assert (plan.mode, plan.bridge, plan.unused_gpus) == ("server", "shared", ())
    assert server.gpus == gpus[:1] and trainer.gpus == gpus
    assert trainer.after == ("server",) and trainer.beside == (), "it starts when vLLM has taken its memory"
    assert server.environment["CUDA_VISIBLE_DEVICES"] == gpus[0]
    assert trainer.environment["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
    assert plan.batch.world_size == len(gpus) and option(trainer.argv, "--num_processes") == str(len(gpus))


def test_vllm_leaves_room_on_its_gpu_as_a_colocated_one_does(planned, option):
    plan = planned(**SHARED)
    assert option(plan.process("server").argv, "--gpu-memory-utilization") == "0.3"
    note = "vLLM takes 0.3 of GPU 0 (vllm_gpu_memory_utilization), and rank 0 trains on the rest of it"
    assert note in plan.notes and note in describe(plan)
    plan = planned(**SHARED, vllm_gpu_memory_utilization=0.4)
    assert option(plan.process("server").argv, "--gpu-memory-utilization") == "0.4"
    assert option(planned(weight_sync="nccl").process("server").argv, "--gpu-memory-utilization") == "0.9"


def test_a_gpu_less_is_used_where_one_process_trains(planned):
    plan = planned(**SHARED, num_processes=1)
    assert plan.process("trainer").gpus == ("0",) and plan.unused_gpus == ("1", "2", "3")


def test_a_gpu_of_both_counts_once(planned, tmp_path, monkeypatch):
    plan = planned(gpus=("MIG-aaaa",), **SHARED)
    assert not any("MIG" in note and "NCCL" in note for note in plan.notes)
    case = type("Case", (), {"plan": planned(**SHARED)})()
    assert "GPUs: 4" in recipes.gpu_plan(case).value


def test_on_several_nodes_rank_0_is_on_the_servers(planned):
    plan = planned(nodes=NODES, accelerator="ddp", **SHARED)
    server, first, second = plan.processes
    assert (server.node, first.node, second.node) == (0, 0, 1)
    assert server.gpus == ("0",) and first.gpus[0] == "0"
    with pytest.raises(ConfigError, match="shared does not work with server and rank 0 on two nodes"):
        planned(nodes=NODES, accelerator="ddp", vllm_node="own", **SHARED)


@pytest.mark.parametrize("gpus", [("0", "1"), ("0", "1", "2")])
def test_more_than_one_worker_is_refused(planned, gpus):
    with pytest.raises(ConfigError, match="shared does not work with vllm_tensor_parallel_size above 1"):
        planned(gpus=gpus, vllm_tensor_parallel_size=2, **SHARED)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_that_has_no_handle_for_another_process_is_refused(planned, name):
    setting = {name: "max_split_size_mb:512,expandable_segments:True"}
    with pytest.raises(ConfigError, match=f"{name}: memory in expandable segments has no handle.*Fix: remove exp"):
        planned(environment=setting, **SHARED)
    planned(environment=setting, weight_sync="nccl")
    planned(environment=setting, device="cpu", **SHARED)


def test_memory_that_goes_with_its_server_takes_the_trainers_along(planned):
    assert planned(**SHARED).process("server").on_loss == "restart with trainers"
    assert planned(device="cpu", **SHARED).process("server").on_loss == "restart"
