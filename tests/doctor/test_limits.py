"""Limits of the kernel, set for a child in which the doctor runs; disks, quotas, leftovers of dead runs, clocks."""

from __future__ import annotations

import os
import resource
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.doctor import limits
from grpo_recipes.doctor.limits import cgroup_cores, cgroup_memory, socket_paths
from grpo_recipes.process.scratch import make_scratch

INFINITE = resource.RLIM_INFINITY


def limited(doctor, *limits: tuple[int, tuple[int, int]]):
    def before() -> None:
        for which, values in limits:
            resource.setrlimit(which, values)

    return doctor(before=before)


def test_low_limits_are_found(doctor):
    code, found = limited(
        doctor,
        (resource.RLIMIT_NOFILE, (1024, 8192)),
        (resource.RLIMIT_NPROC, (3000, 3000)),
        (resource.RLIMIT_CORE, (2**30, 2**30)),
        (resource.RLIMIT_FSIZE, (2**30, 2**30)),
        (resource.RLIMIT_CPU, (3600, 3600)),
    )
    assert (found["open files"]["status"], found["open files"]["value"]) == ("warning", "1024 (hard 8192)")
    assert "ulimit -n 8192" in found["open files"]["fix"]
    assert (found["processes"]["status"], found["processes"]["value"]) == ("warning", "3000 (hard 3000)")
    assert found["other limits"]["status"] == "problem" and code == 2
    assert "file size (ulimit -f)" in found["other limits"]["value"] and "3600" in found["other limits"]["value"]
    piped = Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")
    assert found["core files"]["status"] == ("ok" if piped else "warning")
    assert "1.1 GB" in found["core files"]["value"]


def test_high_limits_are_right(doctor):
    _, found = limited(
        doctor,
        (resource.RLIMIT_NOFILE, (4096, 4096)),
        (resource.RLIMIT_NPROC, (4096, 4096)),
        (resource.RLIMIT_CORE, (0, 0)),
    )
    for name in ("open files", "processes", "core files", "other limits"):
        assert found[name]["status"] == "ok" and found[name]["fix"] == "", found[name]


def test_a_hard_limit_that_is_low_is_the_admins(doctor):
    _, found = limited(doctor, (resource.RLIMIT_NOFILE, (512, 512)))
    assert found["open files"]["status"] == "warning" and "admins" in found["open files"]["fix"]


def test_locked_memory_matters_with_infiniband_alone(doctor):
    _, found = limited(doctor, (resource.RLIMIT_MEMLOCK, (65536, 65536)))
    infiniband = Path("/sys/class/infiniband").is_dir()
    assert found["locked memory"]["status"] == ("warning" if infiniband else "ok")
    assert "66 kB" in found["locked memory"]["value"]


def test_one_core_is_little(doctor):
    _, found = doctor(before=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
    assert found["cores"]["status"] == "warning" and found["cores"]["value"].startswith("1 of ")


def test_a_temporary_folder_that_is_too_long_for_sockets(machine, tmp_path: Path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    found = socket_paths(machine(SLURM_TMPDIR=str(long)))
    assert found.status == "problem" and "107" in found.value and "TMPDIR" in found.fix
    with socket.socket(socket.AF_UNIX) as real, pytest.raises(OSError, match="too long"):
        real.bind(f"{long}/grpo-xxxxxxxx/{36 * 'x'}")


def test_a_short_temporary_folder_is_right(machine):
    found = socket_paths(machine(SLURM_TMPDIR="/tmp"))
    assert found.status == "ok" and found.value.startswith("55 of 107")


def cgroup(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_memory_limit_of_a_job_counts_in_cgroup_v2(tmp_path: Path):
    files = {
        "system.slice/job_5/memory.max": "8000000000",
        "system.slice/job_5/memory.current": "500",
        "system.slice/job_5/step_0/memory.max": "max",
        "system.slice/memory.max": "max",
    }
    root = cgroup(tmp_path, files)
    assert cgroup_memory("0::/system.slice/job_5/step_0\n", root) == (8000000000, 500)


def test_cgroup_v1_and_none(tmp_path: Path):
    files = {
        "memory/slurm/uid_1/job_7/memory.limit_in_bytes": "4000000000",
        "memory/slurm/uid_1/job_7/memory.usage_in_bytes": "1000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }
    root = cgroup(tmp_path, files)
    assert cgroup_memory("5:cpu:/\n4:memory:/slurm/uid_1/job_7\n0::/\n", root) == (4000000000, 1000)
    assert cgroup_memory("4:memory:/other\n", root) is None


def test_cores_of_a_cgroup(tmp_path: Path):
    assert cgroup_cores(cgroup(tmp_path / "v2", {"cpu.max": "150000 100000"})) == 1.5
    assert cgroup_cores(cgroup(tmp_path / "all", {"cpu.max": "max 100000"})) is None
    v1 = {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}
    assert cgroup_cores(cgroup(tmp_path / "v1", v1)) == 2.0
    assert cgroup_cores(cgroup(tmp_path / "none", {"cpu/cpu.cfs_quota_us": "-1"})) is None


def test_memory_of_this_machine(doctor):
    _, found = doctor()
    assert "free of" in found["memory"]["value"]


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
