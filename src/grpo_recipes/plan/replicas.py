"""Choose the number of server replicas for ``vllm_data_parallel_size: auto`` from an earlier run of the recipe.

Sampling time is proportional to 1 / replicas, and update time to 1 / trainers. The plan with the shortest step wins,
among all plans that the GPUs allow for the same batch.

    recipe = choose_replicas(recipe, resources, lambda candidate: make_plan(candidate, resources, environment))
"""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.estimates import estimate_memory
from grpo_recipes.plan.models import UnknownShape
from grpo_recipes.plan.speed import EXPERIMENT, list_facts, list_seconds, read_runs
from grpo_recipes.plan.types import Plan
from grpo_recipes.process.reports import plural
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.runs.rundir import Run

KEY, _MODEL = "vllm_data_parallel_size", "model_name_or_path"
# Recipe keys that are equal in comparable runs, next to the model.
_ALIKE = (
    "overlap_generation", "vllm_tensor_parallel_size", "vllm_node", "num_iterations",
    "steps_per_generation", "generation_batch_size",
)  # fmt: skip


def with_replicas(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe with this number of replicas if it has ``auto``; the source of the value stays."""
    if recipe.server.data_parallel_size is not None:
        return recipe
    return recipe.with_value(KEY, Value(count, recipe.source(KEY)))


def choose_replicas(recipe: Recipe, resources: Resources, make_plan: Callable[[Recipe], Plan]) -> Recipe:
    """Return the recipe with a number of replicas instead of ``auto``, and with a note on the reason.

    The newest earlier run with the same name, model, batch and server decides. Without such a run, and on CPU, the
    number is 1. Without a server, it is 1 without a note. A recipe with another value than ``auto`` stays
    unchanged. Raise ConfigError if ``make_plan`` rejects the recipe with one replica.
    """
    if recipe.server.data_parallel_size is not None:
        return recipe
    plan, overlaps = make_plan(with_replicas(recipe, 1)), recipe.sampling.overlap_generation
    facts, model = list_facts(plan.as_json(), EXPERIMENT), _find_first_model(recipe.model.name)

    def choose(count: int, reason: str) -> Recipe:
        """Return the recipe with this number, and with a note."""
        return replace(with_replicas(recipe, count), notes=[*recipe.notes, f"{plural(count, 'replica')}: {reason}"])

    def is_comparable(run: Run) -> bool:
        """Return whether a run had the same experiment, with any number of replicas and trainers."""
        same_keys = all(run.value(key) == recipe[key] for key in _ALIKE)
        same_keys &= _find_first_model(run.value(_MODEL)) == model
        return same_keys and list_facts(run.plan, EXPERIMENT) == facts

    if plan.mode != "server":
        return with_replicas(recipe, 1)
    if plan.device == "cpu":
        return choose(1, "auto is 1 on CPU")
    for run, rows in read_runs(Path(os.path.expanduser(recipe.run.root)), recipe.run_name, is_comparable):
        seconds_of = {phase: list_seconds(rows, phase) for phase in ("sample", "score", "update")}
        if not seconds_of["sample"] or not any(seconds_of["update"]):
            continue
        # Means, because steps without a generation sample and score for 0 seconds.
        sample, score, update = (statistics.fmean(seconds or [0.0]) for seconds in seconds_of.values())
        trainers, replicas = list_facts(run.plan, ("world_size", "replicas"))
        # With overlap, the server also samples during the scores and the update, and ``sample`` is the wait after them.
        hidden = score if overlaps else 0.0
        generation, combine = (sample + hidden + update, max) if overlaps else (sample, sum)
        seconds = {
            other.replicas: combine(
                (generation * replicas / other.replicas, hidden + update * trainers / other.batch.world_size)
            )
            for other in (plan, *_list_other_plans(recipe, resources, make_plan, plan))
        }
        gpus = f"{len(run.plan['server_gpus'])} + {trainers} GPUs"
        times = f"sampled {sample:.3g} s and updated {update:.3g} s per step on {gpus}"
        return choose(min(seconds, key=seconds.__getitem__), f"run {run.folder.name} {times}")
    return choose(1, "no earlier run in run_root with this name, model and batch")


def _find_first_model(name: str) -> str:
    """Return the model that the training of a model began with: for ``RUN_DIR/model``, the model of the first run.

    Another name is returned unchanged. So runs of the second recipe of ``grpo launch A.yaml B.yaml`` are comparable,
    although each starts from another folder.
    """
    with contextlib.suppress(ConfigError, OSError, ValueError):  # users may have edited the files of a run
        if (folder := Path(name)).name == "model" and (folder.parent / "run.json").is_file():
            return _find_first_model(str(Run(folder.parent).value(_MODEL)))
    return name


def _list_other_plans(
    recipe: Recipe, resources: Resources, make_plan: Callable[[Recipe], Plan], plan: Plan
) -> Iterator[Plan]:
    """Yield the plans with several replicas that have the batch of ``plan`` and trainers that fit into memory."""
    most = len(resources.all_nodes()[0].gpus) // recipe.server.tensor_parallel_size
    for count in range(2, most + 1):
        candidate = with_replicas(recipe, count)
        with contextlib.suppress(ConfigError):
            other, fits = make_plan(candidate), True  # True also if the memory can't be estimated
            with contextlib.suppress(UnknownShape):
                fits = estimate_memory(candidate, other, resources.gpu_gib)["trainer"].fits
            if other.batch.completions == plan.batch.completions and fits:
                yield other
