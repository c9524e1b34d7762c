"""Disks, shared memory, quotas, leftovers of dead runs, clocks."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.doctor import limits
from grpo_recipes.process.scratch import make_scratch

QUOTA = """\
Disk quotas for user alice (uid 1000):
     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace
      /dev/sda1   50000  900000 1000000            12       0       0
fileserver.cluster.example.org:/export/home
                 980000* 900000 1000000   6days   12000       0       0
      /dev/sdb1   50000       0       0            12       0       0
"""
LFS = "     /lustre/scratch  940000  0 1000000       -   12345  0 0       -\n"


@pytest.fixture(autouse=True)
def quick_shared_memory(monkeypatch, tmp_path: Path):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(limits, "SHARED_MEMORY", folder)
    return folder


def test_a_disk_without_space_is_a_problem(machine, small_disk: Path):
    found = limits.disk(machine(RUN_ROOT=str(small_disk / "runs")))
    assert found.status == "problem" and "run_root" in found.value and "run_root" in found.fix
    found = limits.disk(machine(CACHE_ROOT=str(small_disk)))
    assert found.status == "problem" and "CACHE_ROOT" in found.value
    assert "free" in limits.disk(machine(HF_HOME=str(small_disk))).value


def test_little_space_is_a_warning(machine, tmp_path: Path, monkeypatch):
    fake_nearly_full = SimpleNamespace(
        f_bavail=10**9, f_frsize=10, f_files=10**6, f_favail=10**6, f_blocks=10**9, f_bfree=0
    )
    monkeypatch.setattr(os, "statvfs", lambda path: fake_nearly_full)
    found = limits.disk(machine())
    assert found.status == "warning" and "10.0 GB free" in found.value
    fake_nearly_full.f_frsize = 30
    assert limits.disk(machine()).status == "ok"
    fake_nearly_full.f_favail = 5
    assert "5 more files" in limits.disk(machine()).value


@pytest.fixture
def unwritable(tmp_path: Path):
    """A folder nobody writes to: a read-only mount for root, whom no mode stops; else mode 500."""
    folder = tmp_path / "unwritable"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], check=True)
    yield folder
    if os.geteuid() == 0:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_is_not_ours_to_write(machine, unwritable: Path):
    found = limits.disk(machine(RUN_ROOT=str(unwritable / "runs")))
    assert found.status == "problem" and "you may not write" in found.value
    assert limits.clock(machine(RUN_ROOT=str(unwritable))).status == "ok"


def test_a_temporary_folder_that_is_not_there(machine):
    found = limits.disk(machine(TMPDIR="/no/such/folder"))
    assert found.status != "ok" and "/no/such/folder" in found.value


def test_space_at_home(machine, small_disk: Path):
    assert limits.home_folder(machine(HOME=str(small_disk))).status == "warning"
    assert limits.home_folder(machine(HOME="/no/such/home")).status == "warning"


def test_quotas_are_read_from_quota_and_lfs(machine, fake_program):
    fake_program("quota", f"cat <<'EOF'\n{QUOTA}EOF")
    found = limits.quota(machine())
    assert found.status == "problem" and found.value == (
        "fileserver.cluster.example.org:/export/home: 1.0 GB of 921.6 MB used"
    )
    fake_program("quota", "true")
    fake_program("lfs", f"[[ $1 == quota && $2 == -q ]] && echo '{LFS}'")
    found = limits.quota(machine())
    assert found.status == "warning" and found.value == "/lustre/scratch: 962.6 MB of 1.0 GB used"
    fake_program("lfs", f"echo '{LFS.replace('940000', '10')}'")
    assert limits.quota(machine()).status == "ok"


def test_no_quota(machine, no_program):
    assert limits.quota(machine()).value == "quota and lfs are not installed"


def test_small_and_full_shared_memory(machine, monkeypatch, small_disk: Path):
    monkeypatch.setattr(limits, "SHARED_MEMORY", small_disk)
    found = limits.shared_memory(machine())
    assert found.status == "warning" and "--shm-size" in found.fix
    fake_full = SimpleNamespace(f_bavail=1000, f_blocks=2**20, f_bfree=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: fake_full)
    assert "leftovers" in limits.shared_memory(machine()).fix
    fake_full.f_bavail = 2**19
    assert limits.shared_memory(machine()).status == "ok"


def test_no_shared_memory(machine, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path / "none")
    found = limits.shared_memory(machine())
    assert found.status == "warning" and "TMPDIR" in found.fix


def old_folder(path: Path, size: int = 0) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(size))
    os.utime(path, (1, 1))
    return path


def test_leftovers_are_told_and_the_advice_removes_them(machine, quick_shared_memory: Path, tmp_path: Path):
    scratch = tmp_path / "scratch"
    dead = [old_folder(scratch / "grpo-a b"), old_folder(quick_shared_memory / "grpo-a", 3_000_000)]
    asked = machine(SLURM_TMPDIR=str(scratch))
    found = limits.leftovers(asked)
    assert found.status == "warning" and found.value == "2 of dead runs, 3.0 MB"
    subprocess.run(shlex.split(found.fix.removeprefix("remove them: ")), check=True)
    assert not any(path.exists() for path in dead)
    assert limits.leftovers(asked).value == "none"


def test_folders_of_living_runs_and_new_ones_are_no_leftovers(machine, tmp_path: Path):
    scratch = tmp_path / "scratch"
    used = old_folder(scratch / "grpo-used")
    (scratch / "grpo-new").mkdir()
    asked = machine(SLURM_TMPDIR=str(scratch))
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "TMPDIR": str(used)}) as living:
        assert limits.leftovers(asked).value == "none"
        living.kill()
    assert str(used) in limits.leftovers(asked).fix
    with subprocess.Popen([sys.executable, "-c", "input()", "--scratch", str(used)], stdin=subprocess.PIPE) as guard:
        assert limits.leftovers(asked).value == "none"
        guard.kill()


def test_a_run_of_another_container_holds_its_folder_and_is_no_leftover(machine, tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    asked = machine(SLURM_TMPDIR=str(tmp_path / "scratch"))
    made = make_scratch({"SLURM_TMPDIR": str(tmp_path / "scratch")})
    os.utime(made.disk, (1, 1))
    assert limits.leftovers(asked).value == "none"
    while made.locks:
        os.close(made.locks.pop())
    assert str(made.disk) in limits.leftovers(asked).fix
    made.remove()


def test_the_clock_of_the_file_system(machine, tmp_path: Path, monkeypatch):
    asked = machine(RUN_ROOT=str(tmp_path / "runs"))
    assert limits.clock(asked).status == "ok"
    assert list(tmp_path.glob(".grpo-clock*")) == []
    fake_late_clock = SimpleNamespace(time=lambda: time.time() + 90)
    monkeypatch.setattr(limits, "time", fake_late_clock)
    found = limits.clock(asked)
    assert found.status == "warning" and "90 s off" in found.value
