"""Whether weights reach vLLM in a recipe: the table ``SYNC_TABLE``, asked with what the launch adds to the recipe.

``check`` asks before anybody knows the nodes and GPUs, and ``plan`` again with them. Pure: no torch, no socket.
"""

from collections.abc import Collection, Iterator, Mapping

from grpo_recipes.errors import Problem
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.learning import trains_weights_as_loaded
from grpo_recipes.recipe.registry import COLOCATE, NOT_WITH_LORA, SYNC_METHODS, SYNC_TABLE, sync_methods_for
from grpo_recipes.recipe.rules import COLOCATED, starts_server


def accelerator_of(recipe: Recipe, trainers: int, environment: Mapping[str, str]) -> str:
    """Return how so many trainers share the model, ``custom`` where the variable ``CONFIG_FILE`` says it.

    Under ``auto`` it is DeepSpeed where nothing else keeps float32 weights.
    """
    wanted = recipe["accelerator"]
    if environment.get("CONFIG_FILE"):
        return "custom"
    if wanted == "auto" and recipe["dtype"] != "float32" and trains_weights_as_loaded(recipe):
        return "zero2"
    if wanted in ("auto", "ddp"):
        return "ddp" if trainers > 1 else "single"  # accelerate refuses --multi_gpu with one process
    return str(wanted)


def sync_problems(recipe: Recipe, environment: Mapping[str, str], device: str | None = None) -> Iterator[Problem]:
    """Yield why weights could not reach vLLM, as far as recipe, variables and ``device`` (None: any) show."""
    served, wanted = starts_server(recipe), recipe["weight_sync"]
    if not recipe["use_vllm"] or (served and wanted not in SYNC_METHODS):
        return
    accelerator = accelerator_of(recipe, recipe["num_processes"] or 1, environment)
    apart = recipe["vllm_node"] == "own"
    if problem := sync_problem(recipe, wanted if served else COLOCATE, accelerator, apart, device):
        yield problem


def sync_problem(recipe: Recipe, way: str, accelerator: str, apart: bool, device: str | None = None) -> Problem | None:
    """Return why a way of the weights does not work with a recipe, and the edit after which one does; or None.

    ``apart`` says whether another node than that of vLLM has rank 0.
    """
    parallel = (recipe["vllm_tensor_parallel_size"] or 1) > 1
    setups = [accelerator, "lora" if recipe["use_peft"] else "full", *(["tensor_parallel"] if parallel else [])]
    setups += ["nodes"] if apart else []
    others = f"weight_sync: {' or '.join(sync_methods_for(setups, device))}"
    key, name = "weight_sync", way
    if way == COLOCATE:
        key, name = COLOCATED.partition(":")[0], COLOCATED
        others = f"{key}: server and {others}"
    if found := SYNC_TABLE[way].refusal(setups):
        what = "{} does not work with {}: {}".format(name, *found)
        return recipe.problem(key, what, _fix(recipe, way, setups, others))
    if device is not None and not SYNC_TABLE[way].runs_on(device):
        return recipe.problem(key, f"{name} needs GPUs, this is a CPU environment", f"write {others}")
    return None


def _fix(recipe: Recipe, way: str, setups: Collection[str], others: str) -> str:
    """Return the edit after which weights reach vLLM: ``others`` are the ways that work with the recipe as it is."""
    if recipe["use_peft"] and not set(NOT_WITH_LORA).isdisjoint(setups):
        return "write accelerator: ddp or zero2"
    edits = {"full": ("lora", "use_peft: true")}
    edits |= {"zero2": ("ddp", "dtype: float32")} if recipe["accelerator"] == "auto" else {}
    for old, (new, edit) in edits.items():
        if old in setups and SYNC_TABLE[way].refusal([new if one == old else one for one in setups]) is None:
            return f"write {edit}, or {others}"
    return f"write {others}"
