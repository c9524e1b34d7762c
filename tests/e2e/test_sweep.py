"""Sweeps for real: array jobs on Slurm, runs in turn of which one fails, and a search that is killed."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, clean_environment, marked_processes, override
from slurm_cluster import SlurmCluster

from grpo_recipes.console.sweep.folder import Sweep
from grpo_recipes.console.sweep.search import STORAGE
from grpo_recipes.runs.rundir import read_json, read_metrics

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
    return Sweep.read(record.parent)


METHODS = ["none", "shared_vllm", "lora_only"]


def swept_methods(launch: Callable[..., Launch], words: list[str], folder: Path, seconds: float) -> Sweep:
    """Run a sweep over the weight sync methods, which ends in a table with a line for each."""
    run = launch(command=words)
    assert run.wait(seconds) == 0, run.output
    table = [line.split() for line in run.output.splitlines() if line.startswith(tuple(f"{name} " for name in METHODS))]
    assert [cells[:3] for cells in table] == [[name, "completed", "3"] for name in METHODS], run.output
    update, sync, memory, saved = ([float(cells[column]) for cells in table] for column in (-4, -3, -2, -1))
    assert min(update) > 0 and min(memory) > 0
    assert sync[0] > 10 * sync[2] > 0 and sync[1] == 0  # a new server, an adapter, one copy
    assert 0 < saved[2] < saved[1] / 2  # an adapter, not a model
    run.wait_for_nothing_left()
    return only_sweep(folder)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_weight_sync_methods_are_swept_into_one_table(launch: Callable[..., Launch], tmp_path: Path) -> None:
    # Two syncs: the first server of `none` has the weights already, the second is started with them.
    shown = (
        "grpo sweep recipes/smoke/grpo.yaml weight_sync=none,shared_vllm,lora_only --max_steps 20 --num_iterations 10"
    )
    places = {"recipes/smoke/grpo.yaml": SMOKE, "20": "3", "10": "2"}
    sweep = swept_methods(launch, documented(shown, places), tmp_path, 850)
    rows = [read_metrics(sweep.trial_dir(index)) for index in range(3)]
    assert [sum(row["syncs"] for row in trial) for trial in rows] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_weight_sync_methods_of_a_run_with_environments_are_swept(
    launch: Callable[..., Launch], tmp_path: Path
) -> None:
    pytest.importorskip("atroposlib")
    shown = (
        "grpo sweep recipes/atropos/smoke.yaml weight_sync=none,shared_vllm,lora_only "
        "--max_steps 20 --num_iterations 10"
    )
    places = {"recipes/atropos/smoke.yaml": str(REPOSITORY / "recipes/atropos/smoke.yaml"), "20": "3", "10": "2"}
    sweep = swept_methods(launch, documented(shown, places), tmp_path, 1400)
    for index in range(3):
        first, _, third = read_metrics(sweep.trial_dir(index))
        for row in (first, third):  # the second step trains on the groups of the first
            assert row["atropos/rejected"] == row["atropos/lost_batches"] == 0
            assert row["atropos/tokens_per_second"] > 0


@pytest.mark.slow
def test_an_array_job_runs_every_trial_and_ends_in_one_report(slurm: SlurmCluster, tmp_path: Path) -> None:
    environment = {**slurm.env, **clean_environment(tmp_path, "slurm-sweep")}
    shown = (
        "grpo sweep my.yaml learning_rate=1e-6,3e-6 seed=1..3 --slurm --profile slurm/profiles/mltheory.yaml "
        "--max-parallel 2"
    )
    places = {"my.yaml": SMOKE, "learning_rate=1e-6,3e-6": "learning_rate=1e-4,1e-3"}
    words = documented(shown, {**places, "slurm/profiles/mltheory.yaml": "cpu"})
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
@pytest.mark.timeout(1500)
def test_hydra_keys_become_an_array_job_that_ends_in_one_report(slurm: SlurmCluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    environment = {**slurm.env, **clean_environment(tmp_path, "slurm-offline"), "ENV_DIR": sys.prefix}
    shown = (
        "python run_offline_grpo.py -m train.lr=5e-6,1e-5,2e-5 train.kl_coef='[0.02,0.05]' "
        "--slurm --profile slurm/profiles/mltheory.yaml --max-parallel 2"
    )
    door = str(REPOSITORY / "run_offline_grpo.py")
    places = {"python": sys.executable, "run_offline_grpo.py": door, "slurm/profiles/mltheory.yaml": "cpu"}
    small = ("model.train_id=smoke:sums", "data.problems=arithmetic", "generation.max_new_tokens=8")
    words = [*documented(shown, places), *small, "train.iterations=1", "eval.enabled=false"]
    done = slurm.cli(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("multirun/*/*/sweeps/*/sweep.json")
    sweep = Sweep.read(record.parent)
    page, deadline = sweep.folder / "sweep.html", time.monotonic() + 1200
    while not (page.is_file() and "6 of 6 completed" in page.read_text()):
        assert time.monotonic() < deadline, f"{[sweep.status(index) for index in range(6)]}\n{slurm.logs()}"
        time.sleep(1)

    assert len(sweep.record["jobs"]) == 1 and list(tmp_path.rglob("sweep.html")) == [page]
    values_tried = {tuple(cell["values"].values()) for cell in sweep.record["cells"]}
    assert values_tried == {(rate, kl) for rate in ("5e-06", "1e-05", "2e-05") for kl in ("0.02", "0.05")}
    for index, cell in enumerate(sweep.record["cells"]):
        folder, rate = sweep.trial_dir(index), float(cell["values"]["learning_rate"])
        assert {row["learning_rate"] for row in read_metrics(folder)} == {rate}
        assert read_json(folder / "metrics/train_iter_000.json")["lr"] == rate
        assert (folder / "checkpoints/iter_000/COMPLETE").is_file()
    grpo = str(Path(sys.executable).with_name("grpo"))
    table = slurm.cli(grpo, "report", str(sweep.folder), env=environment)
    assert table.returncode == 0 and table.stdout.count(" completed ") == 6, table.stderr
    while marked_processes("slurm-offline"):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_with_the_trial_that_ran(launch: Callable[..., Launch], tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna", reason="EXTRAS=search bash scripts/setup.sh")
    shown = "grpo sweep my.yaml learning_rate=log:1e-6..1e-4 beta=0,0.04 --search optuna --trials 20"
    places = {"my.yaml": SMOKE, "learning_rate=log:1e-6..1e-4": "learning_rate=log:1e-5..1e-2", "20": "3"}
    command = [*documented(shown, places), *override(TINY, max_steps=6, save_steps=2)]
    first = launch(command=command)

    def second_has_saved() -> bool:
        return bool(list(tmp_path.glob("runs/sweeps/*/cells/1,*/checkpoints/checkpoint-2/COMPLETE")))

    first.wait_for(second_has_saved, "a checkpoint of the second trial")
    first.process.kill()
    assert first.wait() == -signal.SIGKILL
    sweep = only_sweep(tmp_path)
    rows, cells = read_metrics(sweep.trial_dir(0)), sweep.record["cells"]
    assert [("value" in cell) for cell in cells] == [True, False]

    resumed = launch(command=command)
    assert resumed.wait() == 0, resumed.output
    sweep = only_sweep(tmp_path)
    assert "continuing " in resumed.output and "highest reward of 3 trials: " in resumed.output
    assert f"trial 1 of 2: {cells[1]['name']} completed" in resumed.output
    assert sweep.is_over() and [cell["values"] for cell in sweep.record["cells"]][:2] == [
        cell["values"] for cell in cells
    ]
    assert read_metrics(sweep.trial_dir(0)) == rows  # not run again
    assert [row["step"] for row in read_metrics(sweep.trial_dir(1))] == [1, 2, 3, 4, 5, 6]
    assert "resuming from checkpoint-" in (sweep.trial_dir(1) / "launch.log").read_text()
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(sweep.folder / STORAGE)))
    trials = optuna.load_study(study_name=None, storage=storage).trials
    finals = [read_json(sweep.trial_dir(index) / "summary.json")["final_reward"] for index in range(3)]
    assert [trial.value for trial in trials] == pytest.approx(finals)
    assert "3 of 3 completed" in (sweep.folder / "sweep.html").read_text()
    resumed.wait_for_nothing_left()


@pytest.mark.slow
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
    resumed = launch(command=documented("grpo sweep --resume last"))
    assert resumed.wait() == 0, resumed.output
    assert (
        "trial 2 of 2: learning_rate=3e-4,seed=1 completed" in resumed.output
        and only_sweep(tmp_path).find_unfinished_trials() == []
    )
    assert read_metrics(sweep.trial_dir(1)) == rows  # not run again
    assert "4 of 4 completed" in (sweep.folder / "sweep.html").read_text()
    resumed.wait_for_nothing_left()
