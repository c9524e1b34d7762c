"""Sweeps for real: an array job on Slurm, and runs in turn of which one fails."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch, clean_environment, marked_processes
from slurm_cluster import SlurmCluster

from grpo_recipes.runs.rundir import read_json, read_metrics
from grpo_recipes.sweep.folder import Sweep, read_sweep

GRPO = str(Path(sys.executable).with_name("grpo"))
SMOKE = str(REPOSITORY / "recipes/smoke/grpo.yaml")
TINY = ("--use_vllm", "false", "--max_steps", "2", "--prompts_per_step", "4", "--num_generations", "4")
CALLBACK = """
from pathlib import Path
from transformers import TrainerCallback
class Breaks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if args.seed == 1 and Path("{file}").exists():
            raise RuntimeError("this run is broken")
"""


def only_sweep(folder: Path) -> Sweep:
    (record,) = folder.glob("runs/sweeps/*/sweep.json")
    return read_sweep(record.parent)


@pytest.mark.slow
@pytest.mark.rotating
def test_an_array_job_runs_every_trial_and_ends_in_one_report(slurm: SlurmCluster, tmp_path: Path) -> None:
    environment = {**slurm.env, **clean_environment(tmp_path, "slurm-sweep")}
    axes = ("learning_rate=1e-4,1e-3", "seed=1..3")
    where = ("--slurm", "--profile", "cpu", "--max-parallel", "2")
    done = slurm.cli(GRPO, "sweep", SMOKE, *axes, *where, *TINY, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr

    sweep = only_sweep(tmp_path)
    (job,) = sweep.record["jobs"]
    assert "ArrayTaskThrottle=2" in slurm.cli("scontrol", "show", "job", str(job)).stdout
    page = sweep.folder / "sweep.html"
    deadline = time.monotonic() + 420
    while not (page.is_file() and "6 of 6 completed" in page.read_text()):
        assert time.monotonic() < deadline, f"{[sweep.status(index) for index in range(6)]}\n{slurm.logs()}"
        time.sleep(1)

    assert "learning_rate=1e-3 (3 seeds)" in page.read_text()
    for index, name in enumerate(sweep.names):
        identity, summary = (
            read_json(sweep.trial_dir(index) / "run.json"),
            read_json(sweep.trial_dir(index) / "summary.json"),
        )
        assert identity and summary and summary["restarts"] == 0, name
        assert [row["step"] for row in read_metrics(sweep.trial_dir(index))] == [1, 2]
    while marked_processes("slurm-sweep"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.rotating
def test_a_trial_that_fails_is_named_and_run_again_alone(launch: Callable[..., Launch], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    (tmp_path / "own.py").write_text(CALLBACK.format(file=broken))
    command = [GRPO, "sweep", SMOKE, "seed=1..2", *TINY, "--callbacks", f"{tmp_path}/own.py:Breaks"]

    first = launch(command=command)
    assert first.wait() == 1, first.output
    assert "trial 1 of 2: seed=1 failed with exit code 1: " in first.output and "this run is broken" in first.output
    assert "trial 2 of 2: seed=2 completed" in first.output
    assert "not completed: seed=1 (failed)" in first.output
    sweep = only_sweep(tmp_path)
    rows = read_metrics(sweep.trial_dir(1))

    broken.unlink()
    again = launch(command=command)
    assert again.wait() == 0, again.output
    assert again.output.count("trial 1 of 1: seed=1 completed") == 1 and only_sweep(tmp_path).gaps() == []
    assert read_metrics(sweep.trial_dir(1)) == rows  # not run again
    assert "2 of 2 completed" in (sweep.folder / "sweep.html").read_text()
    again.wait_for_nothing_left()
