"""Training on Atropos groups works without wandb."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from atropos.run_api import run_api

from .fixed_completions import rows_of
from .test_atropos_run_api import posting

REPOSITORY = Path(__file__).parents[2]
# Python runs a module of this name when it starts, also in child processes.
BLOCKER = """
import sys
from importlib.machinery import PathFinder

class WithoutWandb(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "wandb" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutWandb
"""
TRAINING = """
import sys
from pathlib import Path
import torch
from trainers.atropos_groups import make_trainer

torch.set_num_threads(1)
folder, model, url = sys.argv[1:]
trainer = make_trainer(Path(folder), model, atropos_api_url=url, atropos_batch_max_wait_time=60.0)
trainer.source._client = None
trainer.train()
assert "wandb" not in sys.modules
"""


@pytest.fixture
def without_wandb(tmp_path: Path) -> dict[str, str]:
    """Return the environment of processes without wandb."""
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker/sitecustomize.py").write_text(BLOCKER)
    folders = [tmp_path / "blocker", REPOSITORY / "tests", os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder)}


def ran(environment: dict[str, str], *words: Any, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *map(str, words)]
    return subprocess.run(argv, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_client_and_trainer_need_no_wandb(without_wandb: dict[str, str], tmp_path: Path, model: str) -> None:
    pytest.importorskip("atroposlib")
    missing = ran(without_wandb, "-c", "import wandb", cwd=tmp_path)
    assert "ModuleNotFoundError: No module named 'wandb'" in missing.stderr
    trained: Any = SimpleNamespace(state=SimpleNamespace(global_step=0))
    with run_api() as api, posting(api, trained):
        done = ran(without_wandb, "-c", TRAINING, tmp_path / "run", model, api.url, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully retrieved batch with 2 items" in done.stdout
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2]


def test_the_door_needs_no_wandb(without_wandb: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("atroposlib")
    script = REPOSITORY / "src/atropos_grpo.py"
    flags = ("--model-name", "smoke:sums", "--environment", "arithmetic", "--dry-run")
    done = ran({**without_wandb, "ENV_DIR": sys.prefix}, script, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "run-api" in done.stdout and "environment-arithmetic" in done.stdout


def test_an_environment_of_atroposlib_imports_it_itself(without_wandb: dict[str, str], tmp_path: Path) -> None:
    """wandb is a requirement of atroposlib, so it is installed with atroposlib."""
    pytest.importorskip("atroposlib")
    done = ran(without_wandb, "-c", "import atroposlib.envs.base", cwd=tmp_path)
    assert "ModuleNotFoundError: No module named 'wandb'" in done.stderr
