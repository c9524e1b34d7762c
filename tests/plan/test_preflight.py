"""Report missing resources of a node before a run starts.

Limits and folders are real, nvidia-smi and cgroups are fake.
"""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from run_folders import small_disk

from grpo_recipes.paths import find_code_root
from grpo_recipes.plan import preflight
from grpo_recipes.plan.preflight import find_driver_problem, find_shortages, node_problems, parse_slurm_bytes

__all__ = ["small_disk"]
SMOKE = str(find_code_root() / "recipes/smoke/grpo.yaml")


@pytest.mark.parametrize(
    ("gpus", "cores", "memory", "options"),
    [
        (8, 16, 64e9, []),
        (8, 15, 64e9, ["--cpus-per-task=64"]),
        (8, 1, 4e9, ["--cpus-per-task=64", "--mem=256G"]),
        (2, 4, 15e9, ["--mem=64G"]),
        (0, 1, 1e9, []),
        (8, math.inf, math.inf, []),
    ],
)
def test_cores_and_memory_are_judged_by_the_gpus_there_are(gpus, cores, memory, options):
    assert [option for _, option in find_shortages(gpus, cores, memory)] == options


def test_no_more_is_asked_for_than_the_node_has():
    assert find_shortages(8, 4, 16e9, most_cores=12, most_memory=48e9) == []
    assert [option for _, option in find_shortages(4, 4, 16e9, 12, 40 * 2**30)] == ["--cpus-per-task=12", "--mem=40G"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("256G", 256 * 2**30), ("4000", 4000 * 2**20), ("2T", 2**41), ("64gb", 2**36), ("0", math.inf), (None, math.inf)],
)
def test_memory_as_slurm_writes_it(text, size):
    assert parse_slurm_bytes(text) == size


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``eight_gpus(driver=..., cores=..., memory=...)``: a fake nvidia-smi, and the limits of a job."""

    def make(driver: str = "580.95.05", cores: float = 64, memory: float = 256e9) -> None:
        programs = tmp_path / "programs"
        programs.mkdir()
        (programs / "nvidia-smi").write_text(f"#!/bin/sh\nfor i in 1 2 3 4 5 6 7 8; do echo {driver}; done\n")
        (programs / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        monkeypatch.setattr(preflight, "read_torch_cuda", lambda: "13.0")
        monkeypatch.setattr(preflight, "cgroup_cores", lambda: cores)
        monkeypatch.setattr(preflight, "cgroup_memory", lambda: (memory, 0))
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
        monkeypatch.setattr(os, "cpu_count", lambda: 64)
        monkeypatch.setattr(preflight.psutil, "virtual_memory", lambda: type("Memory", (), {"total": 2**40}))

    return make


def told(gpus: int = 8, **environment: str) -> list[str]:
    return [str(problem) for problem in node_problems(gpus, {**os.environ, **environment})]


def test_a_node_with_all_is_right(eight_gpus):
    eight_gpus()
    assert told() == []


def test_a_job_with_slurms_defaults_is_told_the_lines_to_add(eight_gpus):
    eight_gpus(cores=1, memory=4e9)
    assert told(SLURM_JOB_ID="7") == [
        "this node: 1 cores for 8 GPUs, at least 16 are needed. Fix: add the line #SBATCH --cpus-per-task=64, or "
        "submit with sbatch --cpus-per-task=64",
        "this node: 4.0 GB of memory for 8 GPUs, at least 64.0 GB are needed. Fix: add the line #SBATCH --mem=256G, or "
        "submit with sbatch --mem=256G",
    ]
    assert node_problems(0, os.environ) == []


def test_a_driver_too_old_for_the_lock_is_refused_unless_a_compat_library_stands_in(eight_gpus, tmp_path):
    eight_gpus(driver="575.57.08")
    (line,) = told()
    assert line.startswith(
        "NVIDIA driver: driver 575.57.08 is too old for torch for CUDA 13.0. Fix: request a node with driver"
    )
    compat = tmp_path / "cuda-13/compat"
    compat.mkdir(parents=True)
    assert len(told(LD_LIBRARY_PATH=str(compat))) == 1
    (compat / "libcuda.so.1").touch()
    assert told(LD_LIBRARY_PATH=f"/other:{compat}") == []
    assert find_driver_problem("", {}) is None  # a driver that does not say


def test_what_triton_compiles_with_is_looked_for(eight_gpus, tmp_path, monkeypatch):
    eight_gpus()
    assert "no C compiler found (CC=no-such-cc)" in told(CC="no-such-cc")[0]
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert [line.split(":")[0] for line in told()] == ["Python.h"]
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))  # neither gcc nor clang
    assert "no C compiler found (gcc or clang), which Triton needs to build kernels" in told(CC="")[0]


def test_shared_memory_too_small_for_vllms_queues_is_told(small_disk, monkeypatch):
    monkeypatch.setattr(preflight, "SHARED_MEMORY", small_disk)
    (line,) = told(0)
    assert line.startswith(f"{small_disk}: ") and "vLLM's queues need 335.5 MB. Fix: docker run --shm-size=16g" in line


def launched(tmp_path: Path, hard: int | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a real launch in an empty folder."""

    def limit() -> None:
        if hard is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    return subprocess.run(
        [sys.executable, "-m", "grpo_recipes", "launch", SMOKE, "--max_steps", "1"], cwd=tmp_path, text=True,
        env={**os.environ, "CACHE_ROOT": str(tmp_path / "cache"), **variables}, preexec_fn=limit, capture_output=True,
        timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("fault", ["TMPDIR", "open files"])
def test_a_launch_is_refused_in_one_line_and_nothing_is_made(tmp_path, fault):
    long = tmp_path / ("x" * 120)
    long.mkdir()
    done = launched(tmp_path, TMPDIR=str(long)) if fault == "TMPDIR" else launched(tmp_path, hard=512)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"grpo: {fault}: ") and " Fix: " in line
    assert [path.name for path in tmp_path.iterdir()] == [long.name]


def test_a_low_soft_limit_of_open_files_is_raised():
    code = (
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n"
        "from grpo_recipes.plan.preflight import node_problems, raise_file_limit\nraise_file_limit()\n"
        "print(node_problems(0, os.environ), resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[] (4096, 4096)\n"
