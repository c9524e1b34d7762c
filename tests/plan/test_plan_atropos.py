"""The plan of a run with Atropos: run-api, environments, their addresses, ports and order."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict
from graphlib import TopologicalSorter

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import list_assets
from grpo_recipes.plan.devices import Node
from grpo_recipes.plan.plan import format_plan
from grpo_recipes.plan.ports import Ports, choose_free_ports, plan_ports, require_named_ports
from grpo_recipes.plan.types import Plan, Process
from grpo_recipes.recipe import Recipe
from grpo_recipes.slurm.client import SlurmJob

pytest.importorskip("atroposlib")

GROUPS = {
    "dataset_name": None, "atropos_environment": "arithmetic", "reward_funcs": ["environment"], "max_steps": 10,
}  # fmt: skip
TWO = {
    **GROUPS, "atropos_environment": None,
    "atropos_mixture": {"environments": [{"id": "arithmetic", "weight": 3}, {"id": "dataset", "min_allocation": 0.25}]},
}  # fmt: skip
THEIRS = {"atropos_api_url": "http://api.example:9000/"}
Planned = Callable[..., Plan]
Read = Callable[..., Recipe]
Option = Callable[[list[str], str], str]


def roles(plan: Plan) -> list[str]:
    return [process.role for process in plan.processes]


def process_of(plan: Plan, role: str) -> Process:
    process = plan.process(role)
    assert process is not None
    return process


def test_run_api_and_environments_are_processes_beside_server_and_trainers(planned: Planned, option: Option) -> None:
    plan = planned(**TWO, weight_sync="file")
    assert roles(plan) == ["run-api", "server", "trainer", "environment-arithmetic", "environment-dataset"]
    api, server, trainer, first, second = plan.processes
    assert api.argv == [
        sys.executable, "-P", "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", "8001"
    ]  # fmt: skip
    assert (api.ready, api.ready_url) == ("answering", "http://127.0.0.1:8001/info")
    for index, process in enumerate((first, second)):
        assert process.argv[:5] == [sys.executable, "-P", "-m", "grpo_recipes.extensions.atropos.serve", str(index)]
        assert option(process.argv, "--api-url") == "http://127.0.0.1:8001"
        assert option(process.argv, "--server-url") == "http://127.0.0.1:8000"
        assert (process.ready, process.on_loss, process.with_trainers) == ("started", "restart", True)
        assert process.until_trained
        assert process.environment["WANDB_MODE"] == "disabled"
    assert option(trainer.argv, "--atropos_api_url") == "http://127.0.0.1:8001"
    assert (api.on_loss, api.with_trainers, api.until_trained) == ("restart with trainers", True, True)
    assert (server.on_loss, server.with_trainers, server.until_trained) == ("restart", False, False)
    for process in (api, first, second):
        assert (process.environment["CUDA_VISIBLE_DEVICES"], process.gpus, process.node) == ("", (), 0)
        assert process.environment["OMP_NUM_THREADS"] == "1", "they leave the cores to the trainers"
    assert api.log == "logs/liv_run-api_unnamed_stamp.log" and first.log == "logs/liv_env-arithmetic_unnamed_stamp.log"


def test_nothing_starts_before_what_it_asks(planned: Planned) -> None:
    plan = planned(**TWO)
    order = list(TopologicalSorter({process.role: process.after for process in plan.processes}).static_order())
    assert order == roles(plan)
    assert process_of(plan, "trainer").after == ("server", "run-api")
    assert process_of(plan, "environment-dataset").after == ("run-api", "server")


def test_a_server_that_trainers_cannot_join_again_goes_with_them(planned: Planned) -> None:
    server = process_of(planned(**GROUPS, weight_sync="nccl"), "server")
    assert (server.on_loss, server.with_trainers) == ("restart with trainers", True)


def test_a_run_api_of_the_users_is_asked_and_not_started(planned: Planned, option: Option) -> None:
    plan = planned(**GROUPS, **THEIRS)
    assert roles(plan) == ["server", "trainer", "environment-arithmetic"] and not plan.ports.extensions
    assert process_of(plan, "trainer").after == process_of(plan, "environment-arithmetic").after == ("server",)
    for role, flag in (("trainer", "--atropos_api_url"), ("environment-arithmetic", "--api-url")):
        assert option(process_of(plan, role).argv, flag) == "http://api.example:9000"
    alone = planned(**{**GROUPS, "atropos_environment": None}, **THEIRS)
    assert roles(alone) == ["server", "trainer"]
    assert alone.data is not None and alone.data.text.startswith("your environments; 48 sequences")
    assert alone.data.text.endswith("your run-api at http://api.example:9000 (restart it for each attempt)")


def test_a_recipe_without_atropos_has_none_of_it(planned: Planned) -> None:
    plan = planned()
    assert roles(plan) == ["server", "trainer"] and plan.data is None and not plan.ports.extensions
    assert "--atropos_api_url" not in process_of(plan, "trainer").argv and "run-api" not in format_plan(plan)


def test_a_plan_says_where_groups_come_from(planned: Planned) -> None:
    plan = planned(**TWO, atropos_max_staleness=1)
    told = format_plan(plan, argv=False).splitlines()
    assert (
        "groups     arithmetic (weight 75%), dataset (weight 25%, first 25%); 48 sequences (12 groups of 4) a "
        "batch, at most 1 step old; run-api at http://127.0.0.1:8001"
    ) in told
    assert f"ports      server 8000, weights 51216, run-api 8001, trainers {plan.ports.main_process}" in told
    assert not [line for line in told if line.startswith(("dataset ", "episodes "))]
    assert "environment-dataset log logs/liv_env-dataset_unnamed_stamp.log" in told
    assert "of any age" in str(planned(**GROUPS, atropos_max_staleness=None).data)


def test_what_is_registered_is_a_generation_also_of_several_steps(planned: Planned) -> None:
    keys = {"prompts_per_step": None, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    plan = planned(**GROUPS, **keys, steps_per_generation=6)
    assert plan.batch.completions == 24
    assert "72 sequences (18 groups of 4) a batch" in plan.data.text


def test_a_plan_is_the_same_after_it_was_written(planned: Planned) -> None:
    plan = planned(**TWO)
    plain = json.loads(json.dumps(plan.as_json()))
    assert [Process.of_json(process) for process in plain["processes"]] == plan.processes
    assert (
        plain["data"] == asdict(plan.data) and plain["ports"]["atropos_port"] == plan.ports.extensions["atropos_port"]
    )


def test_environments_get_the_variables_of_the_recipe_and_run_api_no_secret(planned: Planned) -> None:
    secrets = {"HF_TOKEN": "hf", "JUDGE_KEY": "judge", "WANDB_API_KEY": "wandb", "OTHER_TOKEN": "other"}
    plan = planned(**GROUPS, reward_environment=["JUDGE_KEY"], report_to=["wandb"], environment=secrets)
    secrets_of = {
        process.role: {name for name in secrets if name in process.full_environment(secrets)}
        for process in plan.processes
    }  # fmt: skip
    assert secrets_of == {
        "run-api": set(), "server": {"HF_TOKEN"}, "environment-arithmetic": {"HF_TOKEN", "JUDGE_KEY"},
        "trainer": {"HF_TOKEN", "JUDGE_KEY", "WANDB_API_KEY"},
    }  # fmt: skip


def nodes(count: int, gpus: tuple[str, ...] = ("0", "1")) -> list[Node]:
    return [Node(gpus, 64, f"10.0.0.{node + 1}", "ib0", f"n{node + 1}") for node in range(count)]


def test_on_several_nodes_they_are_on_the_first_and_ask_the_server_where_it_listens(
    planned: Planned, option: Option
) -> None:
    plan = planned(**GROUPS, gpus=("0", "1"), nodes=nodes(2))
    api, environment = process_of(plan, "run-api"), process_of(plan, "environment-arithmetic")
    assert (api.node, environment.node) == (0, 0) and [
        process.node for process in plan.processes if process.trains
    ] == [0, 1]
    assert option(api.argv, "--host") == "127.0.0.1"
    assert option(environment.argv, "--server-url") == "http://10.0.0.1:8000"
    assert "10.0.0.1" in environment.environment["NO_PROXY"]


def test_rank_0_on_another_node_than_run_api_is_refused(planned: Planned) -> None:
    apart = {"vllm_tensor_parallel_size": 2, "gpus": ("0", "1"), "nodes": nodes(2)}
    message = (
        "rank 0 is on node 1, but run-api checks no token and listens only on the first node's loopback. Fix: "
        "lower vllm_tensor_parallel_size, or start a run-api yourself and set atropos_api_url"
    )
    with pytest.raises(ConfigError) as refused:
        planned(**GROUPS, **apart)
    assert message in str(refused.value)
    assert planned(**GROUPS, **THEIRS, **apart).server_apart


def test_one_gpu_is_refused_unless_server_and_trainer_share_it(planned: Planned) -> None:
    with pytest.raises(ConfigError, match=r"request more GPUs, or set vllm_gpu: shared \(one GPU for both\)"):
        planned(**GROUPS, gpus=("0",))
    assert planned(**GROUPS, gpus=("0",), weight_sync="shared").mode == "server"


def test_batches_that_only_the_number_of_trainers_shows_are_looked_at_in_the_plan(planned: Planned) -> None:
    shares = [{"id": "arithmetic", "min_allocation": 0.5}, {"id": "dataset", "min_allocation": 0.5}, {"id": "dataset"}]
    keys = {**TWO, "atropos_mixture": {"environments": shares}, "prompts_per_step": None}
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    with pytest.raises(ConfigError, match="Fix: raise prompts_per_step, or lower min_allocation"):
        planned(**keys, gpus=("0", "1", "2"))
    shares[0]["min_allocation"] = shares[1]["min_allocation"] = 0.1
    assert planned(**keys, gpus=("0", "1", "2")).batch.completions == 8


# --- ports -----------------------------------------------------------------------------------------------------------


def unused() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_its_port_is_one_of_the_jobs_block(read: Read) -> None:
    recipe, ports = read(**GROUPS), Ports(8000, 51216, 29525, None, {"atropos_port": 8001})
    assert plan_ports(recipe, None) == ports
    inside = plan_ports(recipe, SlurmJob(7, "c", 1, None))
    assert inside == Ports(20070, 20071, 20072, 20073, {"atropos_port": 20079})
    assert plan_ports(read(**GROUPS, atropos_port=9001), SlurmJob(7, "c", 1, None)).extensions == {"atropos_port": 9001}
    assert plan_ports(read(), None).by_key().keys() == {"vllm_server_port", "vllm_group_port", "main_process_port"}


def test_a_busy_port_of_run_api_is_replaced_or_refused_with_the_pid(read: Read) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = other.getsockname()[1]
        requested = Ports(unused(), unused(), unused(), None, {"atropos_port": busy})
        ports, notes = choose_free_ports(read(**GROUPS), requested, "127.0.0.1")
        assert ports.extensions["atropos_port"] not in (busy, None) and ports.server == requested.server
        assert notes == [
            f"port {busy} (atropos_port) is in use by another process; using {ports.extensions['atropos_port']}"
        ]
        recipe = read(**GROUPS, atropos_port=busy)
        for refuse in (lambda: choose_free_ports(recipe, requested, "127.0.0.1"), lambda: require_named_ports(recipe)):
            with pytest.raises(ConfigError) as refused:
                refuse()
            (problem,) = refused.value.problems
            assert problem.what == f"port {busy} is in use by another process (pid {os.getpid()})"
            assert "recipe.yaml:" in problem.where and "remove atropos_port" in problem.fix


def test_a_port_that_the_user_gave_is_not_taken_by_one_of_ours(read: Read) -> None:
    port = unused()
    ports, notes = choose_free_ports(
        read(**GROUPS, atropos_port=port), Ports(port, unused(), unused(), None, {"atropos_port": port}), "127.0.0.1"
    )
    assert ports.extensions["atropos_port"] == port != ports.server
    assert notes == [f"port {port} (vllm_server_port) is the run's atropos_port; using {ports.server}"]


def test_a_port_is_not_asked_for_on_the_node_of_rank_0(read: Read) -> None:
    checked: list[int] = []
    requested = Ports(unused(), 51216, 29525, None, {"atropos_port": unused()})
    ports, notes = choose_free_ports(read(**GROUPS), requested, "127.0.0.1", lambda port: checked.append(port) or True)
    assert (ports, notes, checked) == (requested, [], [51216, 29525])


# --- data ------------------------------------------------------------------------------------------------------------


def test_the_dataset_of_an_environment_is_fetched_as_a_recipes_is(read: Read) -> None:
    args = {"dataset_name": "openai/gsm8k", "dataset_config": "main", "dataset_train_split": "train[:9]"}
    recipe = read(**{**GROUPS, "atropos_environment": "dataset", "atropos_environment_args": args})
    (asset,) = (asset for asset in list_assets(recipe) if asset.kind == "dataset")
    assert (asset.id, asset.config, asset.split) == ("openai/gsm8k", "main", "train[:9]")
    mixed = {"environments": [{"id": "dataset", "args": {"dataset_name": "a/b"}}, {"id": "arithmetic"}]}
    recipe = read(**{**GROUPS, "atropos_environment": None, "atropos_mixture": mixed})
    assert [(asset.id, asset.split) for asset in list_assets(recipe) if asset.kind == "dataset"] == [("a/b", "train")]
