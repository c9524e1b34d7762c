"""Whether a run's memory fits its GPUs, and if not the one key to change and its value. Pure: no torch."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from grpo_recipes.plan.memory import (
    GIB,
    Parts,
    Workload,
    in_gib,
    sequence_cache,
    server_parts,
    trainer_parts,
)
from grpo_recipes.plan.model_shape import ModelShape, UnknownShape, read_shape

if TYPE_CHECKING:
    from grpo_recipes.plan.types import Plan
    from grpo_recipes.recipe import Recipe

_GAPS = 0.05  # of a GPU: what torch's allocator cannot use between its blocks
_LENGTH_STEP, _SHARE_STEP, _LARGEST_SHARE = 128, 0.05, 0.95
_MOST_TRAINERS = 1024
_SHARING_MORE = {"ddp": ("zero2", "zero3"), "zero2": ("zero3",)}


@dataclass(frozen=True)
class Need:
    """What one GPU, or on CPU the processes of one role, must hold at their peak.

    Attributes:
        parts: bytes by part.
        available: bytes there are for it, None where that is not known.
    """

    parts: Parts
    available: int | None

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it is not known to be too much."""
        return self.available is None or self.total <= self.available

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_gib(size)}" for name, size in self.parts.items())
        of = "" if self.available is None else f" of {in_gib(self.available)}"
        return f"{in_gib(self.total)}{of} GiB: {parts}"


@dataclass(frozen=True)
class Memory:
    """The estimate of a plan.

    Attributes:
        trainer: of each training process, None where nothing can be said.
        server: of the server, per GPU; None without one.
        knob: the key to change, with its value, where it does not fit.
        unknown: why there is no estimate, empty where there is one.
    """

    trainer: Need | None = None
    server: Need | None = None
    knob: str | None = None
    unknown: str = ""

    @property
    def roles(self) -> dict[str, Need]:
        """What is known of each role."""
        known = {"trainer": self.trainer, "server": self.server}
        return {role: need for role, need in known.items() if need is not None}

    @property
    def fits(self) -> bool:
        """Whether it is not known to be too much."""
        return all(need.fits for need in self.roles.values())

    @property
    def excess(self) -> str:
        """What does not fit, in words; empty where all fits."""
        return " and ".join(
            f"the {role} needs {in_gib(need.total)} of {in_gib(need.available or 0)} GiB"
            for role, need in self.roles.items()
            if not need.fits
        )

    def as_json(self) -> dict[str, Any]:
        """Plain data: bytes."""
        plain = {role: None for role in ("trainer", "server")} | {
            role: {"total": need.total, "available": need.available, "parts": need.parts}
            for role, need in self.roles.items()
        }
        return {**plain, "fits": self.fits, "knob": self.knob, "unknown": self.unknown}

    def lines(self) -> list[str]:
        """For a person: a line a role, and one that says what does not fit."""
        if self.trainer is None:
            return [f"memory     not estimated: {self.unknown}"]
        lines = [f"memory     {role} {need}" for role, need in self.roles.items()]
        return lines if self.fits else [*lines, f"memory     does not fit: {self.excess}. Fix: {self.knob}"]


def estimate_memory(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> Memory:
    """What the processes of a plan hold at their peak.

    Args:
        recipe: the recipe.
        plan: its plan.
        gpu_gib: memory of one GPU in GiB, None where it is not known.
    """
    try:
        shape = read_shape(plan.model)
        work = Workload.of(recipe, plan)
    except UnknownShape as error:
        return Memory(unknown=str(error))
    device = int(gpu_gib * GIB) if gpu_gib is not None and plan.flavour == "cuda" else None
    trainer, server = trainer_need(shape, work, device), server_need(shape, work, device)
    knob = None
    if not trainer.fits:
        knob = trainer_knob(recipe, shape, work, device)
    elif server is not None and not server.fits:
        knob = server_knob(shape, work, device)
    return Memory(trainer, server, knob)


def trainer_need(shape: ModelShape, work: Workload, device: int | None) -> Need:
    """What one training process needs of its GPU of ``device`` bytes; a colocated vLLM takes its share first."""
    taken = _GAPS + (work.share if work.mode == "colocate" else 0)
    return Need(trainer_parts(shape, work), None if device is None else int(device * (1 - taken)))


def server_need(shape: ModelShape, work: Workload, device: int | None) -> Need | None:
    """What vLLM needs of its share of a GPU: at least the cache of one longest sequence, else all that is left."""
    if work.mode == "transformers":
        return None
    parts = server_parts(shape, work)
    if work.flavour == "cpu":
        return Need(parts, None)
    cache = sequence_cache(shape, work, work.longest or shape.positions)
    if device is None:
        return Need(parts | {"KV cache": cache}, None)
    share = int(device * work.share)
    return Need(parts | {"KV cache": max(cache, share - sum(parts.values()))}, share)


def trainer_knob(recipe: Recipe, shape: ModelShape, work: Workload, device: int | None) -> str:
    """The first change by which the trainer fits: the one that costs least."""
    for text, changed in _trainer_changes(recipe, work):
        vllm = server_need(shape, changed, device) if changed.mode == "colocate" else None
        if trainer_need(shape, changed, device).fits and (vllm is None or vllm.fits):
            return text
    smallest = replace(work, per_device=1, accumulation=2, checkpointing=True)
    if not work.adapter:
        for world in range(work.world_size + 1, _MOST_TRAINERS + 1):
            spread = replace(smallest, world_size=world, accelerator="zero3")
            if trainer_need(shape, spread, device).fits:
                return (
                    f"train on {world} GPUs, with accelerator: zero3, gradient_checkpointing: true and "
                    "per_device_train_batch_size: 1"
                )
    return f"no key alone makes it fit; take GPUs of {in_gib(trainer_need(shape, smallest, device).total)} GiB or more"


def _trainer_changes(recipe: Recipe, work: Workload) -> Iterator[tuple[str, Workload]]:
    share = work.per_device * work.accumulation
    for size in range(work.per_device - 1, 0, -1):
        passes, rest = divmod(share, size)
        if not rest:
            more = "" if recipe["prompts_per_step"] else f" and gradient_accumulation_steps: {passes}"
            yield f"per_device_train_batch_size: {size}{more}", replace(work, per_device=size, accumulation=passes)
    if not work.checkpointing:
        yield "gradient_checkpointing: true", replace(work, checkpointing=True)
    if work.mode == "colocate":
        for steps in range(int(work.share / _SHARE_STEP) - 1, 0, -1):
            smaller = round(steps * _SHARE_STEP, 2)
            yield f"vllm_gpu_memory_utilization: {smaller}", replace(work, share=smaller)
    for name in _SHARING_MORE.get(work.accelerator, ()):
        if work.world_size > 1 and not (work.adapter and name == "zero3"):
            yield f"accelerator: {name}", replace(work, accelerator=name)
    if not work.adapter:
        accelerator = "zero2" if work.accelerator in ("zero3", "fsdp2") else work.accelerator
        plain = "" if accelerator == work.accelerator else " and accelerator: zero2"
        yield f"use_peft: true{plain}", replace(work, adapter=16, accelerator=accelerator, reference=False)


def server_knob(shape: ModelShape, work: Workload, device: int | None) -> str:
    """The first change by which the server holds its model and one longest sequence."""
    longest = (work.longest or shape.positions) // _LENGTH_STEP * _LENGTH_STEP
    changes: list[tuple[str, Workload]] = [
        (f"vllm_max_model_length: {length}", replace(work, longest=length))
        for length in range(longest, work.sequence - 1, -_LENGTH_STEP)
    ]
    if work.mode == "server":
        steps = range(int(work.share / _SHARE_STEP) + 1, round(_LARGEST_SHARE / _SHARE_STEP) + 1)
        shares = [round(step * _SHARE_STEP, 2) for step in steps]
        changes += [(f"vllm_gpu_memory_utilization: {share}", replace(work, share=share)) for share in shares]
    sizes = [size for size in range(work.parallel + 1, shape.heads + 1) if shape.heads % size == 0]
    changes += [(f"vllm_tensor_parallel_size: {size}", replace(work, parallel=size)) for size in sizes]
    for text, changed in changes:
        need = server_need(shape, changed, device)
        if need is None or need.fits:
            return text
    return "no key alone makes it fit; take larger GPUs for the server"


def gpu_memory() -> float | None:
    """GiB of the smallest GPU that the driver shows; None where there is no driver, or it does not answer."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in listing.split() if line.isdigit()]
    return min(sizes) / 1024 if sizes else None
