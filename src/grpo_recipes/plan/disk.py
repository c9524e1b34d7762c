"""Whether the checkpoints of a run fit the disk of its run directory. Pure but for asking the disk: no torch."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.paths import shown
from grpo_recipes.plan.memory import Workload, checkpoint_states, in_gib, trained
from grpo_recipes.plan.model_shape import UnknownShape, read_shape

if TYPE_CHECKING:
    from grpo_recipes.plan.types import Plan
    from grpo_recipes.recipe import Recipe


@dataclass(frozen=True)
class Disk:
    """What a run writes, and the room for it.

    Attributes:
        checkpoint: bytes of one checkpoint.
        checkpoints: how many there are at most at a time, None where nothing limits them.
        model: bytes of ``model/``, and ``adapter/``.
        free: bytes the user may still write where the run directory comes (the file system's own count, quota where
            it knows of one); None where that cannot be told.
        folder: where the run directory comes.
        unknown: why there is no estimate, empty where there is one.
    """

    checkpoint: int = 0
    checkpoints: int | None = None
    model: int = 0
    free: int | None = None
    folder: str = ""
    unknown: str = ""

    @property
    def total(self) -> int:
        """Bytes at the worst moment; without a limit, of two checkpoints."""
        return self.checkpoint * (self.checkpoints or 2) + self.model

    @property
    def fits(self) -> bool:
        """Whether it is not known to be too much."""
        return bool(self.unknown) or self.free is None or self.total <= self.free

    @property
    def knob(self) -> str:
        """The key to change, with its value."""
        room = ((self.free or 0) - self.model) // max(1, self.checkpoint) - 1  # one more is written before one goes
        if room >= 1:
            return f"save_total_limit: {room}"
        return f"run_root: a folder with {in_gib(2 * self.checkpoint + self.model)} GiB free, and save_total_limit: 1"

    def as_json(self) -> dict[str, Any]:
        """Plain data: bytes."""
        return {**asdict(self), "total": self.total, "fits": self.fits, "knob": None if self.fits else self.knob}

    def lines(self) -> list[str]:
        """For a person: one line, and one more where it does not fit."""
        if self.unknown:
            return [f"disk       not estimated: {self.unknown}"]
        many = f"{self.checkpoints} x" if self.checkpoints else "save_total_limit is empty, each"
        free = "" if self.free is None else f"; {in_gib(self.free)} GiB free in {shown(self.folder)}"
        parts = f"{many} checkpoint {in_gib(self.checkpoint)}, model {in_gib(self.model)}"
        line = f"disk       {in_gib(self.total)} GiB: {parts}{free}"
        return [line] if self.fits else [line, f"disk       does not fit. Fix: {self.knob}"]


def estimate_disk(recipe: Recipe, plan: Plan, run_dir: Path) -> Disk:
    """What a run of this plan writes, and the room for it.

    Args:
        recipe: the recipe.
        plan: its plan.
        run_dir: its run directory, which need not be there; what a resumed run has written there counts as room.
    """
    try:
        shape = read_shape(plan.model)
        work = Workload.of(recipe, plan)
    except UnknownShape as error:
        return Disk(unknown=str(error))
    model = work.element(shape) * shape.parameters
    adapter = 4 * trained(shape, work) if work.adapter else 0
    checkpoint = (adapter or model) + checkpoint_states(shape, work)
    if recipe["sync_ref_model"]:
        checkpoint += model
    return Disk(checkpoint, _kept(recipe), model + adapter, _room(run_dir), str(run_dir.parent))


def _kept(recipe: Recipe) -> int | None:
    """Checkpoints at a time: an older one is removed after a new one is complete."""
    if recipe["save_strategy"] == "no":
        return 1  # a stopped run saves all the same
    steps, every, limit = recipe["max_steps"], recipe["save_steps"], recipe["save_total_limit"]
    saves = None
    if steps > 0 and recipe["save_strategy"] == "steps":
        saves = max(1, -(-steps // int(every))) if every >= 1 else None
    if limit is None:
        return saves
    return limit + 1 if saves is None else min(limit + 1, saves)


def _room(run_dir: Path) -> int | None:
    """Bytes the user may use there, with those of earlier checkpoints of this very run."""
    there = next((folder for folder in (run_dir, *run_dir.absolute().parents) if folder.is_dir()), None)
    if there is None:
        return None
    try:
        disk = os.statvfs(there)
        return disk.f_bavail * disk.f_frsize + sum(_size(run_dir / name) for name in ("checkpoints", "model"))
    except OSError:
        return None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def need_room(recipe: Recipe, plan: Plan, run_dir: Path) -> None:
    """Refuse a run whose checkpoints cannot fit.

    Raises:
        ConfigError: nothing was started.
    """
    disk = estimate_disk(recipe, plan, run_dir)
    if not disk.fits:
        raise _too_much(disk)


def _too_much(disk: Disk) -> ConfigError:
    what = f"the run writes {in_gib(disk.total)} GiB, {in_gib(disk.free or 0)} GiB are free in {shown(disk.folder)}"
    return config_error("run_root", what, f"write {disk.knob}")
