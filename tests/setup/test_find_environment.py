"""scripts/find_environment.py: entry scripts continue in one environment, with any Python, from any folder."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY, Checkout

ENTRIES = {
    "run_colocated_grpo.py": "grpo_recipes.extensions.colocated.main",
    "run_offline_grpo.py": "grpo_recipes.extensions.offline.main",
    "src/atropos_grpo.py": "grpo_recipes.extensions.atropos.main",
    "src/colocated_grpo.py": "grpo_recipes.extensions.colocated.main",
    "src/offline_grpo.py": "grpo_recipes.extensions.offline.main",
}
OTHERS = ("smoke_test.py", "run_tests.py", "test_gpu_integration.py", "scripts/find_environment.py")
PRINTS = '#!/bin/bash\n[[ $1 == -I ]] || echo "$0 $*"\n'


@pytest.fixture
def python(checkout: Checkout) -> Path:
    """The Python of an environment that prints its arguments, in a checkout with all entry scripts."""
    for name in ENTRIES:
        shutil.copy(REPOSITORY / name, checkout.root / name)
    folder = checkout.root / ".venv/bin"
    folder.mkdir(parents=True)
    for name in ("python", "grpo"):
        (folder / name).write_text(PRINTS)
        (folder / name).chmod(0o755)
    return folder / "python"


def run(script: Path, checkout: Checkout, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script by a Python without packages, from a folder outside the checkout."""
    command = [sys.executable, "-I", "-S", str(script), "--name", "two words"]
    return subprocess.run(
        command, cwd=checkout.root.parent, env=checkout.env | variables, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_script_continues_in_the_environment_of_its_checkout(
    name: str, python: Path, checkout: Checkout
) -> None:
    assert find_spec(ENTRIES[name])
    done = run(checkout.root / name, checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{python} -P -s -m {ENTRIES[name]} --name two words\n"


@pytest.mark.parametrize("variable", ["SLURM_SUBMIT_DIR", "GRPO_HOME"])
@pytest.mark.parametrize("name", [name for name in ENTRIES if name.startswith("src/")])
def test_a_copy_of_an_entry_script_finds_the_checkout(
    name: str, variable: str, python: Path, checkout: Checkout, tmp_path: Path
) -> None:
    """Slurm starts a copy of a batch script from its spool folder."""
    copy = tmp_path / "spool/job00007/slurm_script"
    copy.parent.mkdir(parents=True)
    shutil.copy(checkout.root / name, copy)
    done = run(copy, checkout, **{variable: str(checkout.root)})
    assert done.stdout == f"{python} -P -s -m {ENTRIES[name]} --name two words\n"


def test_the_module_prints_the_python_of_the_environment(python: Path, checkout: Checkout) -> None:
    done = run(checkout.root / "scripts/find_environment.py", checkout)
    assert (done.returncode, done.stdout) == (0, f"{python}\n")


@pytest.mark.parametrize("name", [*ENTRIES, *OTHERS])
def test_an_entry_script_is_valid_for_the_python_of_old_login_nodes(name: str) -> None:
    text = (REPOSITORY / name).read_text()
    ast.parse(text, feature_version=(3, 6))
    assert "runpy" not in text
    if name not in OTHERS:
        assert len(text.splitlines()) < 30
    if name not in OTHERS or name.startswith("scripts/"):
        assert not re.search(r"\btext=|capture_output=", text)  # both came with Python 3.7
