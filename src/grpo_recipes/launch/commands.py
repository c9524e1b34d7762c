"""The argv and environment of a plan's processes."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_recipes.errors import refuse
from grpo_recipes.launch.server import server_command, server_environment
from grpo_recipes.paths import home
from grpo_recipes.recipe import Recipe

if TYPE_CHECKING:
    from grpo_recipes.launch.plan import Names, Plan

ACCELERATE_FILES = {
    "single": "single_gpu",
    "ddp": "multi_gpu",
    "zero2": "zero2",
    "zero3": "zero3",
    "fsdp2": "fsdp2",
}


@dataclass(frozen=True)
class Process:
    """One process the launcher starts.

    Attributes:
        role: ``server`` or ``trainer``.
        argv: its command.
        environment: variables set for it beyond the cleaned environment all share.
        gpus: GPU ids it may use.
        log: file of its output.
    """

    role: str
    argv: list[str]
    environment: dict[str, str]
    gpus: tuple[str, ...]
    log: str


def server_process(
    recipe: Recipe, plan: Plan, environment: Mapping[str, str], names: Names, gpus: tuple[str, ...]
) -> Process:
    """The vLLM server of ``plan`` on those GPUs."""
    host = recipe["vllm_server_host"]
    argv = server_command(recipe, plan.model, names.served, host, plan.ports.server, plan.flavour)
    variables = server_environment(plan.flavour, plan.ports.vllm_internal)
    variables["VLLM_HOST_IP"] = environment.get("VLLM_HOST_IP", host)
    if environment.get("VLLM_PLUGINS"):  # unset, vLLM loads every plug-in that is installed, ours too
        variables["VLLM_PLUGINS"] = f"{environment['VLLM_PLUGINS']},grpo_recipes"
    return Process(
        "server", argv, {**variables, **_devices(gpus)}, gpus, f"logs/liv_vllm_{names.run}_{names.timestamp}.log"
    )


def trainer_process(
    recipe: Recipe, plan: Plan, environment: Mapping[str, str], names: Names, gpus: tuple[str, ...]
) -> Process:
    """The trainers of ``plan`` on those GPUs, under one ``accelerate launch``."""
    config = _accelerate_file(plan.accelerator, environment)
    argv = [
        sys.executable, "-m", "accelerate.commands.launch",
        "--config_file", config,
        "--num_processes", str(plan.batch.world_size),
        "--num_machines", "1",
        "--machine_rank", "0",
        "--mixed_precision", _mixed_precision(recipe),
        "--dynamo_backend", "no",
        "--num_cpu_threads_per_process", str(plan.threads),
        "--main_process_ip", "127.0.0.1",
        "--main_process_port", str(plan.ports.main_process),
        str(home() / plan.entry),
        *_trainer_flags(recipe, plan, names),
    ]  # fmt: skip
    variables = _devices(gpus)
    if plan.mode == "server":
        # Where the trainer offers the NCCL group: TRL asks vLLM, which would take the interface of the default route.
        variables["VLLM_HOST_IP"] = environment.get("VLLM_HOST_IP", recipe["vllm_server_host"])
    if plan.flavour == "cpu":
        # use_cpu alone keeps accelerate on the CPU: ACCELERATE_USE_CPU would also make it ignore DeepSpeed, and
        # `accelerate launch --cpu` start one process whatever it is told.
        variables["DS_ACCELERATOR"] = "cpu"
    return Process("trainer", argv, variables, gpus, f"logs/liv_train_{names.run}_{names.timestamp}.log")


def _trainer_flags(recipe: Recipe, plan: Plan, names: Names) -> list[str]:
    """What the launcher settles: flags of the entry script beside the frozen recipe."""
    flags = {
        "config": names.run_dir / "recipe.yaml",
        "output_dir": names.run_dir / "checkpoints",
        "model_name_or_path": plan.model,
        "run_name": names.run_dir.name,
        "per_device_train_batch_size": plan.batch.per_device,
        "gradient_accumulation_steps": plan.batch.accumulation,
        "use_cpu": str(plan.flavour == "cpu").lower(),
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
            "vllm_server_port": plan.ports.server,
            "vllm_group_port": plan.ports.group,
            "weight_sync": plan.bridge,
        }
    elif plan.mode == "colocate":
        memory = recipe["vllm_gpu_memory_utilization"] if recipe.given("vllm_gpu_memory_utilization") else 0.3
        flags |= {"vllm_mode": "colocate", "vllm_gpu_memory_utilization": memory}
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))]


def _devices(gpus: tuple[str, ...]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _accelerate_file(accelerator: str, environment: Mapping[str, str]) -> str:
    """CONFIG_FILE, or TRL's packaged accelerate file."""
    given = environment.get("CONFIG_FILE")
    if given:
        if not Path(given).is_file():
            raise refuse("CONFIG_FILE", f"there is no accelerate file '{given}'", "unset it, or name an existing file")
        return str(Path(given).absolute())
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise refuse("environment", "trl is not installed", "run make setup")
    return str(
        Path(spec.submodule_search_locations[0]) / "accelerate_configs" / f"{ACCELERATE_FILES[accelerator]}.yaml"
    )


def _mixed_precision(recipe: Recipe) -> str:
    if recipe["fp16"]:
        return "fp16"
    return "no" if recipe["bf16"] is False else "bf16"  # TRL turns bf16 on unless told otherwise
