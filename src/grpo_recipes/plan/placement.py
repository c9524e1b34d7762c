"""Which GPUs of which node serve and which train."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_recipes.errors import config_error
from grpo_recipes.plan.batch import spread
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.types import Share
from grpo_recipes.recipe import Recipe


def split(recipe: Recipe, resources: Resources, mode: str) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """GPUs of the server, the first ones of the first node, and for each node those left to train on.

    Raises:
        ConfigError: nothing would be left, or a node of its own is asked for where there is none.
    """
    left = [node.gpus for node in resources.all_nodes()]
    own = recipe["vllm_node"] == "own"
    if own and (mode != "server" or len(left) == 1):
        what = "there is one node" if mode == "server" else f"there is no server (vLLM: {mode})"
        raise config_error(recipe.origin("vllm_node"), f"vllm_node: own, but {what}", "write vllm_node: shared")
    if mode != "server" or resources.flavour == "cpu":
        return (), left
    parallel = recipe["vllm_tensor_parallel_size"]
    most = len(left[0]) - (1 if len(left) == 1 else 0)
    if parallel > most:
        seen = f"{len(left[0])} visible" if len(left) == 1 else f"{len(left[0])} on the first node"
        what = f"vllm_tensor_parallel_size {parallel} leaves no GPU to train on ({seen})"
        if len(left) > 1:
            what = f"vllm_tensor_parallel_size {parallel} is more than one node has ({seen})"
        fix = f"write at most {most}, or ask for more GPUs"
        raise config_error(recipe.origin("vllm_tensor_parallel_size"), what, fix)
    return left[0][:parallel], [() if own else left[0][parallel:], *left[1:]]


def trainer_count(recipe: Recipe, resources: Resources, left: Sequence[tuple[str, ...]]) -> int:
    """Training processes there may be: ``num_processes``, or one a GPU; on CPU one a node that trains.

    Raises:
        ConfigError: the recipe asks for more than there is room for.
    """
    wanted = recipe["num_processes"]
    if resources.flavour == "cuda":
        available = sum(len(gpus) for gpus in left)
    else:
        available = wanted or max(1, len(resources.nodes) - (recipe["vllm_node"] == "own"))
    if wanted is not None and wanted > available:
        what = f"num_processes {wanted} exceeds the {available} GPUs left to train on"
        raise config_error(recipe.origin("num_processes"), what, f"write at most {available}, or remove num_processes")
    count = wanted or available
    if recipe["accelerator"] == "single" and count > 1:
        if wanted is not None:
            what = f"accelerator: single runs one process, num_processes is {wanted}"
            raise config_error(recipe.origin("accelerator"), what, "write accelerator: ddp, or remove num_processes")
        count = 1
    return int(count)


def shares(
    recipe: Recipe, resources: Resources, mode: str, left: Sequence[tuple[str, ...]], world_size: int
) -> list[Share]:
    """The trainers of each node that has any, spread evenly.

    Raises:
        ConfigError: a node of the job would do nothing.
    """
    if resources.flavour == "cuda":
        rooms = [len(gpus) for gpus in left]
    else:
        rooms = [world_size] * len(left)
        rooms[0] = 0 if recipe["vllm_node"] == "own" else world_size
    counts = spread(world_size, rooms)
    serving = 1 if mode == "server" else 0
    idle = [node for node, count in enumerate(counts) if count == 0 and not (serving and node == 0)]
    if idle:
        what = f"{len(left)} nodes are allocated, the plan has nothing to do for node {idle[0]}: {world_size} " + (
            "trainers" if world_size > 1 else "trainer"
        )
        needed = len(left) - len(idle)
        own = ", or write vllm_node: own" if serving and counts[0] and recipe["vllm_node"] != "own" else ""
        raise config_error("sbatch --nodes", what, f"submit with --nodes={needed}, or more prompts_per_step{own}")
    return [Share(node, count, left[node][:count]) for node, count in enumerate(counts) if count]


def unused(resources: Resources, server_gpus: tuple[str, ...], trainers: Sequence[Share]) -> tuple[str, ...]:
    """GPUs that nothing uses; with the node where there are several."""
    used = {(share.node, gpu) for share in trainers for gpu in share.gpus} | {(0, gpu) for gpu in server_gpus}
    nodes = resources.all_nodes()
    return tuple(
        gpu if len(nodes) == 1 else f"{gpu} of node {index}"
        for index, node in enumerate(nodes)
        for gpu in node.gpus
        if (index, gpu) not in used
    )
