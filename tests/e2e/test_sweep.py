"""Sweeps for real: an array job on Slurm, and runs in turn of which one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, marked_processes
from slurm_cluster import SlurmCluster

from grpo_recipes.runs.rundir import read_json, read_metrics
from grpo_recipes.sweep.folder import Sweep, read_sweep

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
    shown = (
        "grpo sweep my.yaml learning_rate=1e-6,3e-6 seed=1..3 --slurm --profile slurm/profiles/mltheory.yaml "
        "--max-parallel 2"
    )
    here = {"my.yaml": SMOKE, "learning_rate=1e-6,3e-6": "learning_rate=1e-4,1e-3"}
    words = documented(shown, {**here, "slurm/profiles/mltheory.yaml": "cpu"})
    done = slurm.cli(*words, *TINY, cwd=tmp_path, env=environment)
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
    shown = "grpo sweep recipes/smoke/grpo.yaml learning_rate=1e-4,3e-4 seed=1..3"
    words = documented(shown, {"recipes/smoke/grpo.yaml": SMOKE, "seed=1..3": "seed=1..2"})

    first = launch(command=[*words, *TINY, "--callbacks", f"{tmp_path}/own.py:Breaks"])
    assert first.wait() == 1, first.output
    assert "trial 1 of 4: learning_rate=1e-4,seed=1 failed with exit code 1: " in first.output
    assert "this run is broken" in first.output and "trial 2 of 4: learning_rate=1e-4,seed=2 completed" in first.output
    assert "not completed: learning_rate=1e-4,seed=1 (failed), learning_rate=3e-4,seed=1 (failed)" in first.output
    sweep = only_sweep(tmp_path)
    rows = read_metrics(sweep.trial_dir(1))

    broken.unlink()
    again = launch(command=documented("grpo sweep --resume last"))
    assert again.wait() == 0, again.output
    assert "trial 2 of 2: learning_rate=3e-4,seed=1 completed" in again.output and only_sweep(tmp_path).gaps() == []
    assert read_metrics(sweep.trial_dir(1)) == rows  # not run again
    assert "4 of 4 completed" in (sweep.folder / "sweep.html").read_text()
    again.wait_for_nothing_left()
