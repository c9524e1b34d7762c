"""Run directories, a small disk and a folder to launch in, for tests of the doctor and of readers of a run."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_recipes.plan.devices import Resources
from grpo_recipes.recipe.keys import READ_VARIABLES, environment_keys
from grpo_recipes.runs.rundir import Run, finish_summary, new_run, write_json
from grpo_recipes.slurm import client
from grpo_recipes.slurm.client import SlurmJob

LAUNCHED = "grpo launch my.yaml --seed 7"  # the command of ``make_run``


def launch_in(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Let `grpo launch` of this process run in a folder, with no Slurm and none of the tester's variables."""
    for name in {*environment_keys(), *READ_VARIABLES} - {"GRPO_HOME"}:
        patch.delenv(name, raising=False)
    patch.setenv("RUN_ROOT", str(folder / "runs"))
    patch.setenv("CACHE_ROOT", str(folder / "cache"))
    patch.setattr(client, "query", lambda *argv, **how: None)
    patch.chdir(folder)


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with less than 1 MB: a real tmpfs where we may mount one, else a faked statvfs."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        _fake_full_statvfs(folder, monkeypatch)
    yield folder
    if mounted.returncode == 0:
        subprocess.run(["umount", str(folder)], check=True)


def _fake_full_statvfs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs
    fake_full = SimpleNamespace(f_bavail=8, f_blocks=128, f_bfree=8, f_frsize=4096, f_files=100, f_favail=90)
    monkeypatch.setattr(os, "statvfs", lambda path: fake_full if Path(path) == folder else real(path))


@pytest.fixture
def make_run(tmp_path: Path, read: Any, planned: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """``make_run(rows=[...], logs={role: text}, status=..., cause=..., KEY=VALUE, ...)``: a run directory of our code.

    The plan is one for four GPUs, its logs are below the working folder.
    """

    def make(
        *,
        rows: list[dict[str, Any]] | None = None,
        logs: dict[str, str] | None = None,
        status: str = "failed",
        cause: str = "",
        gpus: tuple[str, ...] = ("0", "1", "2", "3"),
        job: SlurmJob | None = None,
        **keys: Any,
    ) -> Run:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "logs").mkdir(exist_ok=True)
        recipe = read(run_root="runs", **keys)
        folder, facts = tmp_path / "runs" / f"test-{secrets.token_hex(4)}", Resources("cuda", gpus, 8, job).facts()
        run = new_run(folder, "test", "stamp", facts)
        assert run is not None
        write_json(run.folder / "run.json", {**run.identity, "command": LAUNCHED})
        run = Run(run.folder)
        plan = planned(recipe=recipe, gpus=gpus).as_json()
        write_json(run.folder / "plan.json", plan)
        (run.folder / "recipe.yaml").write_text(recipe.as_yaml())
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or []))
        write_json(run.folder / "summary.json", {"status": "running", "smoke": False, "restarts": 0})
        if status != "running":
            code = 0 if status == "completed" else 1
            finish_summary(run.folder, status=status, exit_code=code, failed_rank=None, cause=cause or None)
        named = {process["role"]: process["log"] for process in plan["processes"]}
        named |= {"slurm.err": f"logs/slurm_{job.id}.err"} if job else {}
        for role, text in (logs or {}).items():
            (tmp_path / named[role]).write_text(text)
        return run

    return make


def row(step: int = 1, **metrics: Any) -> dict[str, Any]:
    """A row of metrics.jsonl as a healthy run writes it, with these metrics changed (``a__b`` stands for ``a/b``)."""
    healthy = {
        "step": step,
        "max_steps": 10,
        "loss": 0.001,
        "grad_norm": 0.4,
        "reward": 0.5,
        "frac_reward_zero_std": 0.2,
        "completions/clipped_ratio": 0.05,
        "entropy": 0.5,
        "kl": 0.02,
        "sampling/sampling_logp_difference/mean": 0.001,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "rewards/pure_accuracy_math/mean": 0.5,
        "seconds/sample": 4.0,
        "seconds/score": 0.1,
        "seconds/sync": 0.2,
        "seconds/save": 0.0,
        "seconds/evaluate": 0.0,
        "seconds/update": 5.0,
        "seconds/step": 9.3,
    }
    return healthy | {name.replace("__", "/"): value for name, value in metrics.items()}


@pytest.fixture(name="row")
def row_fixture() -> Callable[..., dict[str, Any]]:
    """``row(step, KEY=VALUE)``: a healthy row of metrics with these changed; ``__`` stands for ``/``."""
    return row
