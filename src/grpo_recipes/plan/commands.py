"""The argv and environment of a plan's processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.errors import config_error
from grpo_recipes.paths import home
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.environment import no_proxy
from grpo_recipes.plan.server import gpu_share, server_command, server_environment
from grpo_recipes.plan.types import Process
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import mixed_precision
from grpo_recipes.recipe.registry import RECONNECTING
from grpo_recipes.runs.rundir import sync_folder

if TYPE_CHECKING:
    from grpo_recipes.plan.types import Names, Plan

ACCELERATE_FILES = {
    "single": "single_gpu",
    "ddp": "multi_gpu",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp2": "fsdp2",
}


def server_process(
    recipe: Recipe, plan: Plan, resources: Resources, environment: Mapping[str, str], names: Names
) -> Process:
    """Return the vLLM server of ``plan``, on the first node."""
    variables = server_environment(plan.device, plan.ports.vllm_internal)
    if environment.get("VLLM_PLUGINS"):  # unset, vLLM loads every plug-in that is installed, ours too
        variables["VLLM_PLUGINS"] = f"{environment['VLLM_PLUGINS']},grpo_recipes"
    variables |= _host_ip(plan, resources, environment, 0)
    variables |= _network(plan, resources, environment, names, 0)
    variables["CUDA_VISIBLE_DEVICES"] = ",".join(plan.server_gpus)
    return Process(
        "server",
        server_command(recipe, plan.model, names.served, plan.server_host, plan.ports.server, plan.device),
        variables,
        plan.server_gpus,
        f"logs/liv_vllm_{names.run}_{names.timestamp}.log",
        ready="serving",
        on_loss="restart" if plan.bridge in RECONNECTING else "restart with trainers",
    )


def trainer_processes(
    recipe: Recipe, plan: Plan, resources: Resources, environment: Mapping[str, str], names: Names
) -> list[Process]:
    """Return the trainers of ``plan``: on each node that trains one ``accelerate launch``."""
    made = []
    for machine, placed in enumerate(plan.placement):
        node = placed.node
        variables = {"CUDA_VISIBLE_DEVICES": ",".join(placed.gpus), "GRPO_NODE": str(node)}
        if plan.mode == "server":
            # Where rank 0 offers the NCCL group: TRL asks vLLM, which would take the interface of the default route.
            variables |= _host_ip(plan, resources, environment, node)
        if plan.device == "cpu":
            # use_cpu alone keeps accelerate on the CPU: ACCELERATE_USE_CPU would also make it ignore DeepSpeed, and
            # `accelerate launch --cpu` start one process whatever --num_processes says.
            variables["DS_ACCELERATOR"] = "cpu"
        variables |= _network(plan, resources, environment, names, node)
        suffix = f"_node{node}" if node else ""
        log = f"logs/liv_train_{names.run}_{names.timestamp}{suffix}.log"
        after = ("server",) if plan.mode == "server" else ()
        argv = _accelerate(recipe, plan, names, machine)
        made.append(Process("trainer", argv, variables, placed.gpus, log, node, after))
    return made


def _accelerate(recipe: Recipe, plan: Plan, names: Names, machine: int) -> list[str]:
    """Return the argv of one machine of the trainers."""
    machines = len(plan.placement)
    return [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", plan.accelerate_file,
        # accelerate starts num_processes // num_machines here, and torch adds the machines up: they may be unequal.
        "--num_processes", str(plan.placement[machine].count * machines),
        "--num_machines", str(machines),
        "--machine_rank", str(machine),
        "--mixed_precision", mixed_precision(recipe),
        "--dynamo_backend", "no",
        "--num_cpu_threads_per_process", str(plan.threads),
        "--main_process_ip", plan.nodes[plan.placement[0].node] if machines > 1 else "127.0.0.1",
        "--main_process_port", str(plan.ports.main_process),
        str(home() / plan.entry),
        *_trainer_flags(recipe, plan, names),
    ]  # fmt: skip


def _host_ip(plan: Plan, resources: Resources, environment: Mapping[str, str], node: int) -> dict[str, str]:
    """Name the address of this machine for vLLM; what the user exported can be right on one node alone."""
    if resources.nodes:
        return {"VLLM_HOST_IP": plan.nodes[node]}
    return {"VLLM_HOST_IP": environment.get("VLLM_HOST_IP", plan.server_host)}


def _network(
    plan: Plan, resources: Resources, environment: Mapping[str, str], names: Names, node: int
) -> dict[str, str]:
    """Return what a process needs to reach those of other nodes; nothing on one node."""
    if not resources.nodes:
        return {}
    variables = {name: no_proxy(environment.get(name, ""), plan.nodes) for name in ("NO_PROXY", "no_proxy")}
    interface = resources.nodes[node].interface
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if interface is not None and name not in environment:
            variables[name] = interface  # left alone, gloo takes that of the host's name, NCCL the first it finds
    if plan.bridge == "file" and plan.server_apart:
        variables["GRPO_SYNC_DIR"] = str(sync_folder(names.run_dir))  # shared memory ends at the node
    return variables


def _trainer_flags(recipe: Recipe, plan: Plan, names: Names) -> list[str]:
    """Return what the launcher decides: flags of the entry script beside the frozen recipe."""
    flags = {
        "config": names.run_dir / "recipe.yaml",
        "output_dir": names.run_dir / "checkpoints",
        "model_name_or_path": plan.model,
        "run_name": names.run_dir.name,
        "per_device_train_batch_size": plan.batch.per_device,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "use_cpu": str(plan.device == "cpu").lower(),
    }
    if recipe["push_to_hub"]:
        flags["push_to_hub"] = "false"  # the launcher publishes: transformers would push while it saves
    if plan.eval_batch is not None:
        flags["per_device_eval_batch_size"] = plan.eval_batch
    if plan.dataset is not None:
        flags["dataset_name"] = plan.dataset
    if plan.eval_dataset is not None:
        flags["eval_dataset_name"] = plan.eval_dataset
    if plan.mode == "server":
        flags |= {
            "vllm_mode": "server",
            "vllm_server_host": plan.server_host,
            "vllm_server_port": plan.ports.server,
            "vllm_group_port": plan.ports.group,
            "weight_sync": plan.bridge,
        }
    elif plan.mode == "colocate":
        flags |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": gpu_share(recipe, plan.mode)}
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


def accelerate_file(accelerator: str, environment: Mapping[str, str]) -> str:
    """Return CONFIG_FILE, or TRL's packaged accelerate file.

    Raises:
        ConfigError: there is no such file, or TRL is not installed.
    """
    if given := environment.get("CONFIG_FILE"):
        if not Path(given).is_file():
            what = f"there is no accelerate file '{given}'"
            raise config_error("CONFIG_FILE", what, "unset it, or name an existing file")
        return str(Path(given).absolute())
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise config_error("environment", "trl is not installed", "run make setup")
    files = Path(spec.submodule_search_locations[0]) / "accelerate_configs"
    return str(files / f"{ACCELERATE_FILES[accelerator]}.yaml")
