"""Check before the start that the disk has enough free bytes and inodes for a run."""

import contextlib
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.paths import display_path
from grpo_recipes.plan.estimates import estimate_disk
from grpo_recipes.plan.models import UnknownShape
from grpo_recipes.plan.needs import format_gib
from grpo_recipes.plan.preflight import describe_inode_shortage
from grpo_recipes.plan.types import Plan
from grpo_recipes.recipe import Recipe


def require_disk_space(recipe: Recipe, plan: Plan, run_dir: Path) -> None:
    """Raise ConfigError if the files or checkpoints of a run do not fit on its disk.

    If the disk space of the run can't be estimated, only the number of free inodes is checked.
    """
    if shortage := describe_inode_shortage(run_dir):
        fix = "remove files there, or set run_root to a folder on another file system"
        raise config_error("run_root", f"{shortage} in {display_path(run_dir.parent)}", fix)
    with contextlib.suppress(UnknownShape):
        disk = estimate_disk(recipe, plan, run_dir)
        if not disk.fits:
            free = f"{format_gib(disk.available or 0)} GiB are free in {display_path(run_dir.parent)}"
            problem = f"the run writes up to {format_gib(disk.total)} GiB, but only {free}"
            raise config_error("run_root", problem, f"set {disk.fix}")
