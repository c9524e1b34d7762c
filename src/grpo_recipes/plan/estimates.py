"""What a planned run will take: memory, disk and time, and which key to change where that does not fit. No torch."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.paths import shown
from grpo_recipes.plan.memory import (
    GIB,
    ModelShape,
    Parts,
    UnknownShape,
    Workload,
    checkpoint_states,
    read_shape,
    sequence_cache,
    server_parts,
    trained,
    trainer_parts,
)
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.health import number
from grpo_recipes.runs.rundir import Run, clock
from grpo_recipes.slurm.client import job_end_time

_GAPS = 0.05  # of a GPU: what torch's allocator cannot use between its blocks; not measured
_LENGTH_STEP, _SHARE_STEP, _LARGEST_SHARE = 128, 0.05, 0.95
_MOST_TRAINERS = 1024
_SHARING_MORE = {"ddp": ("zero2", "zero3"), "zero2": ("zero3",)}

_MOST_RUNS = 200  # newest run directories looked at
_TAIL_BYTES = 1 << 18  # of metrics.jsonl: some hundred steps are enough for a median
_MOST_ALIKE = 5  # newest of those that are like this one
_WARM_UP_STEPS = 1  # the first step of a run compiles and fills caches
_ALIKE = ("task", "model", "flavour", "mode", "completions", "world_size", "tokens")  # of a plan and its batch


def in_gib(size: int) -> str:
    """Return bytes as a number of GiB, small ones to the MiB."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 or not size else f"{size / GIB:.3f}"


@dataclass(frozen=True)
class Need:
    """What one GPU, or on CPU the processes of one role, must hold at their peak, in bytes."""

    parts: Parts
    available: int | None  # None where that is not known

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return self.available is None or self.total <= self.available

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {in_gib(size)}" for name, size in self.parts.items())
        of = "" if self.available is None else f" of {in_gib(self.available)}"
        return f"{in_gib(self.total)}{of} GiB: {parts}"


@dataclass(frozen=True)
class Memory:
    """The memory estimate of a plan."""

    roles: Mapping[str, Need]  # trainer: one process; server: one of its GPUs, on CPU all its processes
    suggestion: str | None = None  # the key to change, with its value, where it does not fit
    unknown: str = ""  # why there is no estimate

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return all(need.fits for need in self.roles.values())

    @property
    def excess(self) -> str:
        """Words that say what does not fit; none where all fits."""
        return " and ".join(
            f"the {role} needs {in_gib(need.total)} of {in_gib(need.available or 0)} GiB"
            for role, need in self.roles.items()
            if not need.fits
        )

    def lines(self) -> list[str]:
        """Return a line for each role, and one that says what does not fit."""
        if self.unknown:
            return [f"memory     not estimated: {self.unknown}"]
        lines = [f"memory     {role} {need}" for role, need in self.roles.items()]
        return lines if self.fits else [*lines, f"memory     does not fit: {self.excess}. Fix: {self.suggestion}"]


def estimate_memory(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> Memory:
    """Estimate what the processes of a plan hold at their peak; ``gpu_gib`` is the memory of one GPU, if known."""
    try:
        shape = read_shape(plan.model)
        work = Workload.of(recipe, plan)
    except UnknownShape as error:
        return Memory({}, unknown=str(error))
    gpu_bytes = int(gpu_gib * GIB) if gpu_gib is not None and plan.device == "cuda" else None
    roles = needs(shape, work, gpu_bytes)
    over = next((role for role, need in roles.items() if not need.fits), None)
    return Memory(roles, None if over is None else suggest(over, recipe, shape, work, gpu_bytes))


def needs(shape: ModelShape, work: Workload, gpu_bytes: int | None) -> dict[str, Need]:
    """Return what a training process needs of its GPU, and the server, if any, of its share of one.

    A colocated vLLM takes its share first. A server takes at least the cache of one longest sequence, else all it may.
    """
    taken = _GAPS + (work.share if work.mode == "colocate" else 0)
    roles = {"trainer": Need(trainer_parts(shape, work), None if gpu_bytes is None else int(gpu_bytes * (1 - taken)))}
    if work.mode == "transformers":
        return roles
    parts, share = server_parts(shape, work), None if gpu_bytes is None else int(gpu_bytes * work.share)
    if work.device == "cuda":
        cache = sequence_cache(shape, work, work.longest or shape.positions)
        parts["KV cache"] = cache if share is None else max(cache, share - sum(parts.values()))
    return roles | {"server": Need(parts, share)}


def suggest(role: str, recipe: Recipe, shape: ModelShape, work: Workload, gpu_bytes: int | None) -> str:
    """Name the first change by which that role fits, a colocated vLLM too: the one that costs least."""
    smallest = replace(work, per_device=1, accumulation=2, checkpointing=True)
    trains = role == "trainer"
    for text, changed in _trainer_changes(recipe, work, smallest) if trains else _server_changes(shape, work):
        roles = needs(shape, changed, gpu_bytes)
        if roles[role].fits and (work.mode != "colocate" or roles["server"].fits):
            return text
    least = in_gib(needs(shape, smallest, gpu_bytes)["trainer"].total)
    larger = f"GPUs of {least} GiB or more" if trains else "larger GPUs for the server"
    return f"no key alone makes it fit; take {larger}"


def _trainer_changes(recipe: Recipe, work: Workload, smallest: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the changes to try, cheap ones first; the last is to train the smallest workload on more GPUs."""
    completions = work.per_device * work.accumulation
    for size in range(work.per_device - 1, 0, -1):
        passes, rest = divmod(completions, size)
        if not rest:
            more = "" if recipe["prompts_per_step"] else f" and gradient_accumulation_steps: {passes}"
            yield f"per_device_train_batch_size: {size}{more}", replace(work, per_device=size, accumulation=passes)
    if not work.checkpointing:
        yield "gradient_checkpointing: true", replace(work, checkpointing=True)
    if work.mode == "colocate":
        for share in _shares(range(int(work.share / _SHARE_STEP) - 1, 0, -1)):
            yield f"vllm_gpu_memory_utilization: {share}", replace(work, share=share)
    for name in _SHARING_MORE.get(work.accelerator, ()):
        if work.world_size > 1 and not (work.adapter and name == "zero3"):
            yield f"accelerator: {name}", replace(work, accelerator=name)
    if work.adapter:
        return
    accelerator = "zero2" if work.accelerator in ("zero3", "fsdp2") else work.accelerator
    plain = "" if accelerator == work.accelerator else " and accelerator: zero2"
    yield f"use_peft: true{plain}", replace(work, adapter=16, accelerator=accelerator, reference=False)
    keys = "accelerator: zero3, gradient_checkpointing: true and per_device_train_batch_size: 1"
    for world in range(work.world_size + 1, _MOST_TRAINERS + 1):
        yield f"train on {world} GPUs, with {keys}", replace(smallest, world_size=world, accelerator="zero3")


def _shares(steps: range) -> list[float]:
    return [round(step * _SHARE_STEP, 2) for step in steps]


def _server_changes(shape: ModelShape, work: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the changes that give the server's cache more room: shorter sequences, a larger share, more GPUs."""
    longest = (work.longest or shape.positions) // _LENGTH_STEP * _LENGTH_STEP
    for length in range(longest, work.sequence - 1, -_LENGTH_STEP):
        yield f"vllm_max_model_length: {length}", replace(work, longest=length)
    if work.mode == "server":
        for share in _shares(range(int(work.share / _SHARE_STEP) + 1, round(_LARGEST_SHARE / _SHARE_STEP) + 1)):
            yield f"vllm_gpu_memory_utilization: {share}", replace(work, share=share)
    for size in range(work.parallel + 1, shape.heads + 1):
        if shape.heads % size == 0:
            yield f"vllm_tensor_parallel_size: {size}", replace(work, parallel=size)


@dataclass(frozen=True)
class Disk:
    """What a run writes, and the room for it, in bytes."""

    checkpoint: int = 0  # one of them
    checkpoints: int | None = None  # most at a time, None where nothing limits them
    model: int = 0  # model/ and adapter/
    free: int | None = None  # what the user may still write there, by the file system or its quota, if known
    folder: str = ""  # that will hold the run directory
    unknown: str = ""  # why there is no estimate

    @property
    def total(self) -> int:
        """The bytes at the worst moment; without a limit, of two checkpoints."""
        return self.checkpoint * (self.checkpoints or 2) + self.model

    @property
    def fits(self) -> bool:
        """Whether it fits, as far as is known."""
        return bool(self.unknown) or self.free is None or self.total <= self.free

    @property
    def suggestion(self) -> str:
        """The key to change, with its value."""
        room = ((self.free or 0) - self.model) // max(1, self.checkpoint) - 1  # one more is written before one goes
        if room >= 1:
            return f"save_total_limit: {room}"
        return f"run_root: a folder with {in_gib(2 * self.checkpoint + self.model)} GiB free, and save_total_limit: 1"

    def lines(self) -> list[str]:
        """Return one line, and one more where it does not fit."""
        if self.unknown:
            return [f"disk       not estimated: {self.unknown}"]
        many = f"{self.checkpoints} x" if self.checkpoints else "save_total_limit is empty, each"
        free = "" if self.free is None else f"; {in_gib(self.free)} GiB free in {shown(self.folder)}"
        parts = f"{many} checkpoint {in_gib(self.checkpoint)}, model {in_gib(self.model)}"
        line = f"disk       {in_gib(self.total)} GiB: {parts}{free}"
        return [line] if self.fits else [line, f"disk       does not fit. Fix: {self.suggestion}"]


def estimate_disk(recipe: Recipe, plan: Plan, run_dir: Path) -> Disk:
    """Estimate what a run of this plan writes, and the room for it.

    ``run_dir`` need not exist; what a resumed run has written there counts as room.
    """
    try:
        shape = read_shape(plan.model)
        work = Workload.of(recipe, plan)
    except UnknownShape as error:
        return Disk(unknown=str(error))
    model = work.element(shape) * shape.parameters
    adapter = 4 * trained(shape, work) if work.adapter else 0
    checkpoint = (adapter or model) + checkpoint_states(shape, work) + (model if recipe["sync_ref_model"] else 0)
    steps, every, limit = recipe["max_steps"], recipe["save_steps"], recipe["save_total_limit"]
    counts = [] if limit is None else [limit + 1]  # an older one is removed after a new one is complete
    if recipe["save_strategy"] == "no":
        counts = [1]  # a stopped run saves all the same
    elif steps > 0 and recipe["save_strategy"] == "steps" and every >= 1:
        counts.append(max(1, -(-steps // int(every))))
    there = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir())
    written = [path for name in ("checkpoints", "model") for path in (run_dir / name).rglob("*")]
    free = None
    with contextlib.suppress(OSError):
        disk = os.statvfs(there)
        free = disk.f_bavail * disk.f_frsize + sum(path.stat().st_size for path in written if path.is_file())
    return Disk(checkpoint, min(counts, default=None), model + adapter, free, str(run_dir.parent))


def need_room(recipe: Recipe, plan: Plan, run_dir: Path) -> None:
    """Refuse a run whose checkpoints cannot fit, before anything is started."""
    disk = estimate_disk(recipe, plan, run_dir)
    if not disk.fits:
        what = f"the run writes {in_gib(disk.total)} GiB, {in_gib(disk.free or 0)} GiB are free in {shown(disk.folder)}"
        raise config_error("run_root", what, f"write {disk.suggestion}")


@dataclass(frozen=True)
class Speed:
    """How fast earlier runs like this one were."""

    seconds: float | None  # median of an optimizer step, None without an earlier run
    runs: int  # how many were counted
    walltime: float | None  # seconds of the time limit, if known
    root: str  # where earlier runs were looked for

    @property
    def steps(self) -> int | None:
        """Optimizer steps within the time limit, start and saves not counted."""
        return None if self.seconds is None or self.walltime is None else int(self.walltime / self.seconds)

    def __str__(self) -> str:
        if self.seconds is None:
            return f"no earlier run in {shown(self.root)} with this name, model, batch and number of trainers"
        pace = f"{self.seconds:.3g} s a step in {self.runs} earlier run{'s' if self.runs > 1 else ''}"
        if self.steps is None or self.walltime is None:
            return f"{pace}: {3600 / self.seconds:,.0f} steps an hour"
        return f"{pace}: about {self.steps:,} steps in {clock(self.walltime)}"


def find_speed(plan: Plan, names: Names, walltime: float | None = None) -> Speed:
    """Return the speed of the newest earlier runs of this name, beside the run directory, on as many devices."""
    root, now = names.run_dir.parent, plan.as_json()
    medians: list[float] = []
    for record in sorted(root.glob("*/run.json"), key=_modified, reverse=True)[:_MOST_RUNS]:
        with contextlib.suppress(ConfigError, OSError, ValueError):  # files of a run are the user's to edit
            run = Run.at(record.parent)
            alike = run.identity.get("run_name") == names.run and _kind(run.plan) == _kind(now)
            rows = run.last_rows(_TAIL_BYTES) if alike and run.folder != names.run_dir else []
            seconds = [number(row.get("seconds/step")) for row in rows if row["step"] > _WARM_UP_STEPS]
            if known := [one for one in seconds if one]:
                medians.append(statistics.median(known))
        if len(medians) == _MOST_ALIKE:
            break
    return Speed(statistics.median(medians) if medians else None, len(medians), walltime, str(root))


def _modified(path: Path) -> float:
    with contextlib.suppress(OSError):  # removed meanwhile
        return path.stat().st_mtime
    return 0.0


def _kind(plan: Mapping[str, Any]) -> list[Any]:
    """Return what runs of the same speed have in common."""
    facts = {**plan.get("batch", {}), **plan}
    return [facts.get(key) for key in _ALIKE]


@dataclass(frozen=True)
class Estimates:
    """What the processes of a plan hold at their peak, what the run writes, and how fast earlier runs were."""

    memory: Memory
    disk: Disk
    speed: Speed

    def lines(self) -> list[str]:
        """Return the estimates for a person, a line a fact."""
        return [*self.memory.lines(), *self.disk.lines(), f"speed      {self.speed}"]

    def as_json(self) -> dict[str, Any]:
        """Return the estimates as plain data: bytes and seconds."""
        memory, disk, speed = self.memory, self.disk, self.speed
        roles = {role: {"total": need.total, **asdict(need)} for role, need in memory.roles.items()}
        judged = {"fits": memory.fits, "knob": memory.suggestion, "unknown": memory.unknown}
        room = {"total": disk.total, "fits": disk.fits, "knob": None if disk.fits else disk.suggestion}
        return {
            "memory": {"trainer": None, "server": None, **roles, **judged},
            "disk": {**asdict(disk), **room},
            "speed": {**asdict(speed), "steps": speed.steps},
        }


def estimate(
    plan: Plan, recipe: Recipe, names: Names, gpu_gib: float | None = None, walltime: float | None = None
) -> Estimates:
    """Estimate what a plan will take, in about a tenth of a second.

    ``gpu_gib`` is the memory of one GPU and ``walltime`` the seconds the job may take, where they are known.
    """
    speed = find_speed(plan, names, walltime)
    return Estimates(estimate_memory(recipe, plan, gpu_gib), estimate_disk(recipe, plan, names.run_dir), speed)


def job_walltime(environment: Mapping[str, str]) -> float | None:
    """Return the seconds our Slurm job has left; None outside a job, and where it has no end."""
    end = job_end_time(environment)
    return None if end is None else max(0.0, end - time.time())
