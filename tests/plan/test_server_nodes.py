"""The plan of a server whose replicas are on several nodes (``vllm_data_parallel_size_local``)."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Node
from grpo_recipes.plan.plan import format_gpu_map, format_plan
from grpo_recipes.plan.ports import choose_free_ports
from grpo_recipes.recipe import Recipe
from grpo_recipes.slurm.client import SlurmJob

EIGHT, LOCAL = tuple("01234567"), "vllm_data_parallel_size_local"
TWO_BY_TWO = {"vllm_data_parallel_size": 4, LOCAL: 2, "vllm_tensor_parallel_size": 2}
# vLLM's own parser reads the words that TRL's wrapper hands on, or those of our module.
PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser

names = ("size", "size_local", "address", "rpc_port", "start_rank", "rank", "hybrid_lb", "external_lb")
for words in json.loads(sys.argv[1]):
    parsed = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(words)
    ServeSubcommand().validate(parsed)
    values = [getattr(parsed, f"data_parallel_{name}") for name in names]
    print("parsed", json.dumps([*values, parsed.headless, parsed.api_server_count]))
"""


def nodes(count: int, gpus: tuple[str, ...] = EIGHT) -> list[Node]:
    return [Node(gpus, 8, f"10.0.0.{number + 1}", "eth0") for number in range(count)]


CPU = {"device": "cpu", "nodes": nodes(2, ()), "vllm_data_parallel_size": 2, LOCAL: 1}


@pytest.mark.parametrize("place", ["own", "shared"])
def test_replicas_are_on_the_first_gpus_of_the_first_nodes(planned: Any, option: Any, place: str) -> None:
    plan = planned(gpus=EIGHT, nodes=nodes(3), vllm_node=place, prompts_per_step=32, **TWO_BY_TWO)
    head, headless, *trainers = plan.processes
    assert [(process.name, process.node, process.gpus) for process in (head, headless)] == [
        ("server", 0, ("0", "1", "2", "3")),
        ("server_1", 1, ("0", "1", "2", "3")),
    ]
    assert [process.environment["CUDA_VISIBLE_DEVICES"] for process in (head, headless)] == ["0,1,2,3"] * 2
    assert [process.environment["VLLM_HOST_IP"] for process in (head, headless)] == ["10.0.0.1", "10.0.0.2"]
    assert headless.log.endswith("_node1.log") and headless.label == "vllm serve --headless"
    replicas = ["0 1 vLLM server (replica 0), 2 3 vLLM server (replica 1)"]
    replicas += ["0 1 vLLM server (replica 2), 2 3 vLLM server (replica 3)"]
    rest = "4-7 unused" if place == "own" else "4-7 trainer"
    lines = [f"gpus       node {node}: {gpus}, {rest}" for node, gpus in enumerate(replicas)]
    assert format_gpu_map(plan) == [*lines, "gpus       node 2: 0-7 trainer"]
    assert [trainer.node for trainer in trainers] == ([2] if place == "own" else [0, 1, 2])
    assert plan.server_apart is (place == "own") and plan.replicas == 4
    text = format_plan(plan)
    assert "vllm       server of 4 replicas on 2 nodes, weights by nccl " in text and "replicas 29550, " in text


def test_only_the_first_node_accepts_requests(planned: Any, option: Any) -> None:
    head, headless, *_ = planned(gpus=EIGHT, nodes=nodes(2), **TWO_BY_TWO).processes
    one_node, *_ = planned(gpus=EIGHT, nodes=nodes(2), vllm_data_parallel_size=4).processes
    shared = ("--data-parallel-size", "--data-parallel-size-local", "--data-parallel-address")
    for process in (head, headless):
        assert [option(process.argv, flag) for flag in shared] == ["4", "2", "10.0.0.1"]
        assert option(process.argv, "--data-parallel-rpc-port") == "29550"
    assert option(head.argv, "--api-server-count") == "1" and "--headless" not in head.argv
    assert "--api-server-count" not in headless.argv and "--headless" in headless.argv
    assert option(headless.argv, "--data-parallel-start-rank") == "2"
    assert not {"--data-parallel-size-local", "--data-parallel-rpc-port"} & {*one_node.argv}
    assert head.on_loss == headless.on_loss and head.ready == headless.ready == "serving"


def test_all_replicas_on_one_node_are_the_server_of_before(planned: Any) -> None:
    plans = [planned(gpus=EIGHT, nodes=nodes(2), vllm_data_parallel_size=2, **keys) for keys in ({}, {LOCAL: 2})]
    assert plans[0].as_json() == plans[1].as_json() and plans[0].ports.replicas is None
    assert plans[0].server_nodes == 1


def test_weights_go_through_the_run_directory(planned: Any) -> None:
    plan = planned(**CPU)
    assert not plan.server_apart and plan.why_bridge == "no GPU: safetensors in the run directory"
    assert [process.name for process in plan.processes] == ["server", "server_1", "trainer", "trainer_1"]
    assert {process.environment["GRPO_SYNC_DIR"] for process in plan.processes} == {"runs/unnamed-stamp/sync"}
    apart = planned(**{**CPU, "nodes": nodes(3, ())}, vllm_node="own")
    assert [(process.role, process.node) for process in apart.processes] == [
        ("server", 0), ("server", 1), ("trainer", 2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("resources", "keys", "message", "fixed"),
    [
        ({"nodes": nodes(2)}, {"vllm_data_parallel_size": 3, LOCAL: 1},
         "vllm_data_parallel_size_local 1 needs 3 nodes for 3 replicas, but the run has 2. "
         "Fix: remove vllm_data_parallel_size_local, or submit with --nodes=3", {LOCAL: None}),
        ({}, {"vllm_data_parallel_size": 2, LOCAL: 1}, "but the run has 1. Fix: remove", {LOCAL: None}),
        ({}, {"vllm_data_parallel_size": 2, LOCAL: 1, "vllm_node": "own"},
         "but the run has 1. Fix: remove vllm_data_parallel_size_local, or submit with --nodes=3",
         {LOCAL: None, "vllm_node": "shared"}),
        ({"nodes": nodes(2)}, {"vllm_data_parallel_size": 2, LOCAL: 1, "vllm_node": "own"},
         "vllm_node: own, but the server is on all 2 nodes. Fix: set vllm_node: shared", {"vllm_node": "shared"}),
        ({"nodes": nodes(3)}, {"vllm_data_parallel_size": 6, LOCAL: 3, "vllm_tensor_parallel_size": 4},
         "vllm_data_parallel_size_local 3 x vllm_tensor_parallel_size 4 exceeds the 8 GPUs of each node. Fix: "
         "set vllm_data_parallel_size_local: 2 and vllm_data_parallel_size: 4, or request more GPUs",
         {LOCAL: 2, "vllm_data_parallel_size": 4}),
        ({"nodes": nodes(2)}, {"vllm_data_parallel_size": 16, LOCAL: 8},
         "leaves no GPU to train on (8 visible). Fix: set vllm_data_parallel_size_local: 7 and "
         "vllm_data_parallel_size: 14", {LOCAL: 7, "vllm_data_parallel_size": 14}),
        ({"nodes": nodes(3)}, {"vllm_data_parallel_size": 2, LOCAL: 1, "vllm_tensor_parallel_size": 9},
         "vllm_tensor_parallel_size 9 exceeds the 8 GPUs of each node. Fix: set vllm_tensor_parallel_size: 8",
         {"vllm_tensor_parallel_size": 8}),
        ({"nodes": nodes(2)}, {"vllm_data_parallel_size": 2, LOCAL: 1, "weight_sync": "shared", "dtype": "float32"},
         "shared does not work with vllm_data_parallel_size above 1", {"weight_sync": "file"}),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_and_the_fix_plans(
    planned: Any, resources: dict[str, Any], keys: dict[str, Any], message: str, fixed: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(gpus=EIGHT, **resources, **keys)
    assert message in str(refused.value)
    changed = {key: value for key, value in {**keys, **fixed}.items() if value is not None}
    planned(gpus=EIGHT, **resources, **changed)


def test_nodes_without_a_gpu_to_train_on_are_too_few(planned: Any) -> None:
    keys = {"vllm_data_parallel_size": 2, LOCAL: 1}
    with pytest.raises(ConfigError, match=r"leaves no GPU to train on \(1 visible\)\. Fix: request another node"):
        planned(gpus=("0",), nodes=nodes(2, ("0",)), **keys)
    planned(gpus=("0",), nodes=nodes(3, ("0",)), **keys)


def test_replicas_meet_at_a_port_of_the_job(planned: Any, read: Callable[..., Recipe]) -> None:
    plan = planned(**CPU, job=SlurmJob(7, "c", 2, None))
    assert plan.ports.replicas == 20073 and plan.ports.vllm_internal is None
    recipe = read(vllm_data_parallel_size=2, **{LOCAL: 1})
    chosen, _ = choose_free_ports(recipe, plan.ports, "127.0.0.1")
    again, _ = choose_free_ports(recipe, plan.ports, "127.0.0.1")  # this process has reserved it
    numbers = [chosen.replicas, chosen.server, chosen.group, chosen.main_process]
    assert chosen == again and len({*numbers}) == 4


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("wrapped", [False, True], ids=["module", "trl"])
def test_vllms_own_parser_accepts_both_commands(planned: Any, monkeypatch: pytest.MonkeyPatch, wrapped: bool) -> None:
    if wrapped:
        from trl.scripts.vllm_serve import build_command, make_parser

        installed = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0" if name == "vllm" else installed(name))
    commands = [process.argv for process in planned(gpus=EIGHT, nodes=nodes(2), **TWO_BY_TWO).processes[:2]]
    words = [argv[argv.index("--model") :] for argv in commands]
    if wrapped:
        parsed = [make_parser().parse_args_and_config(argv, return_remaining_strings=True) for argv in words]
        words = [build_command(*arguments)[4:] for arguments in parsed]

    output = subprocess.run(
        [sys.executable, "-c", PARSER, json.dumps(words)], capture_output=True, text=True, timeout=300, check=False
    )

    lines = [line.removeprefix("parsed ") for line in output.stdout.splitlines() if line.startswith("parsed ")]
    assert [json.loads(line) for line in lines] == [
        [4, 2, "10.0.0.1", 29550, None, None, False, False, False, 1],
        [4, 2, "10.0.0.1", 29550, 2, None, False, False, True, None],
    ], output.stderr
