"""Kernel limits (set in a child process that runs the doctor), disks, and leftovers of dead runs."""

from __future__ import annotations

import math
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_recipes.console.doctor import hardware
from grpo_recipes.console.doctor.hardware import socket_paths
from grpo_recipes.plan.preflight import cgroup_cores, cgroup_memory
from grpo_recipes.process.scratch import make_scratch

INFINITE = resource.RLIM_INFINITY


def limited(doctor, *limits: tuple[int, tuple[int, int]]):
    def before() -> None:
        for which, values in limits:
            resource.setrlimit(which, values)

    return doctor(before=before)


def test_low_limits_are_found(doctor):
    code, results = limited(doctor, (resource.RLIMIT_FSIZE, (2**30, 2**30)), (resource.RLIMIT_CPU, (3600, 3600)))
    assert results["limits"]["status"] == "problem" and code == 2
    assert results["limits"]["value"] == f"file size (ulimit -f) {2**30}; CPU seconds (ulimit -t) 3600"
    assert results["limits"]["fix"].startswith("set it to unlimited before sbatch; such limits")


def test_limits_that_are_a_warning(doctor):
    _, results = limited(
        doctor,
        (resource.RLIMIT_NOFILE, (1024, 8192)),
        (resource.RLIMIT_NPROC, (3000, 3000)),
        (resource.RLIMIT_CORE, (2**30, 2**30)),
    )
    few = results["limits"]
    assert few["status"] == "warning" and "open files (ulimit -n) 1024" in few["value"]
    assert "ulimit -n 8192" in few["fix"] and "processes (ulimit -u) 3000" in few["value"]
    piped = Path("/proc/sys/kernel/core_pattern").read_text().startswith("|")
    assert ("core file" in few["value"]) == (not piped)


def test_high_limits_are_right(doctor):
    _, results = limited(
        doctor,
        (resource.RLIMIT_NOFILE, (4096, 4096)),
        (resource.RLIMIT_NPROC, (4096, 4096)),
        (resource.RLIMIT_CORE, (0, 0)),
    )
    assert results["limits"]["status"] == "ok" and results["limits"]["fix"] == "", results["limits"]


def test_a_hard_limit_that_is_low_is_the_admins(doctor):
    _, results = limited(doctor, (resource.RLIMIT_NOFILE, (512, 512)))
    assert results["limits"]["status"] == "warning" and "admins" in results["limits"]["fix"]


def test_one_core_is_little(doctor):
    _, results = doctor(before=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}))
    few = results["cores and memory"]
    assert few["status"] == "warning" and few["value"].startswith("1 of ") and "--cpus-per-task" in few["fix"]


def test_a_temporary_folder_that_is_too_long_for_sockets(machine, tmp_path: Path):
    long = tmp_path / ("x" * 60)
    long.mkdir()
    finding = socket_paths(machine(SLURM_TMPDIR=str(long)))
    assert finding.status == "problem" and "107" in finding.value and "TMPDIR" in finding.fix
    with socket.socket(socket.AF_UNIX) as real, pytest.raises(OSError, match="too long"):
        real.bind(f"{long}/grpo-xxxxxxxx/{36 * 'x'}")


def test_a_short_temporary_folder_is_right(machine):
    finding = socket_paths(machine(SLURM_TMPDIR="/tmp"))
    assert finding.status == "ok" and finding.value.startswith("55 of 107")


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
    assert cgroup_memory("4:memory:/other\n", root) == (math.inf, 0)


def test_cores_of_a_cgroup(tmp_path: Path):
    assert cgroup_cores("0::/\n", cgroup(tmp_path / "v2", {"cpu.max": "150000 100000"})) == 1.5
    assert cgroup_cores("0::/\n", cgroup(tmp_path / "all", {"cpu.max": "max 100000"})) == math.inf
    step = {"job_5/cpu.max": "200000 100000", "job_5/step_0/cpu.max": "max 100000"}
    assert cgroup_cores("0::/job_5/step_0\n", cgroup(tmp_path / "job", step)) == 2.0
    v1 = {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert cgroup_cores("3:cpu,cpuacct:/job\n", cgroup(tmp_path / "v1", v1)) == 2.0
    none = {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}
    assert cgroup_cores("3:cpu:/\n", cgroup(tmp_path / "none", none)) == math.inf


def test_memory_of_this_machine(machine):
    assert "of memory free of" in hardware.cores_and_memory(machine()).value


@pytest.fixture(autouse=True)
def quick_shared_memory(monkeypatch, tmp_path: Path):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(hardware, "SHARED_MEMORY", folder)
    return folder


def test_a_disk_without_space_is_a_problem(machine, small_disk: Path):
    finding = hardware.disk(machine(RUN_ROOT=str(small_disk / "runs")))
    assert finding.status == "problem" and "run_root" in finding.value and "run_root" in finding.fix
    finding = hardware.disk(machine(CACHE_ROOT=str(small_disk)))
    assert finding.status == "problem" and "CACHE_ROOT" in finding.value
    assert "free" in hardware.disk(machine(HF_HOME=str(small_disk))).value


def test_little_space_is_a_warning(machine, tmp_path: Path, monkeypatch):
    fake_nearly_full = SimpleNamespace(f_bavail=10**9, f_frsize=10, f_blocks=10**9, f_bfree=0)
    monkeypatch.setattr(os, "statvfs", lambda path: fake_nearly_full)
    finding = hardware.disk(machine())
    assert finding.status == "warning" and "10.0 GB free" in finding.value
    fake_nearly_full.f_frsize = 30
    assert hardware.disk(machine()).status == "ok"


@pytest.fixture
def unwritable(tmp_path: Path):
    """Create a folder that rejects writes: a read-only mount for root, which ignores modes, otherwise mode 500."""
    folder = tmp_path / "unwritable"
    folder.mkdir(mode=0o500)
    if os.geteuid() == 0:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], check=True)
    yield folder
    if os.geteuid() == 0:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_folder_that_is_not_ours_to_write(machine, unwritable: Path):
    finding = hardware.disk(machine(RUN_ROOT=str(unwritable / "runs")))
    assert finding.status == "problem" and "is not writable" in finding.value


def test_a_temporary_folder_that_is_not_there(machine):
    finding = hardware.disk(machine(TMPDIR="/no/such/folder"))
    assert finding.status != "ok" and "/no/such/folder" in finding.value


def test_space_at_home(machine, small_disk: Path):
    for home in (small_disk, "/no/such/home"):
        finding = hardware.disk(machine(HOME=str(home)))
        assert finding.status == "warning" and f"HOME {home}" in finding.value
    assert "is not writable" in hardware.disk(machine(HOME=__file__)).value
    full = hardware.disk(machine(HOME=str(small_disk), TMPDIR="/no/such/folder"))
    assert "kB free" in full.value and "~/.cache" in full.fix and "TMPDIR=/no/such" in full.value


def test_small_and_full_shared_memory(machine, monkeypatch, small_disk: Path):
    monkeypatch.setattr(hardware, "SHARED_MEMORY", small_disk)
    finding = hardware.shared_memory(machine())
    assert finding.status == "warning" and "--shm-size" in finding.fix
    fake_full = SimpleNamespace(f_bavail=1000, f_blocks=2**20, f_bfree=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: fake_full)
    assert "leftovers" in hardware.shared_memory(machine()).fix
    fake_full.f_bavail = 2**19
    assert hardware.shared_memory(machine()).status == "ok"


def test_no_shared_memory(machine, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(hardware, "SHARED_MEMORY", tmp_path / "none")
    finding = hardware.shared_memory(machine())
    assert finding.status == "warning" and "TMPDIR" in finding.fix


def old_folder(path: Path, size: int = 0) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(size))
    os.utime(path, (1, 1))
    return path


def test_leftovers_are_told_and_the_advice_removes_them(machine, quick_shared_memory: Path, tmp_path: Path):
    scratch = tmp_path / "scratch"
    dead = [old_folder(scratch / "grpo-a b"), old_folder(quick_shared_memory / "grpo-a", 3_000_000)]
    slurm_machine = machine(SLURM_TMPDIR=str(scratch))
    finding = hardware.leftovers(slurm_machine)
    assert finding.status == "warning" and finding.value == "2 of dead runs, 3.0 MB"
    subprocess.run(shlex.split(finding.fix.removeprefix("remove them: ")), check=True)
    assert not any(path.exists() for path in dead)
    assert hardware.leftovers(slurm_machine).value == "none"


def test_folders_of_living_runs_and_new_ones_are_no_leftovers(machine, tmp_path: Path):
    scratch = tmp_path / "scratch"
    used = old_folder(scratch / "grpo-used")
    (scratch / "grpo-new").mkdir()
    slurm_machine = machine(SLURM_TMPDIR=str(scratch))
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "TMPDIR": str(used)}) as living:
        assert hardware.leftovers(slurm_machine).value == "none"
        living.kill()
    assert str(used) in hardware.leftovers(slurm_machine).fix
    with subprocess.Popen([sys.executable, "-c", "input()", "--scratch", str(used)], stdin=subprocess.PIPE) as guard:
        assert hardware.leftovers(slurm_machine).value == "none"
        guard.kill()


def test_a_run_of_another_container_holds_its_folder_and_is_no_leftover(machine, tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    slurm_machine = machine(SLURM_TMPDIR=str(tmp_path / "scratch"))
    scratch = make_scratch({"SLURM_TMPDIR": str(tmp_path / "scratch")})
    os.utime(scratch.disk, (1, 1))
    assert hardware.leftovers(slurm_machine).value == "none"
    while scratch.locks:
        os.close(scratch.locks.pop())
    assert str(scratch.disk) in hardware.leftovers(slurm_machine).fix
    scratch.remove()


def test_a_folder_that_is_removed_while_it_is_looked_at_is_no_leftover(
    machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    removed, remaining = old_folder(tmp_path / "scratch/grpo-gone"), old_folder(tmp_path / "scratch/grpo-there")
    look = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: look(path) and (path != removed or not shutil.rmtree(path)))
    finding = hardware.leftovers(machine(SLURM_TMPDIR=str(tmp_path / "scratch")))
    assert finding.fix.endswith(f" {remaining}") and "1 of dead runs" in finding.value
