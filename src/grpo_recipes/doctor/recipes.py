"""Checks that a recipe adds: is everything it needs here, and does it fit on this machine?"""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.doctor.access import hub_token
from grpo_recipes.doctor.examine import Machine, judge
from grpo_recipes.doctor.limits import free_memory
from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import MODEL, Assets, find_assets
from grpo_recipes.fetch.hub import gated_note, how_to_get_access
from grpo_recipes.launch.resolve import names_of
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import find_resources, gpu_memory
from grpo_recipes.plan.estimates import Estimates, estimate
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.process.scratch import SHARED_MEMORY
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.finding import OK, PROBLEM, WARNING, Finding, ok, problem, warning


@dataclass(frozen=True)
class Case:
    """A recipe on this machine."""

    machine: Machine
    recipe: Recipe

    @functools.cached_property
    def sources(self) -> Assets:
        """Look for the models and datasets of the recipe."""
        return find_assets(self.recipe, self.machine.environment)

    @functools.cached_property
    def _names(self) -> Names:
        return names_of(self.recipe)

    @functools.cached_property
    def plan(self) -> Plan:
        """Plan what a launch would start, or raise its ConfigError."""
        variables = self.machine.environment
        return make_plan(self.recipe, find_resources(variables), variables, self._names, self.sources)

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Estimate memory and disk of the plan, as `grpo plan` does."""
        return estimate(self.plan, self.recipe, self._names, gpu_memory(self.machine.environment), None)

    def missing(self, model: bool) -> Finding | None:
        """Name the model, or the datasets, that a run would have to download."""
        names = [str(asset) for asset in self.sources.missing if (asset.kind == MODEL) == model]
        fix = f"grpo fetch {shown(self.recipe.path)} (before a job without network)"
        return warning(f"not fetched: {', '.join(names)}", fix) if names else None


def recipe(error: ConfigError) -> Finding:
    """Report what is wrong in the recipe; this check runs only for a wrong one."""
    if len(error.problems) > 1:
        first, more = error.problems[0], len(error.problems) - 1
        return problem(f"{first.where}: {first.what} (and {more} more: grpo check)", first.fix)
    raise error


def gpu_plan(case: Case) -> Finding:
    """What a launch of the recipe would start here, with the GPUs that it would use and leave."""
    try:
        plan = case.plan
    except ConfigError as error:
        first = error.problems[0]
        if first.where == "devices" and not case.machine.in_job and shutil.which("sinfo"):
            return warning(f"{first.what}: usual on a login node", "grpo plan RECIPE --gpus 8 shows the plan of a job")
        raise
    gpus = len(plan.server_gpus) + sum(len(placed.gpus) for placed in plan.placement)
    what = f"vllm {plan.mode}, training processes: {plan.batch.world_size}" + (f", GPUs: {gpus}" if gpus else "")
    what += f"; nothing uses GPU {', '.join(plan.unused_gpus)}" if plan.unused_gpus else ""
    return judge(what, (plan.unused_gpus, WARNING, "ask for fewer, or change prompts_per_step"))


def model(case: Case) -> Finding:
    """Whether the recipe's model is here, complete, at its revision."""
    if missing := case.missing(model=True):
        return missing
    source = case.sources.model
    assert source is not None  # a checked recipe names one
    folder = Path(source.path)
    if source.id.startswith("smoke:"):
        return ok(f"built in{'' if folder.exists() else ', made by the first launch'}")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not (folder / "config.json").is_file() or not size:
        what = f"{shown(folder)} lacks config.json or *.safetensors"
        return problem(what, "name a complete model folder, or a hub id")
    return ok(f"{source.id}, {gigabytes(size)}")


def datasets(case: Case) -> Finding:
    """Whether the recipe's datasets and benchmarks are here."""
    here = ", ".join(source.id for source in case.sources.found if source.kind != MODEL)
    return case.missing(model=False) or ok(here)


def gated(case: Case) -> Finding:
    """Whether the model asks for an accepted licence, and whether there is a token to show it with."""
    name = case.recipe["model_name_or_path"]
    if gated_note(name) is None:
        return ok("no licence to accept that is known of")
    if not case.missing(model=True):
        return ok(f"{name} is gated, and here")
    token = hub_token(case.machine)
    if token.status == OK and not token.value.startswith("none"):
        return ok(f"{name} is gated; {token.value}")
    return problem(f"{name} is gated and there is no token", how_to_get_access(name))


def checkpoint_space(case: Case) -> Finding:
    """Space for the checkpoints (save_total_limit and one more) and the model, as `grpo plan` estimates it."""
    disk = case.estimates.disk
    if disk is None or disk.available is None:
        return ok(f"not estimated: {case.estimates.unknown or 'free space is not known'}")
    what = f"about {gigabytes(disk.total)} for checkpoints and the model, {gigabytes(disk.available)} free"
    endless = "write save_total_limit: 2: without it the disk fills with every save_steps"
    unlimited = case.recipe["save_total_limit"] is None
    return judge(what, (not disk.fits, PROBLEM, f"make room, or write {disk.fix}"), (unlimited, WARNING, endless))


def weights_way(case: Case) -> Finding:
    """Space in /dev/shm for the weights on their way to the server, where they go through files."""
    disk = case.estimates.disk
    if case.plan.bridge != "file" or disk is None:
        return ok(f"not estimated: {case.estimates.unknown}" if case.plan.bridge == "file" else "not needed")
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else case.machine.temporary
    free = shutil.disk_usage(folder).free
    what = f"{gigabytes(disk.parts['model'])} a sync, {gigabytes(free)} free in {folder}"
    full = f"make {folder} larger (docker run --shm-size), or free it"
    return judge(what, (disk.parts["model"] > free, PROBLEM, full))


def training_memory(case: Case) -> Finding:
    """Memory of trainers and server at their peak, in GPUs or in the machine, as `grpo plan` estimates it."""
    needs = case.estimates.memory
    if case.estimates.unknown:
        return ok(f"not estimated: {case.estimates.unknown}")
    if case.plan.device == "cuda":
        what = "; ".join(f"{role} {need}" for role, need in needs.items())
        if needs["trainer"].available is None:
            return ok(f"{what}; the GPUs' memory is not known")
        return judge(what, *((not need.fits, PROBLEM, f"write {need.fix}") for need in needs.values()))
    # on CPU all processes share the machine's memory
    processes = {"trainer": case.plan.batch.world_size, "server": 1}
    needed = sum(need.total * processes[role] for role, need in needs.items())
    what, free = f"about {gigabytes(needed)}", free_memory()
    fix = "ask for more (sbatch --mem), or take a smaller model"
    return judge(f"{what}, {gigabytes(free)} of memory free", (needed > free, PROBLEM, fix))
