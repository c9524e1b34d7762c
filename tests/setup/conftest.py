"""A small checkout, so that the real scripts run in seconds and touch nothing of this machine."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from private_network import machine_network
from setup_checkout import REPOSITORY, Checkout

COPIED = ["training.sh", "scripts", "requirements", "pyproject.toml", "LICENSE"]


@pytest.fixture(autouse=True, scope="module")
def package_index() -> Iterator[None]:
    """Leave the private network of whole runs: tests here install packages."""
    with machine_network():
        yield


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
