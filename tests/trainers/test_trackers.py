"""A resumed run continues in its tracker, and a tracker's error never hides how the run ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.plan.commands import run_environment
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.trainers import trackers
from grpo_recipes.trainers.trackers import close_trackers, continue_tracked_runs, find_tracked_runs

from .tracked_training import STEPS, STOPPED_AFTER

VARIABLES = ("MLFLOW_RUN_ID", "COMET_EXPERIMENT_KEY", "COMET_START_ONLINE", "SWANLAB_RUN_ID", "SWANLAB_RESUME")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    folder = tmp_path / "runs" / "mine-1"
    folder.mkdir(parents=True)
    write_json(folder / "run.json", {"run_name": "mine", "timestamp": "1", "wandb_id": "abcd"})
    return folder


def arguments(*report_to: str) -> Any:
    return SimpleNamespace(report_to=list(report_to), run_name="mine-1")


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def test_every_attempt_gets_the_same_ids(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    continue_tracked_runs(arguments("comet_ml", "swanlab"), run)
    first = variables()
    assert len(first["COMET_EXPERIMENT_KEY"]) == 32 and len(first["SWANLAB_RUN_ID"]) == 21
    assert first["SWANLAB_RESUME"] == "allow" and "MLFLOW_RUN_ID" not in first
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_json(run / "tracked.json", {"mlflow": "7f"})

    continue_tracked_runs(arguments("comet_ml", "swanlab", "mlflow"), run)

    assert variables() == {**first, "MLFLOW_RUN_ID": "7f"}


def test_other_runs_get_other_ids(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    continue_tracked_runs(arguments("swanlab"), run)
    first = variables()
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    write_json(run / "run.json", {"run_name": "mine", "timestamp": "1", "wandb_id": "abce"})
    continue_tracked_runs(arguments("swanlab"), run)
    assert not set(variables().values()) & set(first.values()) - {"allow"}


def test_exported_ids_stay(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(run / "tracked.json", {"mlflow": "7f"})
    exported = {"MLFLOW_RUN_ID": "mine", "COMET_EXPERIMENT_KEY": "mine", "SWANLAB_RUN_ID": "mine"}
    for name, value in exported.items():
        monkeypatch.setenv(name, value)
    continue_tracked_runs(arguments("mlflow"), run)
    assert variables() == exported


def test_an_offline_experiment_of_comet_gets_no_key_because_the_next_would_replace_its_file(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    continue_tracked_runs(arguments("comet_ml"), run)
    assert "COMET_EXPERIMENT_KEY" not in os.environ


def test_shared_folders_are_private(run: Path) -> None:
    continue_tracked_runs(arguments("trackio", "mlflow"), run)
    assert {path.name: path.stat().st_mode & 0o777 for path in run.parent.iterdir() if path != run} == {
        "trackio": 0o700, "mlruns": 0o700,
    }  # fmt: skip


def test_trials_have_names_of_their_own_in_trackio(tmp_path: Path, run: Path) -> None:
    cell = tmp_path / "sweeps" / "maths-1" / "cells" / "seed=1"
    cell.mkdir(parents=True)
    for report_to, name in (("trackio", "maths-1-seed=1"), ("wandb", "mine-1")):
        args = arguments(report_to)
        continue_tracked_runs(args, cell)
        assert args.run_name == name


class FakeTracker(ModuleType):
    """A tracker module that records its calls."""

    def __init__(self, fails: bool = False):
        super().__init__("mlflow")
        self.calls: list[str] = []
        self._fails = fails

    def active_run(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="7f"))

    def flush_async_logging(self) -> None:
        self.calls.append("flush")
        if self._fails:
            raise OSError("no route to host")

    def end_run(self, status: str) -> None:
        self.calls.append(status)


@pytest.mark.parametrize(("code", "status"), [(EXIT_STOPPED, "KILLED"), (1, "FAILED")])
def test_a_run_that_ends_early_is_marked_in_its_tracker(monkeypatch: Any, code: int, status: str) -> None:
    for name in trackers._CLOSING:
        monkeypatch.delitem(sys.modules, name, raising=False)
    close_trackers(code)
    assert find_tracked_runs() == {}
    fake = FakeTracker()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    close_trackers(code)
    assert fake.calls == ["flush", status]
    assert find_tracked_runs() == {"mlflow": "7f"}


def test_an_error_of_a_tracker_is_printed(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeTracker(fails=True))
    close_trackers(1)
    assert "grpo: mlflow was not closed (OSError: no route to host)" in capsys.readouterr().out


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """``install(PACKAGE)``: a tracker that no lock has, in its own folder; the variables that let Python find it."""

    def install_package(package: str) -> dict[str, str]:
        folder = tmp_path / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), package]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
        if "No matching distribution found for" in done.stderr:
            pytest.skip(f"no package index has {package}")
        assert done.returncode == 0, done.stderr[-2000:]
        # Behind the environment's packages: the folder also has other versions of some of them.
        code = f"import sys; sys.path.append({str(folder)!r})"
        (tmp_path / "added").mkdir()
        (tmp_path / "added/sitecustomize.py").write_text(code)  # Python imports it when it starts
        return {"PYTHONPATH": str(tmp_path / "added")}

    return install_package


def train_twice(folder: Path, tracker: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Train until a stop, and resume, without a network; return the variables of a launch."""
    scratch = Scratch(folder / "disk", folder / "memory")
    run_dir = folder / "runs" / "mine-20261128-101500"
    run_dir.mkdir(parents=True)
    added = run_environment({"HOME": str(folder)}, scratch, run_dir, "x")
    names = ("TRACKIO_DIR", "MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY")
    environment = {**os.environ, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "MLFLOW_EXPERIMENT_NAME": "maths"}
    environment |= {name: added[name] for name in names} | variables
    argv = [sys.executable, "-m", "trainers.tracked_training", str(run_dir), tracker]
    for code in (EXIT_STOPPED, 0):
        done = subprocess.run(
            argv, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1)) and STOPPED_AFTER < STEPS
    return environment


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trackio_has_every_step_and_completions_after_a_stop(
    tmp_path: Path, install: Callable[[str], dict[str, str]]
) -> None:
    environment = train_twice(tmp_path, "trackio", install("trackio==0.43.0"))
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as s; (name,) = s.get_projects(); "
        "(run,) = s.get_runs(name); print(json.dumps([name, run, s.get_logs(name, run)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    project, run, logs = json.loads(done.stdout.splitlines()[-1])
    assert (project, run) == ("maths", "mine-20261128-101500")
    rows = [row for row in logs if "train/loss" in row]
    assert [row["train/global_step"] for row in rows] == list(range(1, STEPS + 1))
    assert any(row.get("train/reward") for row in rows)
    assert sum("completions" in row for row in logs) >= STEPS
    assert (tmp_path / "runs/trackio").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_mlflow_has_every_step_in_one_run_after_a_stop(
    tmp_path: Path, install: Callable[[str], dict[str, str]]
) -> None:
    environment = train_twice(tmp_path, "mlflow", install("mlflow-skinny==3.17.2"))
    code = (
        "import json, mlflow; client = mlflow.MlflowClient(); experiment = client.get_experiment_by_name('maths'); "
        "(run,) = client.search_runs([experiment.experiment_id]); "
        "steps = [m.step for m in client.get_metric_history(run.info.run_id, 'loss')]; "
        "print(json.dumps([run.info.run_name, run.info.status, steps, run.data.params['learning_rate']]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    name, status, steps, rate = json.loads(done.stdout.splitlines()[-1])
    assert (name, status, rate) == ("mine-20261128-101500", "FINISHED", "0.001")
    assert steps == list(range(1, STEPS + 1))
    assert (tmp_path / "runs/mlruns").stat().st_mode & 0o777 == 0o700
