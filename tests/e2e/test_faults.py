"""Faults of the machine under a run: it ends within 30 s with cause and advice, nothing is lost, nothing is left."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import Launch
from test_resume import checkpoints

from grpo_recipes.runs.rundir import read_json

# Without a server, which makes no difference here.
ALONE = ("--use_vllm", "false", "--prompts_per_step", "2", "--num_generations", "4", "--max_steps", "100000")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk for the run directories of the folders ``full`` and ``again``."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root to mount a small disk")
    for name in ("full", "again"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "runs").symlink_to(folder)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_and_costs_no_checkpoint(
    launch: Callable[..., Launch], small_disk: Path
) -> None:
    run = launch(*ALONE, "--save_steps", "3", "--run_name", "full", folder="full")
    run.wait_for(lambda: run.has_run_dir() and checkpoints(run), "a checkpoint")

    subprocess.run(f"cat /dev/zero > {small_disk}/filler", shell=True, stderr=subprocess.DEVNULL, check=False)

    assert ended_within(run, 30) == 1, run.output
    assert (
        "No space left on device" in run.output
        and "grpo: next    find it with grpo doctor, then free space" in run.output
    )
    summary = read_json(run.run_dir / "summary.json")
    assert summary["status"] == "failed" and "No space left on device" in summary["cause"]
    assert not [path for path in run.run_dir.rglob(".*") if path.is_file() and path.stat().st_size == 0]
    (small_disk / "filler").unlink()
    saved = checkpoints(run)
    assert saved
    resumed = launch("--resume", str(run.run_dir), folder="again")
    resumed.wait_for(lambda: "resuming from checkpoint-" in resumed.output, "the resume")
    resumed.wait_for(lambda: checkpoints(run) > saved, "another checkpoint")


@pytest.mark.slow
def test_memory_that_runs_out_is_told_with_what_to_ask_for(launch: Callable[..., Launch]) -> None:
    run = launch(*ALONE, "--run_name", "memory", by_exec=True)  # after a fork, much free memory is left
    run.wait_for_step(2)

    resource.prlimit(run.pid_of("rank_0"), resource.RLIMIT_DATA, (1 << 20, 1 << 20))

    assert ended_within(run, 30) == 1, run.output
    assert "can't allocate memory" in run.output
    assert "grpo: next    request more memory, or lower per_device_train_batch_size" in run.output


def ended_within(run: Launch, seconds: float) -> int:
    """The exit code, once no process of the run is left, within so many seconds."""
    began = time.monotonic()
    code = run.wait(seconds)
    run.wait_for_nothing_left(seconds - (time.monotonic() - began))
    return code
