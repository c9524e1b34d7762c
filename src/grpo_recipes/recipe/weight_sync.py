"""Check whether a recipe's weight sync method works with its accelerator, adapter, server and nodes.

The table ``registry.SYNC_TABLE`` decides. `grpo check` runs the check before the nodes and GPUs are known, and the plan
repeats it with them. This module needs no torch and opens no socket.
"""

from collections.abc import Collection, Iterator, Mapping

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import mixed_precision, served_dtype, trains_weights_as_loaded
from grpo_recipes.recipe.registry import COLOCATE, NOT_WITH_LORA, SYNC_METHODS, SYNC_TABLE, sync_methods_for
from grpo_recipes.recipe.rules import COLOCATED, starts_server


def accelerator_of(recipe: Recipe, trainers: int, environment: Mapping[str, str]) -> str:
    """Return the accelerator for this number of trainers; ``custom`` if the variable ``CONFIG_FILE`` is set.

    ``auto`` selects DeepSpeed ZeRO-2 if nothing else keeps float32 weights. Otherwise ``auto`` and ``ddp`` become
    ``single`` for one trainer, and ``ddp`` for several.
    """
    accelerator = recipe.processes.accelerator
    if environment.get("CONFIG_FILE"):
        return "custom"
    if accelerator == "auto" and recipe.model.dtype != "float32" and trains_weights_as_loaded(recipe):
        return "zero2"
    if accelerator in ("auto", "ddp"):
        return "ddp" if trainers > 1 else "single"  # accelerate rejects --multi_gpu with one process
    return accelerator


def sync_problems(recipe: Recipe, environment: Mapping[str, str], device: str | None = None) -> Iterator[Problem]:
    """Yield a problem if the recipe's weight sync method does not work in the recipe's setup.

    ``device`` is "cpu", "cuda", or None if it is unknown.
    """
    has_server, method = starts_server(recipe), recipe.server.weight_sync
    if not recipe.server.use_vllm or (has_server and method not in SYNC_METHODS):
        return
    accelerator = accelerator_of(recipe, recipe.processes.num_processes or 1, environment)
    apart = recipe.server.node == "own" or recipe.server.nodes > 1
    if problem := sync_problem(recipe, method if has_server else COLOCATE, accelerator, apart, device):
        yield problem


def sync_problem(
    recipe: Recipe, method: str, accelerator: str, apart: bool, device: str | None = None
) -> Problem | None:
    """Return the problem of a weight sync method in a recipe's setup, with the fix; None if it works.

    ``method`` is a key of ``SYNC_TABLE``, so it may be COLOCATE. ``accelerator`` is a result of ``accelerator_of``.
    ``apart`` means that vLLM and rank 0 run on different nodes. ``device`` is "cpu", "cuda", or None if it is unknown.
    """
    server = recipe.server
    setups = [accelerator, "lora" if recipe.lora.use_peft else "full"]
    setups += ["tensor_parallel"] if server.tensor_parallel_size > 1 else []
    setups += ["replicas"] if server.data_parallel_size != 1 else []
    setups += ["nodes"] if apart else []
    working = f"weight_sync: {' or '.join(sync_methods_for(setups, device))}"
    key, name = "weight_sync", method
    if method == COLOCATE:
        key, name = COLOCATED.partition(":")[0], COLOCATED
        working = f"{key}: server and {working}"
    if refusal := SYNC_TABLE[method].refusal(setups):
        message = "{} does not work with {}: {}".format(name, *refusal)
        return recipe.problem(key, message, _suggest_fix(recipe, method, setups, working))
    if device is not None and not SYNC_TABLE[method].runs_on(device):
        return recipe.problem(key, f"{name} needs GPUs, this is a CPU environment", f"write {working}")
    if (method, device, served_dtype(recipe.model.dtype, mixed_precision(recipe))) == ("lora", "cuda", "float32"):
        message = "lora needs bf16 or fp16 on GPUs: vLLM's kernels for adapters do not compute in float32"
        return recipe.problem(key, message, "write bf16: true, or weight_sync: file")
    return None


def _suggest_fix(recipe: Recipe, method: str, setups: Collection[str], working: str) -> str:
    """Return the fix for a ``method`` that does not work in these setups: a change of the setup, or a working method.

    ``working`` is the setting that selects a working method without another change. Changes are another accelerator,
    ``use_peft: true``, or ``dtype: float32``.
    """
    if recipe.lora.use_peft and not set(NOT_WITH_LORA).isdisjoint(setups):
        return "write accelerator: ddp or zero2"
    edits = {"full": ("lora", "use_peft: true")}
    edits |= {"zero2": ("ddp", "dtype: float32")} if recipe.processes.accelerator == "auto" else {}
    for old, (new, edit) in edits.items():
        changed = [new if setup == old else setup for setup in setups]
        if old in setups and SYNC_TABLE[method].refusal(changed) is None:
            return f"write {edit}, or {working}"
    return f"write {working}"
