"""Estimate the memory, disk and time of a planned run, and suggest a key to change if it does not fit. No torch.

    estimate(plan, recipe, names, gpu_gib=80.0, walltime=None).lines()

``Workload`` computes the memory of each process.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_recipes.fetch.assets import format_fetch_command
from grpo_recipes.plan.models import Facts, UnknownShape
from grpo_recipes.plan.needs import GIB, Disk, Need, format_gib
from grpo_recipes.plan.speed import Speed, find_speed
from grpo_recipes.plan.types import Names, Plan
from grpo_recipes.plan.workload import Workload
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.registry import EXTERNAL, SYNC_METHODS

_LENGTH_STEP, _SHARES = 128, 20  # suggestions change lengths by 128 tokens and GPU memory by 1/20
_SHARING_MORE = {"ddp": ("zero2", "zero3"), "zero2": ("zero3",)}


def estimate_memory(recipe: Recipe, plan: Plan, gpu_gib: float | None) -> dict[str, Need]:
    """Estimate the memory of a trainer and of the server: role -> need. A need that does not fit has a fix.

    ``gpu_gib`` is the memory of one GPU, or None if it is unknown. Raise UnknownShape as ``Workload.of`` does.
    """
    work = Workload.of(recipe, plan)
    gpu = int(gpu_gib * GIB) if gpu_gib is not None and plan.device == "cuda" else None
    needs = find_needs(work, gpu)
    return {
        role: need if need.fits else replace(need, fix=suggest_fix(role, recipe, work, gpu))
        for role, need in needs.items()
    }


def find_needs(work: Workload, gpu: int | None) -> dict[str, Need]:
    """Return the need of ``trainer``, one process, and of ``server``, vLLM if the run has one, also inside trainers.

    ``gpu`` is the bytes of one GPU, or None. On a GPU with a trainer, vLLM takes its share first, or with sleep mode
    only during generations. A server needs at least the KV cache of a sequence of maximal length.
    """
    share = work["vllm_gpu_memory_utilization"]
    trainer_share = 1 - (share if work.one_gpu and not work.sleeps else 0)
    parts = work.trainer(int((gpu or 0) * share) if work.sleeps else 0)
    needs = {"trainer": Need(parts, None if gpu is None else int(gpu * trainer_share))}
    if work["mode"] in ("transformers", EXTERNAL):
        return needs
    parts, available = work.server(), None if gpu is None else int(gpu * share)
    if work["device"] == "cuda":
        remaining = (available or 0) - sum(parts.values())
        parts["KV cache"] = max(remaining, work.sequence_cache(work["vllm_max_model_length"]))
    if work.packed_buffers:  # allocated outside of vLLM's share
        parts["weights in transit"] = work.packed_buffers
        available = None if gpu is None else min(gpu, int(gpu * share) + work.packed_buffers)
    return needs | {"server": Need(parts, available)}


def suggest_fix(role: str, recipe: Recipe, work: Workload, gpu: int | None) -> str:
    """Return the first change of recipe keys with which a role fits into memory, as text, e.g. "use_peft: true".

    The changes are tried in the order of ``_list_changes``: changes that cost little speed come first. If no change is
    enough, the text asks for larger GPUs. ``gpu`` is the memory of one GPU in bytes.
    """
    for change in _list_changes(role, recipe, work):
        if _is_rejected(work, change):
            continue
        needs = find_needs(Workload({**work, **change}), gpu)
        if needs[role].fits and (not work.one_gpu or needs["server"].fits):
            return " and ".join(f"{key}: {str(value).lower()}" for key, value in change.items())
    larger = "no single key makes it fit; use larger GPUs"
    if role == "server":
        return f"{larger} for the server"
    if work["use_peft"] or _is_rejected(work, {"accelerator": "zero3"}):
        return larger
    return f"{larger}, or more GPUs{'' if work['accelerator'] == 'zero3' else ' with accelerator: zero3'}"


def _is_rejected(work: Workload, change: Facts) -> bool:
    """Return whether the run's weight sync method does not support the recipe keys in ``change``."""
    setups = {"vllm_tensor_parallel_size": "tensor_parallel", "use_peft": "lora"}
    changed = [setups.get(key, str(value)) for key, value in change.items() if key in setups or key == "accelerator"]
    return work["bridge"] is not None and SYNC_METHODS[work["bridge"]].refusal(changed) is not None


def _list_changes(role: str, recipe: Recipe, work: Workload) -> Iterator[Facts]:
    """Yield changes of recipe keys (key -> value) that reduce the memory of a role, cheapest in speed first.

    For the server these are the length, the memory fraction and tensor parallelism. For a trainer these are the
    micro-batch, gradient checkpointing, vLLM's fraction and sleep mode, DeepSpeed and LoRA.
    """
    share, heads = int(work["vllm_gpu_memory_utilization"] * _SHARES), work["heads"]
    if role == "server":
        longest = work["vllm_max_model_length"] // _LENGTH_STEP * _LENGTH_STEP
        yield from ({"vllm_max_model_length": most} for most in range(longest, work["sequence"] - 1, -_LENGTH_STEP))
        steps = (*range(share + 1, _SHARES), *range(share, 0, -1)) if not work.one_gpu else ()
        yield from ({"vllm_gpu_memory_utilization": step / _SHARES} for step in steps)
        sizes = range(work["vllm_tensor_parallel_size"] + 1, heads + 1)
        yield from ({"vllm_tensor_parallel_size": size} for size in sizes if heads % size == 0)
        return
    for size in range(work["per_device_train_batch_size"] - 1, 0, -1):
        passes, remainder = divmod(work["completions"], size)
        if not remainder:
            accumulation = {} if recipe.batch.prompts_per_step else {"gradient_accumulation_steps": passes}
            yield {"per_device_train_batch_size": size, **accumulation}
    yield {"gradient_checkpointing": True}
    if work.one_gpu:
        yield from ({"vllm_gpu_memory_utilization": step / _SHARES} for step in range(share - 1, 0, -1))
    if work["mode"] == "colocate":
        yield {"vllm_enable_sleep_mode": True}
    for name in _SHARING_MORE.get(work["accelerator"], ()):
        if work["world_size"] > 1 and not (work["use_peft"] and name == "zero3"):
            yield {"accelerator": name}
    yield {"use_peft": True, **({"accelerator": "zero2"} if work["accelerator"] in ("zero3", "fsdp2") else {})}


def estimate_disk(recipe: Recipe, plan: Plan, run_dir: Path) -> Disk:
    """Estimate the bytes that a run of this plan writes, and the free bytes on its disk.

    Without a limit of checkpoints, two are counted. ``run_dir`` need not exist. Files that a resumed run has already
    written there count as free. If the disk is too small, ``fix`` of the result has settings that help. Raise
    UnknownShape as ``Workload.of`` does.
    """
    work = Workload.of(recipe, plan)
    model_size = work.element * work["parameters"]
    checkpoint = work.checkpoint() + (model_size if recipe.loss.sync_ref_model else 0)
    final_model = model_size + (4 * work.trained if recipe.lora.use_peft else 0)  # model/ and adapter/
    steps, every, limit = recipe.batch.max_steps, recipe.run.save_steps, recipe.run.save_total_limit
    if recipe.evaluation.load_best_model_at_end:
        every, limit = min(every, recipe.evaluation.steps or every), limit and max(limit, 2)
    counts = [] if limit is None else [limit + 1]  # an old checkpoint is removed after a new checkpoint is complete
    if recipe.run.save_strategy == "no":
        counts = [1]  # a stopped run saves in any case
    elif steps > 0 and recipe.run.save_strategy == "steps":
        counts.append(max(1, -(-steps // math.ceil(every if every >= 1 else steps * every))))
    most, free = min(counts, default=None), None
    existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if os.path.isdir(folder))
    with contextlib.suppress(OSError):
        disk = os.statvfs(existing)
        written = [path for name in ("checkpoints", "model") for path in (run_dir / name).rglob("*") if path.is_file()]
        free = disk.f_bavail * disk.f_frsize + sum(path.stat().st_size for path in written)
    need = Disk({"checkpoints": checkpoint * (most or 2), "model": final_model}, free, checkpoints=most)
    if need.fits:
        return need
    fitting = ((free or 0) - final_model) // max(
        1, checkpoint
    ) - 1  # a new checkpoint is written before an old checkpoint goes
    larger_disk = (
        f"run_root: a folder with {format_gib(2 * checkpoint + final_model)} GiB free, and save_total_limit: 1"
    )
    return replace(need, fix=f"save_total_limit: {fitting}" if fitting >= 1 else larger_disk)


@dataclass(frozen=True)
class Estimates:
    """Peak memory of a plan's processes, bytes on disk, and the speed of earlier runs."""

    memory: Mapping[str, Need]  # by role: one training process, one of the server's GPUs or, on CPU, the whole server
    disk: Disk | None  # None if unknown
    speed: Speed  # from earlier runs
    unknown: str = ""  # reason without estimates of memory and disk

    def lines(self) -> list[str]:
        """Format the estimates as lines for a person: a verdict, memory of each role, disk space of the run, and speed.

        A need that does not fit gets another line with a fix. If memory and disk space are unknown, lines
        have the reason.
        """
        needs = [("memory", role, need) for role, need in self.memory.items()]
        needs += [("disk", "run", self.disk)] if self.disk else []
        return [
            f"verdict    {self.verdict()}",
            *(f"{topic:<10} not estimated: {self.unknown}" for topic in ("memory", "disk") if self.unknown),
            *(f"{topic:<10} {role} {need}" for topic, role, need in needs),
            *(
                f"{topic:<10} does not fit: the {role} needs {need.size}. Fix: {need.fix}"
                for topic, role, need in needs
                if not need.fits
            ),
            f"speed      {self.speed}",
        ]

    def verdict(self) -> str:
        """Return whether memory and disk space suffice, as one text: "memory of the trainer does not fit"."""
        needs = {f"memory of the {role}": need for role, need in self.memory.items()}
        needs |= {"disk space of the run": self.disk} if self.disk else {}
        missing = [name for name, need in needs.items() if not need.fits]
        if missing:
            return f"does not fit: {', '.join(missing)}"
        if not needs:
            return "memory and disk space unknown"
        unknown = [name for name, need in needs.items() if need.available is None]
        sufficient = [name for name in needs if name not in unknown]
        if not unknown:
            return "memory and disk space are sufficient"
        parts = [f"{', '.join(sufficient)} is sufficient"] if sufficient else []
        return "; ".join([*parts, f"no known limit for {', '.join(unknown)}"])


def estimate(plan: Plan, recipe: Recipe, names: Names, gpu_gib: float | None, walltime: float | None) -> Estimates:
    """Estimate memory, disk and speed of a plan in about 0.1 seconds.

    ``gpu_gib`` is the memory of one GPU and ``walltime`` the job's time limit in seconds; None if unknown. If
    ``Workload.of`` raises UnknownShape, the result has no memory and no disk, and gives the reason.
    """
    speed = find_speed(plan, names, walltime)
    try:
        memory, disk = estimate_memory(recipe, plan, gpu_gib), estimate_disk(recipe, plan, names.run_dir)
    except UnknownShape as error:
        reason = str(error).replace("grpo fetch RECIPE", format_fetch_command(recipe))
        return Estimates({}, None, speed, reason)
    return Estimates(memory, disk, speed)
