"""run_colocated_grpo.py with a Python without the packages continues in the environment, like training.sh."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY, Checkout

BARE = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
SAYS = """#!/bin/bash
[[ $1 != -I ]] || { cat "$0.checkout" 2>/dev/null; exit; }
echo "$0 $*"
echo "path=$PYTHONPATH home=$PYTHONHOME mine=$MINE"
exit 7
"""


def has_trl(python: str) -> bool:
    return subprocess.run([python, "-S", "-c", "import trl"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def door(checkout: Checkout):
    """``door(*arguments, VARIABLE=value)``: the file, called by a bare Python from another folder."""
    shutil.copy(REPOSITORY / "run_colocated_grpo.py", checkout.root)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [BARE, "-S", str(checkout.root / "run_colocated_grpo.py"), *arguments]
        where = checkout.root.parent
        return subprocess.run(
            command, cwd=where, env=checkout.env | variables, capture_output=True, text=True, timeout=60, check=False
        )

    return run


def make_environment(folder: Path) -> Path:
    (folder / "bin").mkdir(parents=True)
    for name in ("python", "grpo"):
        (folder / "bin" / name).write_text(SAYS)
        (folder / "bin" / name).chmod(0o755)
    return folder


pytestmark = pytest.mark.skipif(has_trl(BARE), reason="the Python of this machine has the packages of the environment")


def test_without_an_environment_it_says_what_to_run(door, checkout: Checkout) -> None:
    done = door("--gpus", "2")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"grpo: environment: there is none in {checkout.root}/.venv."
        f" Fix: run make setup in {checkout.root}, or export ENV_DIR=DIR of an environment that it made\n"
    )


@pytest.mark.parametrize("place", [".venv", "elsewhere"])
def test_it_goes_on_in_the_environment_with_the_same_words(door, checkout: Checkout, place: str) -> None:
    folder = make_environment(checkout.root / place)
    chosen = {} if place == ".venv" else {"ENV_DIR": str(folder)}
    done = door("--config", "my own.yaml", PYTHONPATH="/of/the/shell", PYTHONHOME="", MINE="kept", **chosen)
    words, variables = done.stdout.splitlines()
    assert words == f"{folder}/bin/python -P -s -m grpo_recipes.extensions.colocated.main --config my own.yaml"
    assert variables == "path= home= mine=kept"
    assert done.returncode == 7


def test_the_environment_of_another_checkout_is_rejected(door, checkout: Checkout) -> None:
    """M15: the entry points in Python reject it as training.sh does."""
    folder, other = make_environment(checkout.root / "elsewhere"), checkout.root.parent
    (folder / "bin/python.checkout").write_text(f"{other}\n")
    done = door("--gpus", "2", ENV_DIR=str(folder))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{folder}/bin/python runs the code of {other}, not of {checkout.root}. Fix: ENV_DIR=" in done.stderr
    (folder / "bin/python.checkout").write_text(f"{checkout.root}\n")
    assert door(ENV_DIR=str(folder)).returncode == 7


@pytest.mark.parametrize("name", ["ENV_ACTIVATE", "CONDA_ENV"])
def test_an_active_environment_of_the_users_own_is_used_as_it_is(door, checkout: Checkout, name: str) -> None:
    make_environment(checkout.root / ".venv")
    done = door(**{name: "theirs"})
    message = f"grpo: environment: {name} is set, and this Python has no packages of it."
    assert (done.returncode, done.stderr) == (2, f"{message} Fix: activate it, or unset {name}\n")
    packages = checkout.root / "packages"
    (packages / "trl").mkdir(parents=True)
    (packages / "trl/__init__.py").touch()
    done = door(**{name: "theirs", "PYTHONPATH": str(packages)})
    assert f"{os.path.basename(BARE)}: " in done.stderr and "grpo_recipes" in done.stderr  # it continued in that Python
