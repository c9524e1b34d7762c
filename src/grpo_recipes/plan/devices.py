"""The devices a plan may use, which of them serve and which train, and the batch spread over the trainers."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import re
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grpo_recipes.errors import config_error, translate
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue_trl
from grpo_recipes.recipe.registry import built_for_cpu
from grpo_recipes.slurm.client import SlurmJob, slurm_job

ONE_GPU_BRIDGES = ("file", "lora", "shared")  # weight sync methods that work with server and rank 0 on one GPU
_DRIVER_SECONDS = 60  # a driver that takes longer hangs


def some_trainers(count: int) -> str:
    """Return ``1 trainer``, or ``3 trainers``."""
    return f"{count} trainer{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Batch:
    """One optimizer step."""

    completions: int  # of a step over all trainers: prompts x num_generations
    num_generations: int  # completions of one prompt
    world_size: int  # training processes
    per_device: int  # completions of one forward pass on one process
    accumulation: int  # forward passes of one process a step
    tokens: int | None = None  # most tokens of a step, prompts included; None when a length has no limit

    def __str__(self) -> str:
        prompts = self.completions // self.num_generations
        tokens = f", at most {self.tokens:,} tokens" if self.tokens else ""
        return (
            f"{prompts} prompts x {self.num_generations} completions = {self.completions} a step = "
            f"{some_trainers(self.world_size)} x {self.per_device} per device x {self.accumulation} accumulated{tokens}"
        )


@dataclass(frozen=True)
class Placement:
    """The training processes of one node."""

    node: int  # its index
    count: int  # at least one
    gpus: tuple[str, ...]  # none on CPU


@dataclass(frozen=True)
class Node:
    """One node of a job on several."""

    gpus: tuple[str, ...]  # ids as CUDA_VISIBLE_DEVICES takes them there, in order
    cores: int  # that a process may run on
    address: str  # where the other nodes reach it; a placeholder in a plan made without the nodes
    interface: str | None = None  # the network interface with that address, None where nobody looked
    name: str = ""  # Slurm's, for messages


@dataclass(frozen=True)
class Resources:
    """What a plan may use."""

    device: str  # device of the environment, by the packages installed: cpu or cuda
    gpus: tuple[str, ...]  # ids of this node's as CUDA_VISIBLE_DEVICES takes them, in order
    cores: int  # that this process may run on
    job: SlurmJob | None = None  # None outside Slurm
    nodes: tuple[Node, ...] = ()  # in Slurm's order, this one first; empty where it is alone
    gpu_gib: float | None = None  # memory of the smallest of its GPUs; None where it is not known

    def on_nodes(self, count: int) -> Resources:
        """Return the same on ``count`` nodes like this one, for a plan made without them."""
        nodes = [Node(self.gpus, self.cores, f"ADDRESS_OF_NODE_{index}") for index in range(count)]
        return replace(self, nodes=tuple(nodes) if count > 1 else ())

    def facts(self) -> dict[str, Any]:
        """Return what the identity of a run says of its machine and job."""
        job = f"{self.job.cluster}-{self.job.id}" if self.job else None
        return {"job": job, "flavour": self.device, "cores": self.cores}

    def all_nodes(self) -> tuple[Node, ...]:
        """Return every node; a single one needs no address but the loopback."""
        return self.nodes or (Node(self.gpus, self.cores, "127.0.0.1"),)


def find_resources(environment: Mapping[str, str]) -> Resources:
    """Ask the packages, the driver and Slurm's variables; other nodes of the job are taken to be like this one."""
    device, job = environment_device(), slurm_job(environment)
    gpus = visible_gpus(environment) if device == "cuda" else ()
    gib = gpu_memory(environment) if gpus else None
    here = Resources(device, gpus, len(os.sched_getaffinity(0)), job, gpu_gib=gib)
    return here.on_nodes(job.nodes) if job else here


def environment_device() -> str:
    """Return ``cpu`` or ``cuda``, the device that the installed torch is built for; refuse another TRL than ours."""
    missing = importlib.metadata.PackageNotFoundError
    with translate(missing, lambda it: config_error("environment", f"{it.name} is not installed", "run make setup")):
        device, trl = "cpu" if built_for_cpu() else "cuda", importlib.metadata.version("trl")
    if trl != catalogue_trl():
        what = f"trl {trl} is installed, the recipe keys are those of trl {catalogue_trl()}"
        raise config_error("environment", what, "run make setup, or make keys after an upgrade")
    return device


def nvidia_smi(*arguments: str) -> str | None:
    """Return what the driver's program prints, None where it is not here; refuse a machine where it hangs."""
    what = f"nvidia-smi did not answer within {_DRIVER_SECONDS} seconds"
    error = config_error("devices", what, "leave this node out and report it to the admins")
    with contextlib.suppress(OSError), translate(subprocess.TimeoutExpired, lambda _: error):
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False).stdout
    return None


def visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs the driver lists, limited to CUDA_VISIBLE_DEVICES (indices, UUIDs or MIG ids)."""
    listing = nvidia_smi("-L")
    return () if listing is None else select_gpus(listing, environment.get("CUDA_VISIBLE_DEVICES"))


def select_gpus(listing: str, visible: str | None) -> tuple[str, ...]:
    """Return the ids to use, given the output of ``nvidia-smi -L`` and the value of CUDA_VISIBLE_DEVICES.

    A shortened UUID becomes the whole one: CUDA takes both, NVML, which vLLM asks, the whole one alone.
    """
    indices, uuids = re.findall(r"^GPU (\d+):", listing, re.MULTILINE), re.findall(r"\(UUID: (.*)\)", listing)
    if visible is None:
        return tuple(indices)
    wanted = [item.strip() for item in visible.split(",") if item.strip()]
    for item in wanted:
        if item not in indices and not any(uuid.startswith(item) for uuid in uuids):
            what = f"this machine has no GPU '{item}' (nvidia-smi -L lists {len(indices)})"
            raise config_error("CUDA_VISIBLE_DEVICES", what, "unset it, or name GPUs that nvidia-smi -L lists")
    chosen = [next((uuid for uuid in uuids if item not in indices and uuid.startswith(item)), item) for item in wanted]
    uuid_of = dict(re.findall(r"^GPU (\d+):.*\(UUID: (.*)\)", listing, re.MULTILINE))
    gpus = [uuid_of.get(item, item) for item in chosen]  # a GPU has one name here, whether listed by index or UUID
    if twice := next((item for item, gpu in zip(wanted, gpus, strict=True) if gpus.count(gpu) > 1), ""):
        what = f"GPU {twice} is listed twice in '{visible}', and CUDA accepts each GPU once"
        once = ",".join(item for index, item in enumerate(wanted) if gpus.index(gpus[index]) == index)
        fix = f"set CUDA_VISIBLE_DEVICES={once}; vllm_gpu: shared puts server and trainer on one GPU"
        raise config_error("CUDA_VISIBLE_DEVICES", what, fix)
    return tuple(chosen)


def gpu_memory(environment: Mapping[str, str]) -> float | None:
    """Return the GiB of the smallest GPU that CUDA_VISIBLE_DEVICES leaves; None without a driver that answers."""
    listing = nvidia_smi("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    gpus = re.findall(r"^(\d+), *(\S+), *(\d+)$", listing or "", re.MULTILINE)
    wanted = [item.strip() for item in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()]
    visible = [gib for index, uuid, gib in gpus if any(item == index or uuid.startswith(item) for item in wanted)]
    # A MIG id is not among them: then the smallest of all is the safe guess.
    return min((int(mib) / 1024 for mib in visible or [gib for *_, gib in gpus]), default=None)


def share_gpu(recipe: Recipe, resources: Resources, mode: str) -> bool:
    """Return whether the server and rank 0 use one GPU: by ``vllm_gpu``, or because they share the weights."""
    shares = "shared" in (recipe["weight_sync"], recipe["vllm_gpu"])
    return mode == "server" and resources.device == "cuda" and shares


def need_shareable_gpu(recipe: Recipe, resources: Resources, mode: str, bridge: str | None) -> None:
    """Reject ``vllm_gpu: shared`` if the server and rank 0 can't be on one GPU."""
    if recipe["vllm_gpu"] != "shared" or mode != "server" or resources.device == "cpu":
        return
    source = recipe.source("vllm_gpu")
    if bridge not in ONE_GPU_BRIDGES:
        reason = "NCCL can't join two processes on one GPU" if bridge == "nccl" else "a new server needs a free GPU"
        what = f"vllm_gpu: shared and weight_sync: {bridge} can't be combined: {reason}"
        raise config_error(source, what, "set weight_sync: file, or remove vllm_gpu")
    if recipe["vllm_node"] == "own":
        what = "vllm_gpu: shared and vllm_node: own can't be combined: no trainer is on the server's node"
        raise config_error(source, what, "remove vllm_gpu, or set vllm_node: shared")


def split_gpus(recipe: Recipe, resources: Resources, mode: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the server's GPUs, the first ones of the first node, and for each node those to train on, rank 0 first.

    Where server and rank 0 share a GPU it is among both.
    """
    left = [node.gpus for node in resources.all_nodes()]
    own = recipe["vllm_node"] == "own"
    if own and (mode != "server" or len(left) == 1):
        what = "there is one node" if mode == "server" else f"there is no server (vLLM: {mode})"
        raise config_error(recipe.source("vllm_node"), f"vllm_node: own, but {what}", "write vllm_node: shared")
    if mode != "server" or resources.device == "cpu":
        return (), left
    parallel, both = recipe["vllm_tensor_parallel_size"], share_gpu(recipe, resources, mode)
    most = len(left[0]) - (1 if len(left) == 1 and not both else 0)
    if parallel > most:
        alone = f"leaves no GPU to train on ({len(left[0])} visible)"
        what = alone if len(left) == 1 else f"is more than one node has ({len(left[0])} on the first node)"
        where, fix = recipe.source("vllm_tensor_parallel_size"), f"write at most {most}, or ask for more GPUs"
        raise config_error(where, f"vllm_tensor_parallel_size {parallel} {what}", fix)
    return left[0][:parallel], [() if own else left[0][0 if both else parallel :], *left[1:]]


def need_exportable_memory(environment: Mapping[str, str]) -> None:
    """Refuse a torch allocator whose memory has no handle of CUDA (cudaIpcGetMemHandle) for another process."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in environment.get(name, ""):
            what = "memory in expandable segments has no handle for another process (weight_sync: shared)"
            raise config_error(name, what, "remove expandable_segments:True, or write weight_sync: nccl")


def trainer_count(recipe: Recipe, resources: Resources, left: Sequence[tuple[str, ...]]) -> int:
    """Return how many training processes there may be: ``num_processes``, or one a GPU, on CPU one a training node."""
    wanted = recipe["num_processes"]
    if resources.device == "cuda":
        available = sum(len(gpus) for gpus in left)
    else:
        available = wanted or max(1, len(resources.nodes) - (recipe["vllm_node"] == "own"))
    if wanted is not None and wanted > available:
        what = f"num_processes {wanted} exceeds the {available} GPUs left to train on"
        raise config_error(recipe.source("num_processes"), what, f"write at most {available}, or remove num_processes")
    if recipe["accelerator"] == "single" and (wanted or 1) > 1:
        what = f"accelerator: single runs one process, num_processes is {wanted}"
        raise config_error(recipe.source("accelerator"), what, "write accelerator: ddp, or remove num_processes")
    return 1 if recipe["accelerator"] == "single" else int(wanted or available)


def place_trainers(
    recipe: Recipe, resources: Resources, mode: str, left: Sequence[tuple[str, ...]], world_size: int
) -> tuple[Placement, ...]:
    """Spread the trainers evenly over the nodes; refuse a plan in which a node of the job would do nothing."""
    rooms = [len(gpus) for gpus in left] if resources.device == "cuda" else [world_size] * len(left)
    if recipe["vllm_node"] == "own":
        rooms[0] = 0
    counts = spread(world_size, rooms)
    idle = [node for node, count in enumerate(counts) if count == 0 and not (mode == "server" and node == 0)]
    if idle:
        does = f"the plan has nothing to do for node {idle[0]}: {some_trainers(world_size)}"
        own = ", or write vllm_node: own" if mode == "server" and counts[0] else ""
        fix = f"submit with --nodes={len(left) - len(idle)}, or more prompts_per_step{own}"
        raise config_error("sbatch --nodes", f"{len(left)} nodes are allocated, {does}", fix)
    return tuple(Placement(node, count, left[node][:count]) for node, count in enumerate(counts) if count)


def spread(processes: int, rooms: Sequence[int]) -> list[int]:
    """Spread ``processes`` over nodes as evenly as their room allows, so that no node is left out by chance.

    ``rooms`` has the most processes of each node, together at least ``processes``.
    """
    counts = [0] * len(rooms)
    for _ in range(processes):
        node = min((node for node, room in enumerate(rooms) if counts[node] < room), key=counts.__getitem__)
        counts[node] += 1
    return counts


def used_gpus(server_gpus: Sequence[str], trainers: Sequence[Placement]) -> set[tuple[int, str]]:
    """Return node and id of each GPU that serves or trains."""
    return {(one.node, gpu) for one in trainers for gpu in one.gpus} | {(0, gpu) for gpu in server_gpus}


def unused(resources: Resources, used: Collection[tuple[int, str]]) -> tuple[str, ...]:
    """Return the GPUs that are not among the ``used``; with the node where there are several."""
    every = [(index, gpu) for index, node in enumerate(resources.all_nodes()) for gpu in node.gpus]
    return tuple(f"{gpu} of node {node}" if resources.nodes else gpu for node, gpu in every if (node, gpu) not in used)


def derive_batch(recipe: Recipe, trainers: int) -> Batch:
    """Spread the recipe's batch, which must be whole groups, over at most ``trainers`` processes.

    With ``prompts_per_step`` the batch is the same for every number of trainers: as many of them are used as divide it,
    and ``per_device_train_batch_size`` is the most one forward pass may hold. Without it TRL's keys mean what they mean
    in TRL.
    """
    group, per_device = recipe["num_generations"], recipe["per_device_train_batch_size"]
    if group is None:
        raise config_error(recipe.source("num_generations"), "num_generations is empty", "write num_generations: 8")
    if recipe["prompts_per_step"] is not None:
        completions = recipe["prompts_per_step"] * group
        trainers = largest_divisor(completions, trainers)
        per_device = largest_divisor(completions // trainers, per_device)
        accumulation = completions // trainers // per_device
    else:
        accumulation = recipe["gradient_accumulation_steps"]
        per_pass, passes = trainers * per_device, recipe["steps_per_generation"] or accumulation
        completions = per_pass * accumulation
        generated = recipe["generation_batch_size"] or per_pass * passes
        if generated % group or generated % per_pass:
            product = f"{generated} completions a generation ({trainers} x {per_device} per device x accumulation)"
            fix = "set prompts_per_step and let the rest be derived"
            raise config_error(recipe.source("num_generations"), f"{product} are not whole groups of {group}", fix)
    prompt, completion = recipe["max_prompt_length"], recipe["max_completion_length"]
    tokens = completions * (prompt + completion) if prompt and completion else None
    return Batch(completions, group, trainers, per_device, accumulation, tokens)


def rows_of_generation(recipe: Recipe, batch: Batch | Mapping[str, int]) -> int:
    """Return the completions that are sampled at a time, over all trainers: those of one step, or of several."""
    sizes = batch if isinstance(batch, Mapping) else asdict(batch)
    passes = recipe["steps_per_generation"] or sizes["accumulation"]
    return int(recipe["generation_batch_size"] or sizes["per_device"] * sizes["world_size"] * passes)


def derive_eval_batch(recipe: Recipe, batch: Batch) -> int | None:
    """Return the completions of one evaluation batch on one process; None without evaluation.

    TRL wants whole groups: world size x this size divides by num_generations_eval. The recipe's
    ``per_device_eval_batch_size`` is the most; without it, what one generation of the training gives each process.
    """
    if recipe["eval_strategy"] == "no":
        return None
    group = recipe["num_generations_eval"] or recipe["num_generations"]
    smallest = group // math.gcd(group, batch.world_size)
    if not recipe.is_set("per_device_eval_batch_size"):
        return max(smallest, batch.per_device * batch.accumulation // smallest * smallest)
    most = recipe["per_device_eval_batch_size"]
    if most < smallest:
        size = f"{some_trainers(batch.world_size)} x {most} completions"
        what = f"{size} are not a whole number of evaluation groups of {group}"
        fix = f"write per_device_eval_batch_size: {smallest} (or a multiple), or set num_generations_eval"
        raise config_error(recipe.source("per_device_eval_batch_size"), what, fix)
    return int(most // smallest * smallest)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is not above ``most``."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
