"""Test the plan of a server with several replicas (``vllm_data_parallel_size``): GPUs, flags, ports, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node
from grpo_recipes.plan.plan import format_gpu_map, format_plan
from grpo_recipes.slurm.client import SlurmJob

EIGHT = tuple("01234567")
NODES = [Node(EIGHT, 8, f"10.0.0.{number}", "eth0") for number in (1, 2)]
STEP = {"prompts_per_step": 105, "num_generations": 8, "per_device_train_batch_size": 8}


@pytest.mark.parametrize(
    ("parallel", "replicas", "gpus"),
    [(1, 2, "0 vLLM server (replica 0), 1 vLLM server (replica 1), 2-7 trainer"),
     (2, 3, "0 1 vLLM server (replica 0), 2 3 vLLM server (replica 1), 4 5 vLLM server (replica 2), 6 7 trainer")],
)  # fmt: skip
def test_replicas_serve_on_the_first_gpus(
    planned: Any, option: Callable[..., str], parallel: int, replicas: int, gpus: str
) -> None:
    plan = planned(gpus=EIGHT, vllm_tensor_parallel_size=parallel, vllm_data_parallel_size=replicas)
    server, trainer = plan.processes
    assert format_gpu_map(plan) == [f"gpus       {gpus}"]
    assert (server.gpus, trainer.gpus) == (EIGHT[: parallel * replicas], EIGHT[parallel * replicas :])
    assert server.environment["CUDA_VISIBLE_DEVICES"] == ",".join(server.gpus)
    assert option(server.argv, "--data-parallel-size") == str(replicas)
    assert option(server.argv, "--api-server-count") == "1"  # it counts all requests and loads adapters
    assert f"vllm       server of {replicas} replicas, weights by nccl " in format_plan(plan)


def test_one_replica_is_the_server_of_before(planned: Any) -> None:
    plan = planned()
    assert plan.replicas == 1 and format_gpu_map(plan) == ["gpus       0 vLLM server, 1-3 trainer"]
    assert not {"--data-parallel-size", "--api-server-count"} & {*plan.process("server").argv}


def test_a_node_of_its_own_is_filled_with_replicas(planned: Any) -> None:
    plan = planned(gpus=EIGHT, nodes=NODES, vllm_node="own", vllm_data_parallel_size=8)
    assert plan.server_gpus == EIGHT and plan.unused_gpus == ()


@pytest.mark.parametrize(
    ("resources", "keys", "message", "fixed"),
    [
        ({"gpus": EIGHT}, {"vllm_data_parallel_size": 8},
         "vllm_data_parallel_size 8 x vllm_tensor_parallel_size 1 leaves no GPU to train on (8 visible). "
         "Fix: set vllm_data_parallel_size: 7 or less", {"vllm_data_parallel_size": 7}),
        ({"gpus": EIGHT}, {"vllm_data_parallel_size": 4, "vllm_tensor_parallel_size": 2},
         "Fix: set vllm_data_parallel_size: 3 or less", {"vllm_data_parallel_size": 3}),
        ({"gpus": EIGHT}, {"vllm_data_parallel_size": 2, "vllm_tensor_parallel_size": 8},
         "Fix: set vllm_tensor_parallel_size: 3 or less", {"vllm_tensor_parallel_size": 3}),
        ({"gpus": EIGHT, "nodes": NODES}, {"vllm_data_parallel_size": 9}, "exceeds the 8 GPUs of the first node",
         {"vllm_data_parallel_size": 8}),
        ({"gpus": ("0",)}, {"vllm_data_parallel_size": 2},
         "vllm_data_parallel_size needs a GPU for each replica, but only one is visible. Fix: remove it, or request",
         {"vllm_data_parallel_size": 1}),
        ({}, {"vllm_data_parallel_size": 2, "vllm_gpu": "shared", "weight_sync": "file"},
         "vllm_gpu: shared and vllm_data_parallel_size above 1 can't be combined", {"vllm_gpu": "own"}),
    ],
)  # fmt: skip
def test_replicas_without_gpus_are_refused_and_the_fix_plans(
    planned: Any, resources: dict[str, Any], keys: dict[str, Any], message: str, fixed: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(**resources, **keys)
    assert message in str(refused.value)
    planned(**resources, **{**keys, **fixed})


@pytest.mark.parametrize(("keys", "name"), [({"weight_sync": "shared"}, "shared"), ({"vllm_mode": "colocate"}, "vllm")])
def test_weights_in_one_place_have_no_replicas(planned: Any, keys: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}.* does not work with vllm_data_parallel_size above 1"):
        planned(gpus=EIGHT, dtype="float32", vllm_data_parallel_size=2, **keys)


def test_on_cpu_each_replica_has_one_thread_and_no_cores_of_its_own(planned: Any) -> None:
    server = planned(device="cpu", vllm_data_parallel_size=2).process("server")
    names = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")
    assert [server.environment[name] for name in names] == ["1", "nobind"]
    mine = {"OMP_NUM_THREADS": "4", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    server = planned(device="cpu", environment=mine, vllm_data_parallel_size=2).process("server")
    assert [server.environment[name] for name in names] == ["4", "0|1"]
    assert not {*names} & planned(device="cpu").process("server").environment.keys()


def test_replicas_do_not_all_try_the_same_internal_port(planned: Any) -> None:
    """Each replica would search from VLLM_PORT and find the same free port."""
    job = SlurmJob(7, "c", 1, None)
    assert "VLLM_PORT" in planned(job=job).process("server").environment
    plan = planned(job=job, vllm_data_parallel_size=2, vllm_tensor_parallel_size=1)
    assert plan.ports.vllm_internal is None and "VLLM_PORT" not in plan.process("server").environment


def test_a_replica_generates_its_part_of_the_completions(planned: Any, option: Callable[..., str]) -> None:
    for replicas, number in ((1, 840), (2, 420), (4, 210)):
        plan = planned(gpus=EIGHT, vllm_data_parallel_size=replicas, **STEP)
        assert plan.max_num_seqs == number and option(plan.process("server").argv, "--max-num-seqs") == str(number)
