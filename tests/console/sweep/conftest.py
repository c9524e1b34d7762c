"""Sweeps of the smoke recipe that start nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.console.sweep.folder import Sweep
from grpo_recipes.console.sweep.run import SignalForwarder
from grpo_recipes.paths import find_code_root
from grpo_recipes.plan.devices import environment_device
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.runs.rundir import read_json, write_json

SMOKE = "recipes/smoke/grpo.yaml"


class FakeLaunches:
    """Replaces `grpo launch --resume DIR`: writes the files of a run that completes, fails or is stopped.

    Attributes:
        started: names of the trials, in the order they were started.
        codes: exit code by the trial's name; 0 by default.
        measured: further columns of each row of ``metrics.jsonl``.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self.codes: dict[str, int] = {}
        self.measured: dict[str, float] = {}
        self.rewards: dict[str, list[float]] = {}

    def run(self, forwarder: SignalForwarder, argv: list[str], environment: dict[str, str], log: Path | None) -> int:
        trial = Path(argv[-1])
        self.started.append(trial.name)
        code = self.codes.get(trial.name, 0)
        if code == 2:
            assert log is not None
            log.write_text("grpo: here it is refused. Fix: mend it\n")
            return code
        rewards = self.rewards.get(trial.name, [0.1, 0.2, 0.3])
        rows = [{"step": step, "max_steps": 3, "reward": reward} for step, reward in enumerate(rewards, 1)]
        (trial / "metrics.jsonl").write_text("".join(json.dumps({**row, **self.measured}) + "\n" for row in rows))
        status = {0: "completed", 75: "stopped"}.get(code, "failed")
        cause = None if code == 0 else "a fake cause"
        ended = {"status": status, "exit_code": code, "cause": cause, "steps": 3}
        write_json(trial / "summary.json", {**read_json(trial / "summary.json"), **ended})
        return code


@pytest.fixture(autouse=True)
def sbatch_on_path(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fake sbatch first on the PATH; tests that submit replace the call of it."""
    program = tmp_path_factory.mktemp("bin") / "sbatch"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.fixture
def fake_launches(monkeypatch: pytest.MonkeyPatch) -> FakeLaunches:
    fake = FakeLaunches()
    monkeypatch.setattr(SignalForwarder, "__init__", lambda self, *_: setattr(self, "first_signal", None))
    monkeypatch.setattr(SignalForwarder, "is_stop_requested", lambda self: self.first_signal is not None)
    monkeypatch.setattr(SignalForwarder, "run", lambda forwarder, *arguments: fake.run(forwarder, *arguments))
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with its own runs and without the tester's variables."""
    if environment_device() != "cpu":
        pytest.skip("the smoke recipe is planned for CPU")
    for name in (*READ_VARIABLES, *environment_keys()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CACHE_ROOT", str(find_code_root() / ".cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def sweep(folder: Path) -> Callable[..., int]:
    """``sweep("seed=1..2", ...)``: run `grpo sweep` with the smoke recipe and return its exit code."""
    return lambda *arguments: cli.main(["sweep", SMOKE, *arguments])


@pytest.fixture
def read_sweeps(folder: Path) -> Callable[[], list[Sweep]]:
    """Return a function that reads the sweeps in the working folder, oldest first."""
    return lambda: [Sweep.read(path.parent) for path in sorted(folder.glob("runs/sweeps/*/sweep.json"))]
