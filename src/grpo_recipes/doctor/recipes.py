"""Checks that a recipe adds: is what it needs here, and does it fit on this machine?"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from grpo_recipes.doctor.access import hub_token
from grpo_recipes.doctor.devices import visible
from grpo_recipes.doctor.limits import cgroup_memory
from grpo_recipes.doctor.machine import Machine, existing
from grpo_recipes.doctor.storage import SHARED_MEMORY
from grpo_recipes.errors import ConfigError
from grpo_recipes.fetch.assets import MODEL
from grpo_recipes.fetch.gated import gated_note
from grpo_recipes.fetch.sources import Sources, find_sources
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Plan
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.tasks import entry_of, requested_task
from grpo_recipes.runs.finding import OK, Finding, ok, problem, warning

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
# AdamW keeps two moments of the parameters' own dtype; a checkpoint holds them and the weights.
_CHECKPOINT_COPIES = 3
_TRAINING_COPIES = 4  # and the gradients
_SHARDED = ("zero3", "fsdp2")


@dataclass(frozen=True)
class Case:
    """A recipe on this machine."""

    machine: Machine
    recipe: Recipe
    task: str | None = None

    @property
    def environment(self) -> Mapping[str, str]:
        """The user's variables."""
        return self.machine.environment

    @functools.cached_property
    def sources(self) -> Sources:
        """Models and datasets that are here, and those that are missing."""
        return find_sources(self.recipe, self.environment, None)

    @functools.cached_property
    def plan(self) -> Plan:
        """What a launch would start.

        Raises:
            ConfigError: it would start nothing.
        """
        entry = entry_of(self.recipe, requested_task(self.environment, self.task))
        return make_plan(self.recipe, find_resources(self.environment), self.environment, entry=entry)

    @property
    def weights(self) -> int | None:
        """Bytes of the model's weights in the dtype of the training, None where the model is not here."""
        source = self.sources.model
        return trained_bytes(Path(source.path), self.recipe["dtype"]) if source else None

    def missing(self, model: bool) -> list[str]:
        """What a run would have to download: the model, or datasets."""
        return [str(piece) for piece in self.sources.missing if (piece.kind == MODEL) == model]


def trained_bytes(folder: Path, dtype: str | None) -> int | None:
    """Bytes of a model folder's weights once they are in ``dtype``, None without any."""
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = folder / "config.json"
    if not size or not config.is_file():
        return None
    content = json.loads(config.read_text())
    stored = content.get("dtype") or content.get("torch_dtype") or "float32"
    return size * _BYTES.get(str(dtype), _BYTES.get(stored, 4)) // _BYTES.get(stored, 4)


def gpu_plan(case: Case) -> Finding:
    """What a launch of the recipe would start here, with the GPUs that it would use and leave."""
    try:
        plan = case.plan
    except ConfigError as refused:
        first = refused.problems[0]
        if first.where == "devices" and not case.machine.in_job and case.machine.ask("sinfo", "--version"):
            return warning(f"{first.what}: usual on a login node", "grpo plan RECIPE --gpus 8 shows the plan of a job")
        raise
    gpus = len(plan.server_gpus) + sum(len(placed.gpus) for placed in plan.placement)
    what = f"vllm {plan.mode}, training processes: {plan.batch.world_size}" + (f", GPUs: {gpus}" if gpus else "")
    if plan.unused_gpus:
        return warning(
            f"{what}; nothing uses GPU {', '.join(plan.unused_gpus)}", "ask for fewer, or change prompts_per_step"
        )
    return ok(what)


def model(case: Case) -> Finding:
    """Whether the recipe's model is here, complete, at its revision."""
    if missing := case.missing(model=True):
        return _to_fetch(case, missing)
    source = case.sources.model
    assert source is not None  # a checked recipe names one
    folder = Path(source.path)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if source.id.startswith("smoke:"):
        return ok(f"built in{'' if folder.exists() else ', made by the first launch'}")
    if not (folder / "config.json").is_file() or not size:
        return problem(
            f"{shown(folder)} lacks config.json or *.safetensors", "name a complete model folder, or a hub id"
        )
    return ok(f"{source.id}, {gigabytes(size)}")


def datasets(case: Case) -> Finding:
    """Whether the recipe's datasets and benchmarks are here."""
    if missing := case.missing(model=False):
        return _to_fetch(case, missing)
    return ok(", ".join(source.id for source in case.sources.found if source.kind != MODEL))


def _to_fetch(case: Case, missing: list[str]) -> Finding:
    return warning(
        f"not fetched: {', '.join(missing)}", f"grpo fetch {shown(case.recipe.path)} (before a job without network)"
    )


def gated(case: Case) -> Finding:
    """Whether the model asks for an accepted licence, and whether there is a token to show it with."""
    name = case.recipe["model_name_or_path"]
    note = gated_note(name)
    if note is None:
        return ok("no licence to accept that is known of")
    if not case.missing(model=True):
        return ok(f"{name} is gated, and here")
    token = hub_token(case.machine)
    if token.status == OK and not token.value.startswith("none"):
        return ok(f"{name} is gated; {token.value}")
    return problem(f"{name} is gated and there is no token", note.split("; ")[0].partition("gated: ")[2])


def checkpoint_space(case: Case) -> Finding:
    """Space for the checkpoints (about 3 times the weights each, save_total_limit and one more) and the model."""
    weights = case.weights
    if weights is None:
        return ok("the model is not here: unknown")
    kept = case.recipe["save_total_limit"]
    needed = weights * (_CHECKPOINT_COPIES * ((kept or 1) + 1) + 1)
    stat = os.statvfs(existing(case.machine.run_root))
    free = stat.f_bavail * stat.f_frsize
    what = f"about {gigabytes(needed)} for {kept or 'unlimited'} + 1 checkpoints, {gigabytes(free)} free"
    if needed > free:
        return problem(what, "make room, set run_root to a larger file system, or lower save_total_limit")
    if kept is None:
        return warning(what, "write save_total_limit: 2: without it the disk fills with every save_steps")
    return ok(what)


def weights_way(case: Case) -> Finding:
    """Space in /dev/shm for the weights on their way to the server, where they go through files."""
    weights = case.weights
    if weights is None or case.plan.bridge != "file":
        return ok("not needed" if weights else "the model is not here: unknown")
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else case.machine.temporary
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    what = f"{gigabytes(weights)} a sync, {gigabytes(free)} free in {folder}"
    if weights > free:
        return problem(what, f"make {folder} larger (docker run --shm-size), or free it")
    return ok(what)


def training_memory(case: Case) -> Finding:
    """Memory for weights, gradients and optimizer (about 4 times the weights), in GPUs or in the machine."""
    weights = case.weights
    if weights is None:
        return ok("the model is not here: unknown")
    plan = case.plan
    shares = plan.batch.world_size if plan.accelerator in _SHARDED else 1
    needed = weights * _TRAINING_COPIES // shares
    if plan.flavour == "cuda":
        gpus = visible(case.machine)
        room = min((int(gpu.total_mib) for gpu in gpus if gpu.total_mib.isdigit()), default=0) * 2**20
        if not room:
            return ok("the GPUs' memory is not known")
        return _fits(needed, room, "a GPU", "write accelerator: zero3, ask for larger GPUs, or take a smaller model")
    limit = cgroup_memory()
    free = psutil.virtual_memory().available
    room = min(free, limit[0] - limit[1]) if limit else free
    # every process has its own on CPU, and so has the server
    needed = needed * plan.batch.world_size + weights
    return _fits(needed, room, "memory", "ask for more (sbatch --mem), or take a smaller model")


def _fits(needed: int, room: int, where: str, fix: str) -> Finding:
    what = f"about {gigabytes(needed)} before activations, {gigabytes(room)} of {where}"
    if needed > room:
        return problem(what, fix)
    if needed > 0.8 * room:
        return warning(what, fix)
    return ok(what)
