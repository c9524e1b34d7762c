"""Whether a run finds room on its disk, for its bytes and for its files, before anything is started."""

import contextlib
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.paths import display_path
from grpo_recipes.plan.estimates import UnknownShape, estimate_disk, in_gib
from grpo_recipes.plan.preflight import few_inodes
from grpo_recipes.plan.types import Plan
from grpo_recipes.recipe import Recipe


def need_room(recipe: Recipe, plan: Plan, run_dir: Path) -> None:
    """Reject a run whose files or checkpoints can't fit."""
    if few := few_inodes(run_dir):
        fix = "remove files there, or set run_root to a folder on another file system"
        raise config_error("run_root", f"{few} in {display_path(run_dir.parent)}", fix)
    with contextlib.suppress(UnknownShape):
        disk = estimate_disk(recipe, plan, run_dir)
        if not disk.fits:
            free = f"{in_gib(disk.available or 0)} GiB are free in {display_path(run_dir.parent)}"
            raise config_error("run_root", f"the run writes {in_gib(disk.total)} GiB, {free}", f"write {disk.fix}")
