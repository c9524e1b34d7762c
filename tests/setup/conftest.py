"""A small checkout, so that the real scripts run in seconds and touch nothing of this machine."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY, Checkout

COPIED = ["training.sh", "scripts", "requirements", "pyproject.toml", "LICENSE"]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    root = tmp_path / "checkout"
    root.mkdir()
    for name in COPIED:
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, root / name)
    (root / "src" / "grpo_recipes").mkdir(parents=True)
    (root / "src" / "grpo_recipes" / "__init__.py").touch()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "DEVICE": "cpu",
        "PYTHON": sys.executable,
        # the machine's own pip configuration must not decide these tests
        "PIP_CONFIG_FILE": os.devnull,
    }
    return Checkout(root, env)


@pytest.fixture
def snapshot() -> Callable[[Path], dict[str, int]]:
    """Every path below a folder with its time of change."""

    def take(folder: Path) -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in folder.rglob("*")}

    return take
