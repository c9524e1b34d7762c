"""R8: a file system without free inodes is found before a run starts, even if it has free bytes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan import preflight
from grpo_recipes.plan.disk_space import require_disk_space
from grpo_recipes.plan.estimates import estimate
from grpo_recipes.plan.preflight import describe_inode_shortage, node_problems
from grpo_recipes.plan.types import Names


@pytest.fixture
def few(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk with room for 50 files."""
    folder = tmp_path / "few"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m,nr_inodes=50", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_run_folder_without_inodes_is_rejected(few: Path, read, planned) -> None:
    recipe = read(model_name_or_path="of/unknown-size")  # otherwise the bytes that are free on this disk matter too
    with pytest.raises(ConfigError) as rejected:
        require_disk_space(recipe, planned(recipe=recipe), few / "runs" / "one")
    assert "run_root: space for 49 more files, but a run needs 500 (df -i) in" in str(rejected.value)
    assert "Fix: remove files there, or set run_root to a folder on another file system" in str(rejected.value)
    require_disk_space(recipe, planned(recipe=recipe), few.parent / "runs" / "one")  # the fix


def test_tmpdir_and_shared_memory_without_inodes_are_problems(few: Path, monkeypatch) -> None:
    monkeypatch.setattr(preflight, "SHARED_MEMORY", few)
    problems = {problem.where: problem for problem in node_problems(0, {"SLURM_TMPDIR": str(few)})}
    assert "space for 49 more files" in problems["TMPDIR"].what and "space for 49 more files" in problems[str(few)].what
    assert not any("more files, but" in problem.what for problem in node_problems(0, {}) if problem.where == "TMPDIR")


def test_a_file_system_that_counts_no_inodes_is_accepted(tmp_path: Path, monkeypatch) -> None:
    status = os.statvfs(tmp_path)
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*status[:5], 0, 0, 0, *status[8:])))
    assert describe_inode_shortage(tmp_path) == ""


def test_a_folder_name_that_is_too_long_is_not_estimated(read, planned, tmp_path) -> None:
    """A launch then reports why the folder can't be created."""
    names = Names(tmp_path / ("x" * 300) / "run", "run", "run", "stamp")
    assert describe_inode_shortage(names.run_dir) == ""
    assert estimate(planned(recipe=read()), read(), names, None, None).speed.runs == 0
