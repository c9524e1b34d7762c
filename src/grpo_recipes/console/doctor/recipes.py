"""Checks of a recipe: are its models and data on this machine, and do memory and disk suffice?

Each check gets a ``Case``, which plans a launch of the recipe on this machine at the first access. If the recipe can't
run here, this raises ConfigError, and ``examine`` returns a problem for the check.
"""

import functools
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.console.doctor.environment import hub_token
from grpo_recipes.console.doctor.examine import Machine, apply_first_rule
from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import Assets, find_assets
from grpo_recipes.fetch.hub import describe_gated_model, explain_access
from grpo_recipes.launch.resolve import choose_names
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.plan.devices import find_gpu_memory, find_resources, list_used_gpus
from grpo_recipes.plan.estimates import Estimates, estimate
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.preflight import measure_free_memory
from grpo_recipes.plan.types import Plan
from grpo_recipes.process.reports import format_bytes
from grpo_recipes.process.scratch import SHARED_MEMORY
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.endings import PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning


@dataclass(frozen=True)
class Case(Machine):
    """A recipe on this machine, which the checks of recipes examine."""

    recipe: Recipe

    @functools.cached_property
    def sources(self) -> Assets:
        """The models and datasets of the recipe that are on this machine."""
        return find_assets(self.recipe, self.environment)

    @functools.cached_property
    def plan(self) -> Plan:
        """The plan of a launch on this machine; raise ConfigError if the recipe can't run here."""
        variables, names = self.environment, choose_names(self.recipe)
        return make_plan(self.recipe, find_resources(variables), variables, names, self.sources)

    @functools.cached_property
    def estimates(self) -> Estimates:
        """Memory and disk estimates of the plan, as in `grpo plan`."""
        return estimate(self.plan, self.recipe, choose_names(self.recipe), find_gpu_memory(self.environment), None)


def gpu_plan(case: Case) -> Finding:
    """Plan of a launch on this machine, with used and unused GPUs.

    Return a warning for unused GPUs, and for missing GPUs on a login node. Raise ConfigError if the recipe can't run
    with the devices of this machine.
    """
    try:
        plan = case.plan
    except ConfigError as error:
        first = error.problems[0]
        if first.where == "devices" and not case.in_job and shutil.which("sinfo"):
            fix = f"show the plan of a job with: grpo plan {shell_path(case.recipe.path)} --gpus 8"
            return warning(f"{first.what}: normal on a login node", fix)
        raise
    gpus = len(list_used_gpus(plan.server_gpus, plan.placement, plan.server_nodes))
    summary = f"vllm {plan.mode}, training processes: {plan.batch.world_size}" + (f", GPUs: {gpus}" if gpus else "")
    summary += f"; unused GPUs: {', '.join(plan.unused_gpus)}" if plan.unused_gpus else ""
    return apply_first_rule(summary, (plan.unused_gpus, WARNING, "request fewer GPUs, or change prompts_per_step"))


def assets(case: Case) -> Finding:
    """Whether the recipe's model, datasets and benchmarks are downloaded and complete, and a token for gated models.

    A missing download is a warning. An incomplete model folder, and no token for a gated model, are problems.
    """
    findings = [ok(", ".join(dict.fromkeys(asset.id for asset in case.sources.present)))]
    missing, name = case.sources.missing, case.recipe.model.name
    if missing:
        fix = f"grpo fetch {shell_path(case.recipe.path)} (before a job without network)"
        findings.append(warning(f"not fetched: {', '.join(map(str, missing))}", fix))
    if describe_gated_model(name) and case.sources.model is None and hub_token(case).value.startswith("none"):
        findings.append(problem(f"{name} is gated and there is no token", explain_access(name)))
    if (source := case.sources.model) and not source.id.startswith("smoke:"):
        folder = Path(source.path)
        weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
        if not (weights and (folder / "config.json").is_file()):
            message = f"{display_path(folder)} has no config.json, or neither *.safetensors nor pytorch_model*.bin"
            findings.append(problem(message, "use a complete model folder, or a hub id"))
    return combine_findings(findings)


def space(case: Case) -> Finding:
    """Disk space for checkpoints (save_total_limit plus one), the model, and weight synchronization through files.

    Return a problem if the disk, or the folder for weight files, has too little space. Return a warning if
    save_total_limit is not set, since then the checkpoints have no limit.
    """
    disk = case.estimates.disk
    if disk is None:
        return ok(f"not estimated: {case.estimates.unknown}")
    free_space = format_bytes(disk.available or 0)
    needed = f"about {format_bytes(disk.total)} for {disk.checkpoints_text} and the model, {free_space} free"
    full = f"free disk space, or set {disk.fix}"
    no_limit = "set save_total_limit: 2; without it, every save_steps adds a checkpoint"
    findings = [apply_first_rule(needed, (not disk.fits, PROBLEM, full), (disk.checkpoints is None, WARNING, no_limit))]
    if case.plan.bridge in ("file", "restart"):
        folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else case.temporary
        free = shutil.disk_usage(folder).free
        sync_size = f"{format_bytes(disk.parts['model'])} per sync, {format_bytes(free)} free in {folder}"
        larger = f"make {folder} larger (docker run --shm-size), or free space there"
        findings.append(apply_first_rule(sync_size, (disk.parts["model"] > free, PROBLEM, larger)))
    return combine_findings(findings)


def training_memory(case: Case) -> Finding:
    """Peak memory of trainers and server on the GPUs or on this machine, as estimated by `grpo plan`.

    Return a problem if the estimate exceeds the available memory, otherwise ok, also if it can't be estimated.
    """
    needs = case.estimates.memory
    if case.estimates.unknown:
        return ok(f"not estimated: {case.estimates.unknown}")
    if case.plan.device == "cuda":
        value = "; ".join(f"{role} {need}" for role, need in needs.items())
        return apply_first_rule(value, *((not need.fits, PROBLEM, f"set {need.fix}") for need in needs.values()))
    # On CPU, all processes share the memory of the machine.
    processes = {"trainer": case.plan.batch.world_size, "server": 1}
    needed, free = sum(need.total * processes[role] for role, need in needs.items()), measure_free_memory()
    fix = "request more (sbatch --mem), or use a smaller model"
    return apply_first_rule(
        f"about {format_bytes(needed)}, {format_bytes(free)} of memory free", (needed > free, PROBLEM, fix)
    )
