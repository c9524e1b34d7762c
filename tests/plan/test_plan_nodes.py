"""The plan of a run on several nodes: which node serves and trains, ranks, addresses, ports."""

from __future__ import annotations

import json

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node, Resources, spread_processes
from grpo_recipes.plan.plan import format_plan
from grpo_recipes.slurm.client import SlurmJob

EIGHT = tuple("01234567")


def gpu_nodes(count: int, gpus: tuple[str, ...] = EIGHT) -> list[Node]:
    return [Node(gpus, 64, f"10.0.0.{node + 1}", "ib0", f"n{node + 1}") for node in range(count)]


def cpu_nodes(count: int) -> list[Node]:
    return [Node((), 8, f"10.0.0.{node + 1}") for node in range(count)]


@pytest.mark.parametrize(
    ("processes", "rooms", "shares"),
    [(15, [7, 8], [7, 8]), (12, [7, 8], [6, 6]), (16, [7, 8, 8, 8], [4, 4, 4, 4]), (30, [7, 8, 8, 8], [7, 8, 8, 7]),
     (3, [0, 8, 8], [0, 2, 1]), (1, [3, 3], [1, 0])],
)  # fmt: skip
def test_processes_are_spread_as_evenly_as_there_is_room(processes, rooms, shares):
    assert spread_processes(processes, rooms) == shares


@pytest.mark.parametrize("count", [2, 4])
def test_the_first_gpus_of_the_first_node_serve_and_all_others_train(planned, option, count):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(count), prompts_per_step=8 * count - 1, num_generations=2)
    server, *trainers = plan.processes
    assert (server.role, server.node, server.gpus) == ("server", 0, ("0",))
    assert [(trainer.role, trainer.node, len(trainer.gpus)) for trainer in trainers] == [
        ("trainer", node, 8 if node else 7) for node in range(count)
    ]
    assert plan.batch.world_size == 8 * count - 1 and plan.unused_gpus == ()
    for machine, trainer in enumerate(trainers):
        assert option(trainer.argv, "--machine_rank") == str(machine)
        assert option(trainer.argv, "--num_machines") == str(count)
        # accelerate divides by the machines. torch adds up the processes of each machine.
        assert int(option(trainer.argv, "--num_processes")) // count == len(trainer.gpus)
        assert option(trainer.argv, "--main_process_ip") == "10.0.0.1"
        assert option(trainer.argv, "--main_process_port") == str(plan.ports.main_process)
        assert trainer.environment["CUDA_VISIBLE_DEVICES"] == ",".join(trainer.gpus)
        assert trainer.environment["GRPO_NODE"] == str(machine)


def test_the_server_listens_where_the_other_nodes_reach_it(planned, option):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(2))
    server, first, second = plan.processes
    assert option(server.argv, "--host") == option(second.argv, "--vllm_server_host") == "10.0.0.1"
    assert [process.environment["VLLM_HOST_IP"] for process in plan.processes] == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    for process in plan.processes:
        assert process.environment["NCCL_SOCKET_IFNAME"] == "=ib0"  # not ib01, which begins with ib0
        assert process.environment["GLOO_SOCKET_IFNAME"] == "ib0"
        assert {"10.0.0.1", "10.0.0.2"} <= set(process.environment["NO_PROXY"].split(","))
    assert first.log != second.log and second.log.endswith("_node1.log")
    assert (first.name, second.name) == ("trainer", "trainer_1")


def test_an_interface_the_user_exported_stays(planned):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(2), environment={"NCCL_SOCKET_IFNAME": "^docker"})
    assert all("NCCL_SOCKET_IFNAME" not in process.environment for process in plan.processes)
    assert all(process.environment["GLOO_SOCKET_IFNAME"] == "ib0" for process in plan.processes)


def test_a_host_the_recipe_names_is_literal(planned, option):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(2), vllm_server_host="10.9.9.9")
    assert option(plan.process("server").argv, "--host") == plan.server_host == "10.9.9.9"


def test_the_server_can_have_a_node_of_its_own(planned, option):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(3), vllm_node="own", vllm_tensor_parallel_size=2, prompts_per_step=16)
    server, *trainers = plan.processes
    assert (server.node, server.gpus) == (0, ("0", "1"))
    assert [(process.node, len(process.gpus), option(process.argv, "--machine_rank")) for process in trainers] == [
        (1, 8, "0"),
        (2, 8, "1"),
    ]
    assert option(trainers[0].argv, "--main_process_ip") == "10.0.0.2"
    assert plan.unused_gpus == tuple(f"{gpu} of node 0" for gpu in EIGHT[2:])
    assert any(note == f"GPU {', '.join(plan.unused_gpus)} is unused" for note in plan.notes)
    assert plan.server_apart and not any("GRPO_SYNC_DIR" in process.environment for process in plan.processes)


def test_weights_go_through_the_run_directory_where_server_and_rank_0_share_no_memory(planned):
    apart = planned(device="cpu", nodes=cpu_nodes(2), vllm_node="own")
    assert {process.environment["GRPO_SYNC_DIR"] for process in apart.processes} == {"runs/unnamed-stamp/sync"}
    assert apart.why_bridge == "no GPU: safetensors in the run directory"
    shared = planned(device="cpu", nodes=cpu_nodes(2))
    assert not shared.server_apart and not any("GRPO_SYNC_DIR" in process.environment for process in shared.processes)


@pytest.mark.parametrize(
    ("keys", "counts"),
    [({}, [1, 1]), ({"num_processes": 3}, [2, 1]), ({"num_processes": 4}, [2, 2]),
     ({"num_processes": 2, "vllm_node": "own"}, [0, 2])],
)  # fmt: skip
def test_cpu_processes_are_spread_over_the_nodes(planned, option, keys, counts):
    plan = planned(device="cpu", nodes=cpu_nodes(2), **keys)
    trainers = [process for process in plan.processes if process.trains]
    processes = [0, 0]
    for trainer in trainers:
        processes[trainer.node] = int(option(trainer.argv, "--num_processes")) // len(trainers)
    assert processes == counts
    assert {option(trainer.argv, "--num_cpu_threads_per_process") for trainer in trainers} == {str(plan.threads)}
    assert plan.threads == 7 // max(counts)


def test_colocated_processes_train_on_every_gpu_of_every_node(planned):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(2), vllm_mode="colocate", prompts_per_step=16)
    assert [(process.role, process.node, len(process.gpus)) for process in plan.processes] == [
        ("trainer", 0, 8),
        ("trainer", 1, 8),
    ]


def test_one_gpu_a_node_is_enough_for_a_server(planned):
    plan = planned(gpus=("0",), nodes=gpu_nodes(2, ("0",)))
    assert [(process.role, process.node) for process in plan.processes] == [("server", 0), ("trainer", 1)]
    assert plan.mode == "server" and plan.server_apart


@pytest.mark.parametrize(
    ("nodes", "keys", "message"),
    [
        (
            gpu_nodes(2),
            {"accelerator": "single"},
            r"no process \(1 trainer\). Fix: submit with --nodes=1",
        ),
        (gpu_nodes(4), {"prompts_per_step": 1, "num_generations": 3}, "--nodes=3, or raise prompts_per_step, or set"),
        (cpu_nodes(3), {"num_processes": 2}, "node 2 would have no process"),
        (gpu_nodes(2), {"vllm_tensor_parallel_size": 9}, "exceeds the 8 GPUs of the first node"),
        (gpu_nodes(2), {"vllm_node": "own", "use_vllm": False}, "there is no server"),
        ([], {"vllm_node": "own"}, "there is only one node. Fix: set vllm_node: shared"),
        ([*gpu_nodes(1), Node((), 8, "10.0.0.2")], {}, "no GPU is visible on node 1"),
    ],
)
def test_nodes_that_would_do_nothing_are_refused(planned, nodes, keys, message):
    device = "cpu" if nodes and not nodes[0].gpus else "cuda"
    with pytest.raises(ConfigError, match=message):
        planned(device=device, gpus=EIGHT, nodes=nodes, **keys)


def test_a_plan_of_several_nodes_is_readable(planned):
    plan = planned(gpus=EIGHT, nodes=gpu_nodes(2))
    text = format_plan(plan)
    for fact in ("nodes      2: 10.0.0.1, 10.0.0.2", "trainer_1", "node 1, GPU 0, 1"):
        assert fact in text
    assert [process["node"] for process in json.loads(json.dumps(plan.as_json()))["processes"]] == [0, 0, 1]


def test_without_the_nodes_they_are_taken_to_be_alike():
    resources = Resources("cuda", EIGHT, 64, SlurmJob(7, "c", 2, None))
    assert [(node.gpus, node.cores) for node in resources.on_nodes(2).nodes] == [(EIGHT, 64)] * 2
    assert resources.on_nodes(1).nodes == () and resources.all_nodes()[0].address == "127.0.0.1"
