"""Limits of the kernel: set for a child, and found by the doctor that runs in it."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from grpo_recipes.doctor.limits import cgroup_cores, cgroup_memory, socket_paths

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
