"""`sbatch training.sh` with no other option on a real Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, marked_processes
from slurm_cluster import SlurmCluster

# Resources on the pages -> resources of the two nodes of the tests.
FEWER = {"--gres=gpu:8": "--gres=gpu:4", "--cpus-per-task=64": "--cpus-per-task=2", "--mem=256G": "--mem=7G"}


@pytest.mark.slow
def test_sbatch_training_sh_starts_at_once_and_completes(slurm: SlurmCluster, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, "slurm-smoke", ENV_DIR=sys.prefix)
    words = documented("sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh", FEWER, fake="the GPUs")
    job = slurm.sbatch(*words[1:], "--max_steps", "6", cwd=REPOSITORY, env=environment)
    slurm.wait(job, "RUNNING", timeout=60)
    record = slurm.wait(job, "COMPLETED", timeout=400)

    assert record["ExitCode"] == "0:0"
    output = REPOSITORY / "logs" / f"slurm_{job}.out"
    assert "smoke test on CPU" in output.read_text()
    assert (REPOSITORY / "logs" / f"slurm_{job}.err").exists()
    (run_dir,) = [path.parent for path in (tmp_path / "runs").glob("*/run.json")]
    identity = json.loads((run_dir / "run.json").read_text())
    assert identity["job"].endswith(f"-{job}")
    ports = json.loads((run_dir / "plan.json").read_text())["ports"]
    assert ports["server"] == 20000 + job % 1200 * 10
    launch = Launch(None, tmp_path, REPOSITORY, "slurm-smoke")  # type: ignore[arg-type]
    assert launch.summary()["status"] == "completed" and launch.summary()["smoke"] is True
    assert [row["step"] for row in launch.rows()] == list(range(1, 7))
    assert marked_processes("slurm-smoke") == []


def submit_endless(slurm: SlurmCluster, tmp_path: Path, mark: str, sbatch: tuple[str, ...] = ()) -> tuple[int, Launch]:
    """A job that trains until it is stopped, after its second step."""
    environment = clean_environment(tmp_path, mark, ENV_DIR=sys.prefix)
    endless = ("--max_steps", "100000", "--run_name", mark)
    job = slurm.sbatch(*sbatch, "training.sh", *endless, cwd=REPOSITORY, env=environment)
    launch = Launch(None, tmp_path, REPOSITORY, mark)  # type: ignore[arg-type]
    slurm.wait(job, "RUNNING", timeout=60)
    wait_until(lambda: launch.has_run_dir() and len(launch.rows()) >= 2, timeout=120)
    return job, launch


@pytest.mark.slow
def test_scancel_ends_the_run_and_leaves_nothing(slurm: SlurmCluster, tmp_path: Path) -> None:
    job, launch = submit_endless(slurm, tmp_path, "slurm-cancel")

    slurm.scancel(job)

    slurm.wait(job, "CANCELLED", timeout=60)
    wait_until(lambda: not launch.processes())
    summary = launch.summary()
    assert summary["status"] == "stopped" and summary["exit_code"] == 75  # every process got SIGTERM, and ranks saved
    assert (launch.run_dir / "checkpoints" / f"checkpoint-{summary['steps']}" / "COMPLETE").exists()
    assert slurm.job(job)["JobState"] == "CANCELLED"  # and not requeued


@pytest.mark.slow
def test_a_job_that_slurm_does_not_requeue_ends_with_75(slurm: SlurmCluster, tmp_path: Path) -> None:
    job, launch = submit_endless(slurm, tmp_path, "slurm-no-requeue", sbatch=("--no-requeue",))

    slurm.scancel(job, "--signal=USR1", "--batch")

    record = slurm.wait(job, "FAILED", timeout=60)
    assert record["ExitCode"] == "75:0"
    assert launch.summary()["status"] == "stopped"
    output = (REPOSITORY / "logs" / f"slurm_{job}.out").read_text()
    assert "not requeued: scontrol requeue" in output


# It waits, so that training uses little processor time until the time limit.
SLOW_REWARD = """
import time

def slow(completions, **_):
    time.sleep(1)
    return [float(index) for index in range(len(completions))]
"""


@pytest.mark.slow
def test_before_the_time_limit_the_launcher_stops_by_itself_and_the_job_is_requeued(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    environment = clean_environment(tmp_path, "slurm-limit", ENV_DIR=sys.prefix)
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    training = ("--max_steps", "100000", "--reward_funcs", f"{tmp_path}/slow.py:slow")
    job = slurm.sbatch("--time=2", "--signal=B:USR1@0", "training.sh", *training, cwd=REPOSITORY, env=environment)
    launch = Launch(None, tmp_path, REPOSITORY, "slurm-limit")  # type: ignore[arg-type]
    slurm.wait(job, "RUNNING", timeout=60)

    slurm.wait(job, "PENDING", timeout=150)

    assert "the job's time limit comes in " in (REPOSITORY / "logs" / f"slurm_{job}.out").read_text()
    assert launch.summary()["status"] == "requeued"
    slurm.scancel(job)


@pytest.mark.slow
def test_a_requeued_job_goes_on_in_its_run_directory(slurm: SlurmCluster, tmp_path: Path) -> None:
    """First the launcher requeues the job after USR1, then Slurm itself does, by ``scontrol requeue``."""
    environment = clean_environment(tmp_path, "slurm-requeue", ENV_DIR=sys.prefix)
    shown = "sbatch --gres=gpu:8 --cpus-per-task=64 --mem=256G training.sh --learning_rate 2e-6"
    words = documented(shown, FEWER, fake="the GPUs")
    flags = ("--max_steps", "20", "--save_steps", "3", "--run_name", "requeued")
    job = slurm.sbatch(*words[1:], *flags, cwd=REPOSITORY, env=environment)
    launch = Launch(None, tmp_path, REPOSITORY, "slurm-requeue")  # type: ignore[arg-type]
    slurm.wait(job, "RUNNING", timeout=60)
    wait_until(lambda: launch.has_run_dir() and len(launch.rows()) >= 2, timeout=120)

    slurm.cli(*documented("scancel --signal=USR1 --batch JOBID", {"JOBID": str(job)}))

    slurm.wait(job, "PENDING", timeout=60)
    wait_until(lambda: not launch.processes())
    summary = launch.summary()
    assert summary["status"] == "requeued" and summary["exit_code"] == 75 and summary["failed_rank"] is None
    assert (launch.run_dir / "checkpoints" / f"checkpoint-{summary['steps']}" / "COMPLETE").exists()
    output = REPOSITORY / "logs" / f"slurm_{job}.out"
    assert f"job {job} is requeued and continues in the same run directory" in output.read_text()

    slurm.start_requeued(job)
    wait_until(lambda: len(launch.rows()) >= summary["steps"] + 5, timeout=120)
    slurm.cli("scontrol", "requeue", str(job))
    slurm.start_requeued(job)
    slurm.wait(job, "COMPLETED", timeout=200)

    assert launch.summary()["status"] == "completed" and launch.summary()["restarts"] == 2  # in the only run directory
    assert [row["step"] for row in launch.rows()] == list(range(1, 21))
    assert "resuming from checkpoint-" in output.read_text()


def test_a_job_never_installs(slurm: SlurmCluster, tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, "slurm-bare", ENV_DIR=str(tmp_path / "missing"))
    job = slurm.sbatch("training.sh", cwd=REPOSITORY, env=environment)

    record = slurm.wait(job, "FAILED", timeout=60)

    assert record["ExitCode"] == "2:0"
    assert "login node" in (REPOSITORY / "logs" / f"slurm_{job}.err").read_text()
    assert not (tmp_path / "missing").exists()


def wait_until(condition, timeout: float = 60) -> None:
    import time

    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)
