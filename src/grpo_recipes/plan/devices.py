"""Find the devices for a plan, divide them between server and trainers, and spread the batch over the trainers.

The vLLM server gets the first GPUs of the first nodes, by default of one node, and the trainers get the others. With
``prompts_per_step`` the batch of a step does not depend on the number of trainers, so adding GPUs does not change the
experiment.
"""

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

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import catalogue_trl
from grpo_recipes.recipe.registry import built_for_cpu
from grpo_recipes.recipe.tasks import added_task
from grpo_recipes.slurm.client import SlurmJob, read_slurm_job

ONE_GPU_BRIDGES = ("file", "lora", "shared")  # weight sync methods that work with server and rank 0 on one GPU
_LOCAL = "vllm_data_parallel_size_local"
_DRIVER_SECONDS = 60  # a driver that takes longer hangs


def format_trainers(count: int) -> str:
    """Return "1 trainer" or "3 trainers"."""
    return f"{count} trainer{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Batch:
    """The sizes of one optimizer step."""

    completions: int  # completions of a step on all trainers: prompts x num_generations
    num_generations: int  # completions of one prompt; 1 in a task without sampling
    world_size: int  # training processes
    per_device: int  # completions of one forward pass on one process
    accumulation: int  # forward passes of one process in a step
    tokens: int | None = None  # most tokens of a step, prompts included; None if a length has no limit

    def __str__(self) -> str:
        """Return one line: how prompts, completions, trainers and accumulated passes make up a step."""
        prompts = self.completions // self.num_generations
        tokens = f", at most {self.tokens:,} tokens" if self.tokens else ""
        rows = f"{prompts} prompts x {self.num_generations} completions = {self.completions} per step"
        return (
            f"{rows if self.num_generations > 1 else f'{prompts} rows per step'} = "
            f"{format_trainers(self.world_size)} x {self.per_device} per device x {self.accumulation} "
            f"accumulated{tokens}"
        )


@dataclass(frozen=True)
class Placement:
    """The training processes of one node."""

    node: int  # index of the node
    count: int  # number of processes, at least 1
    gpus: tuple[str, ...]  # their GPUs, none on CPU


@dataclass(frozen=True)
class Node:
    """One node of a job with several nodes."""

    gpus: tuple[str, ...]  # ids in the form of CUDA_VISIBLE_DEVICES, in order
    cores: int  # CPU cores for a process
    address: str  # address for the other nodes; a placeholder in a plan made without the nodes
    interface: str | None = None  # network interface with that address, None if unknown
    name: str = ""  # Slurm's name of the node, for messages


@dataclass(frozen=True)
class Resources:
    """The devices and nodes that a plan may use."""

    device: str  # device of the installed packages: cpu or cuda
    gpus: tuple[str, ...]  # ids of this node's GPUs in the form of CUDA_VISIBLE_DEVICES, in order
    cores: int  # CPU cores for this process
    job: SlurmJob | None = None  # None outside Slurm
    nodes: tuple[Node, ...] = ()  # this node first, then in Slurm's order; empty for a single node
    gpu_gib: float | None = None  # memory of the smallest GPU; None if unknown

    def on_nodes(self, count: int) -> Resources:
        """Return the resources of ``count`` nodes that are all like this node, with placeholders as their addresses.

        For a single node, the result's ``nodes`` is empty.
        """
        nodes = [Node(self.gpus, self.cores, f"ADDRESS_OF_NODE_{index}") for index in range(count)]
        return replace(self, nodes=tuple(nodes) if count > 1 else ())

    def facts(self) -> dict[str, Any]:
        """Return the id of the Slurm job, the device and the number of cores, as run.json stores them."""
        job = f"{self.job.cluster}-{self.job.id}" if self.job else None
        return {"job": job, "flavour": self.device, "cores": self.cores}

    def all_nodes(self) -> tuple[Node, ...]:
        """Return every node; the address of a single node is the loopback."""
        return self.nodes or (Node(self.gpus, self.cores, "127.0.0.1"),)


def find_resources(environment: Mapping[str, str]) -> Resources:
    """Return this node's devices and the Slurm job; assume that the job's other nodes have the same devices.

    Raise ConfigError if torch is missing, CUDA_VISIBLE_DEVICES is wrong, or the driver does not answer.
    """
    device, job = environment_device(), read_slurm_job(environment)
    gpus = find_visible_gpus(environment) if device == "cuda" else ()
    gib = find_gpu_memory(environment) if gpus else None
    resources = Resources(device, gpus, len(os.sched_getaffinity(0)), job, gpu_gib=gib)
    return resources.on_nodes(job.nodes) if job else resources


def environment_device() -> str:
    """Return the device of the installed torch, ``cpu`` or ``cuda``.

    Raise ConfigError if torch or TRL is missing, or if TRL has another version than the recipe keys.
    """
    missing = importlib.metadata.PackageNotFoundError
    with translate_errors(
        missing, lambda error: config_error("environment", f"{error.name} is not installed", "run make setup")
    ):
        device, trl = "cpu" if built_for_cpu() else "cuda", importlib.metadata.version("trl")
    if trl != catalogue_trl():
        problem = f"trl {trl} is installed, but the recipe keys belong to trl {catalogue_trl()}"
        raise config_error("environment", problem, "run make setup, or after an upgrade of TRL, make keys")
    return device


def run_nvidia_smi(*arguments: str) -> str | None:
    """Run nvidia-smi with these arguments and return its output, or None if it is not installed.

    Raise ConfigError if it does not answer in time. Its exit code is ignored.
    """
    problem = f"nvidia-smi did not answer within {_DRIVER_SECONDS} seconds"
    error = config_error("devices", problem, "exclude this node and report it to the admins")
    with contextlib.suppress(OSError), translate_errors(subprocess.TimeoutExpired, lambda _: error):
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False).stdout
    return None


def find_visible_gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs that the driver lists, limited to CUDA_VISIBLE_DEVICES (indices, UUIDs or MIG ids).

    Return an empty tuple without nvidia-smi. Raise ConfigError if the variable names a GPU that does not exist, or
    names a GPU twice.
    """
    listing = run_nvidia_smi("-L")
    return () if listing is None else select_gpus(listing, environment.get("CUDA_VISIBLE_DEVICES"))


def select_gpus(listing: str, visible: str | None) -> tuple[str, ...]:
    """Return the ids to use, given the output of ``nvidia-smi -L`` and the value of CUDA_VISIBLE_DEVICES.

    Without the variable (None), these are the indices of all GPUs. A shortened UUID becomes the full UUID: CUDA accepts
    both, but vLLM uses NVML, which needs the full UUID. Raise ConfigError for a GPU that is not listed or is given
    twice.
    """
    indices, uuids = re.findall(r"^GPU (\d+):", listing, re.MULTILINE), re.findall(r"\(UUID: (.*)\)", listing)
    if visible is None:
        return tuple(indices)
    items = [item.strip() for item in visible.split(",") if item.strip()]
    for item in items:
        if item not in indices and not any(uuid.startswith(item) for uuid in uuids):
            problem = f"this machine has no GPU '{item}' (nvidia-smi -L lists {len(indices)})"
            raise config_error("CUDA_VISIBLE_DEVICES", problem, "unset it, or list GPUs that nvidia-smi -L prints")
    ids = [next((uuid for uuid in uuids if item not in indices and uuid.startswith(item)), item) for item in items]
    uuid_of_index = dict(re.findall(r"^GPU (\d+):.*\(UUID: (.*)\)", listing, re.MULTILINE))
    gpus = [uuid_of_index.get(gpu_id, gpu_id) for gpu_id in ids]  # the same name for a GPU given by index or by UUID
    if duplicate := next((item for item, gpu in zip(items, gpus, strict=True) if gpus.count(gpu) > 1), ""):
        problem = f"GPU {duplicate} is listed twice in '{visible}', and CUDA accepts each GPU once"
        unique = ",".join(item for index, item in enumerate(items) if gpus.index(gpus[index]) == index)
        fix = f"set CUDA_VISIBLE_DEVICES={unique}; vllm_gpu: shared puts server and trainer on one GPU"
        raise config_error("CUDA_VISIBLE_DEVICES", problem, fix)
    return tuple(ids)


def find_gpu_memory(environment: Mapping[str, str]) -> float | None:
    """Return the memory of the smallest visible GPU in GiB; None without nvidia-smi or without GPUs.

    The memory of a MIG slice is not known. Raise ConfigError if the driver does not answer.
    """
    if "MIG-" in environment.get("CUDA_VISIBLE_DEVICES", ""):  # the driver only lists the memory of whole GPUs
        return None
    listing = run_nvidia_smi("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    gpus = re.findall(r"^(\d+), *(\S+), *(\d+)$", listing or "", re.MULTILINE)
    items = [item.strip() for item in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()]
    visible = [mib for index, uuid, mib in gpus if any(item == index or uuid.startswith(item) for item in items)]
    return min((int(mib) / 1024 for mib in visible or [mib for *_, mib in gpus]), default=None)


def shares_gpu(recipe: Recipe, resources: Resources, mode: str) -> bool:
    """Return whether the server and rank 0 use the same GPU.

    ``vllm_gpu: shared`` or ``weight_sync: shared`` in the recipe requests this. The result is False on CPU, and if
    ``mode`` (of the plan) is not ``server``.
    """
    shares = "shared" in (recipe.server.weight_sync, recipe.server.gpu)
    return mode == "server" and resources.device == "cuda" and shares


def require_shareable_gpu(recipe: Recipe, resources: Resources, mode: str, bridge: str | None) -> None:
    """Raise ConfigError if the recipe sets ``vllm_gpu: shared``, but the server and rank 0 can't be on one GPU.

    The weight sync method ``bridge`` may need a GPU for each, replicas need several GPUs, and ``vllm_node: own`` puts
    no trainer on the server's node. On CPU and without a server, nothing is checked.
    """
    if recipe.server.gpu != "shared" or mode != "server" or resources.device == "cpu":
        return
    source = recipe.source("vllm_gpu")
    if bridge not in ONE_GPU_BRIDGES:
        reason = "NCCL can't join two processes on one GPU" if bridge == "nccl" else "a new server needs a free GPU"
        problem = f"vllm_gpu: shared and weight_sync: {bridge} can't be combined: {reason}"
        raise config_error(source, problem, "set weight_sync: file, or remove vllm_gpu")
    if recipe.server.replicas > 1:
        problem = "vllm_gpu: shared and vllm_data_parallel_size above 1 can't be combined: a replica needs its own GPU"
        raise config_error(source, problem, "remove vllm_gpu, or remove vllm_data_parallel_size")
    if recipe.server.node == "own":
        problem = "vllm_gpu: shared and vllm_node: own can't be combined: no trainer is on the server's node"
        raise config_error(source, problem, "remove vllm_gpu, or set vllm_node: shared")


def split_gpus(recipe: Recipe, resources: Resources, mode: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the server's GPUs, and a list with the training GPUs of each node. Rank 0 gets the first training GPU.

    ``mode`` is the plan's vLLM mode. The server gets the first GPUs of the first node, or equally many of each of the
    first nodes (``vllm_data_parallel_size_local``). With ``vllm_node: own``, no GPU of its nodes trains: their tuples
    are empty. A GPU that the server and rank 0 share (``shares_gpu``) is in both results. Without a server, and on CPU,
    the first result is empty. Raise ConfigError if no GPU would be left to train on, if ``vllm_node: own`` has no other
    node or no server, or if the server needs more nodes.
    """
    node_gpus = [node.gpus for node in resources.all_nodes()]
    separate_node, count = recipe.server.node == "own", recipe.server.nodes if mode == "server" else 1
    if count > len(node_gpus):
        replicas, local = f"{recipe.server.replicas} replicas", recipe.server.data_parallel_size_local
        problem = f"{_LOCAL} {local} needs {count} nodes for {replicas}, but the run has {len(node_gpus)}"
        fix = f"remove {_LOCAL}, or submit with --nodes={count + separate_node}"
        raise config_error(recipe.source(_LOCAL), problem, fix)
    if separate_node and (mode != "server" or len(node_gpus) == count):
        only = "there is only one node" if count == 1 else f"the server is on all {count} nodes"
        conflict = only if mode == "server" else f"there is no server (vLLM: {mode})"
        raise config_error(recipe.source("vllm_node"), f"vllm_node: own, but {conflict}", "set vllm_node: shared")
    if mode != "server" or resources.device == "cpu":
        return (), node_gpus
    first_nodes, later_nodes = node_gpus[:count], node_gpus[count:]
    shared = shares_gpu(recipe, resources, mode)
    serving = recipe.server.tensor_parallel_size * recipe.server.replicas // count  # GPUs on each node
    visible = min(map(len, first_nodes))
    most = visible - (1 if not later_nodes and not shared else 0)
    if serving > most:
        no_trainer = f"leaves no GPU to train on ({visible} visible)"
        problem = f"exceeds the {visible} GPUs of {'the first' if count == 1 else 'each'} node"
        raise _make_server_size_error(recipe, problem if later_nodes else no_trainer, most)
    training = [() if separate_node else gpus[0 if shared else serving :] for gpus in first_nodes]
    return tuple(gpu for gpus in first_nodes for gpu in gpus[:serving]), [*training, *later_nodes]


def _make_server_size_error(recipe: Recipe, problem: str, most: int) -> ConfigError:
    """Return the ConfigError for a server with more than ``most`` GPUs on a node: its size, then ``problem``."""
    parallel, nodes = recipe.server.tensor_parallel_size, recipe.server.nodes
    replicas = recipe.server.replicas // nodes
    key, limit, size = "vllm_tensor_parallel_size", max(1, most // replicas), f"vllm_tensor_parallel_size {parallel}"
    edit = f"set {key}: {limit} or less"
    if replicas > 1:
        size = f"{'vllm_data_parallel_size' if nodes == 1 else _LOCAL} {replicas} x {size}"
        if parallel <= most:
            key, limit = "vllm_data_parallel_size", most // parallel
            edit = f"set {key}: {limit} or less"
            if nodes > 1:
                edit = f"set {_LOCAL}: {limit} and {key}: {limit * nodes}"
    if nodes > 1 and most < 1:
        edit = "request another node"
    return config_error(recipe.source(key), f"{size} {problem}", f"{edit}, or request more GPUs")


def require_exportable_memory(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if torch's allocator is set to expandable segments in the environment.

    ``weight_sync: shared`` can't export their memory to the server (cudaIpcGetMemHandle).
    """
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:True" in environment.get(name, ""):
            problem = "weight_sync: shared can't share memory in expandable segments with another process"
            raise config_error(name, problem, "remove expandable_segments:True, or set weight_sync: nccl")


def count_trainers(recipe: Recipe, resources: Resources, training_gpus: Sequence[tuple[str, ...]]) -> int:
    """Return the largest number of training processes that the recipe and the devices allow.

    This is ``num_processes``, or by default one process for each training GPU, or on CPU one for each training node. It
    is 1 with ``accelerator: single``. ``training_gpus`` has the GPUs of each node. Raise ConfigError if
    ``num_processes`` is larger than the number of GPUs, or contradicts ``accelerator: single``.
    """
    requested = recipe.processes.num_processes
    if resources.device == "cuda":
        available = sum(len(gpus) for gpus in training_gpus)
    else:
        own_nodes = recipe.server.nodes if recipe.server.node == "own" else 0
        available = requested or max(1, len(resources.nodes) - own_nodes)
    if requested is not None and requested > available:
        problem = f"num_processes {requested} exceeds the {available} GPUs left to train on"
        fix = f"set num_processes: {available} or less, or remove it"
        raise config_error(recipe.source("num_processes"), problem, fix)
    if recipe.processes.accelerator == "single" and (requested or 1) > 1:
        problem = f"accelerator: single runs one process, but num_processes is {requested}"
        raise config_error(recipe.source("accelerator"), problem, "set accelerator: ddp, or remove num_processes")
    return 1 if recipe.processes.accelerator == "single" else requested or available


def place_trainers(
    recipe: Recipe, resources: Resources, mode: str, training_gpus: Sequence[tuple[str, ...]], world_size: int
) -> tuple[Placement, ...]:
    """Spread ``world_size`` trainers evenly over the nodes; return a placement for each node with trainers.

    ``training_gpus`` has the GPUs of each node. Raise ConfigError if a node of the job would have no process, or if
    co-located trainers can't be divided into equal groups that each share one vLLM.
    """
    node_count = len(training_gpus)
    limits = [len(gpus) for gpus in training_gpus] if resources.device == "cuda" else [world_size] * node_count
    serving = recipe.server.nodes if mode == "server" else 0
    if recipe.server.node == "own":
        limits[:serving] = [0] * serving
    counts = spread_processes(world_size, limits)
    idle = [node for node, count in enumerate(counts) if count == 0 and node >= serving]
    if idle:
        problem = f"{node_count} nodes are allocated, but node {idle[0]} would have no process"
        separate_node = ", or set vllm_node: own" if mode == "server" and counts[0] else ""
        fix = f"submit with --nodes={node_count - len(idle)}, or raise prompts_per_step{separate_node}"
        raise config_error("sbatch --nodes", f"{problem} ({format_trainers(world_size)})", fix)
    parallel = recipe.server.tensor_parallel_size
    if mode == "colocate" and world_size % parallel:
        problem = f"vllm_tensor_parallel_size {parallel} does not divide the {format_trainers(world_size)}"
        fix = f"set vllm_tensor_parallel_size: {math.gcd(world_size, parallel)}, or change num_processes"
        raise config_error(recipe.source("vllm_tensor_parallel_size"), f"{problem} that would share one vLLM", fix)
    return tuple(Placement(node, count, training_gpus[node][:count]) for node, count in enumerate(counts) if count)


def spread_processes(processes: int, limits: Sequence[int]) -> list[int]:
    """Spread ``processes`` over nodes as evenly as their ``limits`` allow, and return the count of each node.

    ``limits`` has the most processes of each node. Their sum is at least ``processes``.
    """
    counts = [0] * len(limits)
    for _ in range(processes):
        node = min((node for node, limit in enumerate(limits) if counts[node] < limit), key=counts.__getitem__)
        counts[node] += 1
    return counts


def list_used_gpus(
    server_gpus: Sequence[str], trainers: Sequence[Placement], server_nodes: int = 1
) -> set[tuple[int, str]]:
    """Return the GPUs of the server and the trainers as pairs (node index, GPU id).

    The server has equally many of its GPUs on each of the first ``server_nodes`` nodes.
    """
    training = {(placement.node, gpu) for placement in trainers for gpu in placement.gpus}
    return training | {(index * server_nodes // len(server_gpus), gpu) for index, gpu in enumerate(server_gpus)}


def find_unused_gpus(resources: Resources, used: Collection[tuple[int, str]]) -> tuple[str, ...]:
    """Return the ids of the GPUs that are not in ``used``, a set of pairs (node index, GPU id).

    For several nodes, an id has the form ``1 of node 0``.
    """
    gpus = [(index, gpu) for index, node in enumerate(resources.all_nodes()) for gpu in node.gpus]
    return tuple(f"{gpu} of node {node}" if resources.nodes else gpu for node, gpu in gpus if (node, gpu) not in used)


def derive_batch(recipe: Recipe, trainers: int) -> Batch:
    """Spread the recipe's batch over at most ``trainers`` processes; raise ConfigError if groups would be incomplete.

    With ``prompts_per_step``, the batch is the same for every number of trainers. The result uses the largest number of
    trainers that divides the batch, and ``per_device_train_batch_size`` is the upper limit of a forward pass. Without
    ``prompts_per_step``, all ``trainers`` are used, and TRL's keys have the same meaning as in TRL.
    """
    added, per_device = added_task(recipe), recipe.batch.per_device_train_batch_size
    group = 1 if added else recipe.batch.num_generations  # a task without sampling has one row for each prompt
    if group is None:
        raise config_error(recipe.source("num_generations"), "num_generations is empty", "set num_generations: 8")
    if recipe.batch.prompts_per_step is not None:
        completions = recipe.batch.prompts_per_step * group
        trainers = largest_divisor(completions, trainers)
        per_device = largest_divisor(completions // trainers, per_device)
        accumulation = completions // trainers // per_device
    else:
        accumulation = recipe.batch.gradient_accumulation_steps
        per_pass, passes = trainers * per_device, recipe.batch.steps_per_generation or accumulation
        completions = per_pass * accumulation
        generated = recipe.batch.generation_batch_size or per_pass * passes
        if generated % group or generated % per_pass:
            product = f"{generated} completions per generation ({trainers} x {per_device} per device x accumulation)"
            fix = "set prompts_per_step, from which the launcher derives the other sizes"
            raise config_error(recipe.source("num_generations"), f"{product} are not whole groups of {group}", fix)
    prompt, completion = recipe.data.max_prompt_length, recipe.sampling.max_completion_length
    longest = prompt + completion if prompt and completion else None
    if added:
        longest = recipe[added.length_key]
    tokens = completions * longest if longest else None
    return Batch(completions, group, trainers, per_device, accumulation, tokens)


def count_generation_completions(recipe: Recipe, batch: Batch | Mapping[str, int]) -> int:
    """Return the number of completions that all trainers together sample in one generation.

    With ``steps_per_generation`` or ``generation_batch_size``, a generation serves several optimizer steps.
    """
    sizes = batch if isinstance(batch, Mapping) else asdict(batch)
    passes = recipe.batch.steps_per_generation or sizes["accumulation"]
    return recipe.batch.generation_batch_size or int(sizes["per_device"] * sizes["world_size"] * passes)


def derive_eval_batch(recipe: Recipe, batch: Batch) -> int | None:
    """Return the number of completions in an evaluation batch of one process; None without evaluation.

    It is the largest number for which the batches of all processes form whole groups of ``num_generations_eval``. The
    limit is ``per_device_eval_batch_size``. By default, it is the size of a training generation on one process, but at
    least a whole group. Raise ConfigError if ``per_device_eval_batch_size`` is too small for a whole group.
    """
    if recipe.evaluation.strategy == "no":
        return None
    group = recipe.evaluation.num_generations_eval or recipe.batch.num_generations
    smallest = group // math.gcd(group, batch.world_size)
    if not recipe.is_set("per_device_eval_batch_size"):
        return max(smallest, batch.per_device * batch.accumulation // smallest * smallest)
    most = recipe.evaluation.per_device_eval_batch_size
    if most < smallest:
        size = f"{format_trainers(batch.world_size)} x {most} completions"
        problem = f"{size} are not whole evaluation groups of {group}"
        fix = f"set per_device_eval_batch_size: {smallest} (or a multiple), or set num_generations_eval"
        raise config_error(recipe.source("per_device_eval_batch_size"), problem, fix)
    return int(most // smallest * smallest)


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of ``number`` that is not above ``most``."""
    return max(divisor for divisor in range(1, min(number, most) + 1) if number % divisor == 0)
