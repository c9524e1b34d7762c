"""What stands behind the targets of the guide's Makefile today: the commands, without running the long ones."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from setup_checkout import REPOSITORY


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("setup", "bash scripts/setup.sh"),
        ("lint", "/bin/ruff check ."),
        ("lint", "/bin/shellcheck"),
        ("lint", "/bin/mypy"),
        ("format", "/bin/ruff format ."),
        ("test", '-m pytest -m "not slow and not soak and not alone"'),
        ("docs", "-m mkdocs build --strict"),
        ("coverage", "tests/check_guide_rows.py"),
        ("evidence", "bench/evidence.py"),
        ("maxent", "for part in tuning report lengths graph; do"),
    ],
)
def test_a_target_runs_its_command(target: str, command: str) -> None:
    told = subprocess.run(
        ["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
    )
    assert command in told.stdout


def test_clean_removes_what_was_built_and_no_run(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    built = ["site/index.html", "src/a/__pycache__/a.pyc", "build/x", ".pytest_cache/x", "src/a.egg-info/x"]
    kept = ["runs/a/run.json", "logs/a.log", "src/a/a.py", ".venv/bin/python", "tests/a.py"]
    for name in (*built, *kept):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, timeout=30, check=True)
    assert [name for name in built if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []


def test_one_script_runs_everything_before_a_change() -> None:
    steps = [
        line.split("step ")[1] for line in (REPOSITORY / ".ci/run").read_text().splitlines() if "step make" in line
    ]
    assert steps == ["make lint", "make test", "make e2e", "make coverage", "make docs"]


def test_what_builds_the_documentation_is_in_the_locks() -> None:
    for lock in ("cpu", "gpu"):
        names = [line.split("==")[0] for line in (REPOSITORY / "requirements" / f"{lock}.txt").read_text().splitlines()]
        assert {"mkdocs", "mkdocs-material", "mkdocstrings"} <= set(names)


def test_what_differs_between_clusters_stands_in_the_header_as_a_comment() -> None:
    lines = (REPOSITORY / "training.sh").read_text().splitlines()
    comments = " ".join(line for line in lines if line.startswith("# "))
    for option in ("--gres=gpu:", "--cpus-per-task=", "--mem=", "--account=", "--partition=", "--exclusive"):
        assert option in comments
