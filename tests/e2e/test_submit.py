"""`grpo submit`, `status`, `logs` and `stop` on a real Slurm."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, marked_processes
from slurm_cluster import SlurmCluster
from test_slurm_run import wait_until

from grpo_recipes.runs.rundir import read_json, read_metrics


def grpo(slurm: SlurmCluster, tmp_path: Path, mark: str, *arguments: str) -> subprocess.Popen[str]:
    """The command with a run root and a working folder of the test's own."""
    cwd = tmp_path / "cwd"
    cwd.mkdir(exist_ok=True)
    environment = {**clean_environment(tmp_path, mark), **slurm.env, "GRPO_TEST": mark}
    environment["RUN_ROOT"] = str(tmp_path / "runs")
    argv = [sys.executable, "-m", "grpo_recipes", *arguments]
    return subprocess.Popen(argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_submitted_run_uses_its_frozen_code_and_is_followed_and_stopped(slurm: SlurmCluster, tmp_path: Path) -> None:
    mark = "slurm-submit"
    recipe = str(REPOSITORY / "recipes/smoke/grpo.yaml")
    flags = ("--max_steps", "100000", "--use_vllm", "false", "--run_name", "sent")
    places = {"my.yaml": recipe, "slurm/profiles/mysite.yaml": "cpu"}
    words = documented("grpo submit my.yaml --profile slurm/profiles/mysite.yaml", places)
    output, _ = grpo(slurm, tmp_path, mark, *words[1:], *flags).communicate(timeout=120)
    job = int(re.search(r"submitted job (\d+)", output)[1])
    launch = Launch(None, tmp_path, tmp_path / "cwd", mark)  # type: ignore[arg-type]
    run_dir = launch.run_dir
    follower = grpo(slurm, tmp_path, mark, *documented("grpo logs -f last")[1:])
    slurm.wait(job, "RUNNING", timeout=60)
    wait_until(lambda: len(launch.rows()) >= 2, timeout=120)

    processes = [process for process in marked_processes(mark) if "logs" not in process.cmdline()]
    trainers = [process for process in processes if str(run_dir / "code/src/grpo.py") in process.cmdline()]
    assert trainers and all(trainer.environ()["PYTHONPATH"] == str(run_dir / "code" / "src") for trainer in trainers)
    assert str(REPOSITORY / "src") not in " ".join(" ".join(process.cmdline()) for process in processes)
    status, _ = grpo(slurm, tmp_path, mark, "status", str(job)).communicate(timeout=60)
    assert f"{job} RUNNING" in status and "/100000" in status

    output, _ = grpo(slurm, tmp_path, mark, *documented("grpo stop last")[1:]).communicate(timeout=60)
    assert "saves after the current step" in output
    assert slurm.wait(job, "FAILED", timeout=60)["ExitCode"] == "75:0"
    followed, _ = follower.communicate(timeout=60)
    assert follower.returncode == 0 and "step 2/100000" in followed and "has ended: stopped" in followed
    wait_until(lambda: not launch.processes())
    assert launch.summary()["status"] == "stopped" and launch.summary()["restarts"] == 0
    assert (run_dir / "checkpoints" / f"checkpoint-{launch.summary()['steps']}" / "COMPLETE").exists()


def submit_pair(slurm: SlurmCluster, tmp_path: Path, mark: str, profile: str) -> list[tuple[int, Path]]:
    """Submit supervised fine-tuning and GRPO, of two steps each; return their job ids and run directories."""
    (tmp_path / "grpo.yaml").write_text(f"base: {REPOSITORY}/recipes/smoke/sft_grpo.yaml\nuse_vllm: false\n")
    recipes = (f"{REPOSITORY}/recipes/smoke/sft.yaml", str(tmp_path / "grpo.yaml"))
    words = ("submit", *recipes, "--profile", profile, "--max_steps", "2", "--save_strategy", "no")
    output, error = grpo(slurm, tmp_path, mark, *words).communicate(timeout=240)
    jobs = re.findall(r"submitted job (\d+), run directory (\S+?)(?:,|$)", output, re.MULTILINE)
    assert len(jobs) == 2, output + error
    return [(int(job), (tmp_path / "cwd" / folder).resolve()) for job, folder in jobs]


@pytest.mark.slow
def test_the_second_of_two_jobs_starts_from_the_model_of_the_first(slurm: SlurmCluster, tmp_path: Path) -> None:
    (first, sft), (second, run) = submit_pair(slurm, tmp_path, "slurm-pair", "cpu")
    slurm.wait(second, "COMPLETED", timeout=400)
    assert slurm.wait(first, "COMPLETED", timeout=10)["ExitCode"] == "0:0"
    assert read_json(run / "summary.json")["status"] == "completed"
    assert yaml.safe_load((run / "recipe.yaml").read_text())["model_name_or_path"] == str(sft / "model")
    assert len(read_metrics(run)) == 2


@pytest.mark.slow
def test_the_second_of_two_jobs_is_canceled_if_the_first_does_not_succeed(slurm: SlurmCluster, tmp_path: Path) -> None:
    profile = tmp_path / "held.yaml"
    profile.write_text(f"base: {REPOSITORY}/slurm/profiles/cpu.yaml\nsbatch_options: [--hold]\n")
    (first, _), (second, _) = submit_pair(slurm, tmp_path, "slurm-pair-held", str(profile))
    slurm.cli("scontrol", "release", str(second))
    slurm.scancel(first)
    slurm.wait(second, "CANCELLED", timeout=60)


@pytest.mark.slow
def test_what_sbatch_refuses_leaves_no_run_directory(slurm: SlurmCluster, tmp_path: Path) -> None:
    recipe = str(REPOSITORY / "recipes/smoke/grpo.yaml")
    sent = grpo(slurm, tmp_path, "slurm-refused", "submit", recipe, "--profile", "cpu", "--partition", "nowhere")
    _, error = sent.communicate(timeout=120)
    assert sent.returncode == 2
    assert "invalid partition specified: nowhere" in error
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_job_that_waits_is_taken_out_of_the_queue(slurm: SlurmCluster, tmp_path: Path) -> None:
    mark, recipe = "slurm-waits", str(REPOSITORY / "recipes/smoke/grpo.yaml")
    profile = tmp_path / "held.yaml"
    profile.write_text(f"base: {REPOSITORY}/slurm/profiles/cpu.yaml\nsbatch_options: [--hold]\n")
    output, error = grpo(slurm, tmp_path, mark, "submit", recipe, "--profile", str(profile)).communicate(timeout=120)
    assert "submitted job" in output, error
    run_dir = Launch(None, tmp_path, tmp_path / "cwd", mark).run_dir  # type: ignore[arg-type]
    status, _ = grpo(slurm, tmp_path, mark, "status").communicate(timeout=60)
    assert re.search(rf"{run_dir.name} +waiting in the queue \(JobHeldUser\) +\d+", status)

    output, _ = grpo(slurm, tmp_path, mark, "stop", "last").communicate(timeout=60)

    assert "was removed from the queue" in output
    status, _ = grpo(slurm, tmp_path, mark, "status", "last").communicate(timeout=60)
    assert "CANCELLED" in status and "removed from the queue by grpo stop" in status
