"""The commands of the targets of the guide's Makefile, without running the long commands."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from documented import documented
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
        ("e2e", '-m pytest -m "slow and not soak"'),
        ("coverage", "tests/ledgers.py"),
        ("evidence", "bench/tables.py"),
        ("evidence", "evidence/maxent_tables.py"),
        ("maxent", "for part in tuning report lengths graph; do"),
    ],
)
def test_a_target_runs_its_command(target: str, command: str) -> None:
    told = subprocess.run(
        ["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
    )
    assert command in told.stdout


def test_make_test_runs_both_halves_though_the_first_fails_and_records_its_start(tmp_path: Path) -> None:
    """R0: the tests marked alone start too, and make test fails if either half fails."""
    python, record = tmp_path / "environment/bin/python", tmp_path / "cache/ran.txt"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/bash\necho "$GRPO_RAN_TESTS: $*"\n[[ $* != *"not alone"* ]]\n')
    python.chmod(0o755)
    variables = [f"ENV_DIR={tmp_path / 'environment'}", f"RAN_TESTS={record}", "PYTEST_ARGS=-k x"]
    words = [*documented("make test"), "--old-file=setup", *variables]
    done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    first, second = [line for line in done.stdout.splitlines() if line.startswith(f"{record}: ")]
    assert "not slow and not soak and not alone" in first and first.endswith("-k x")
    assert "not slow and not soak and alone" in second and second.endswith("-k x")
    assert done.returncode == 2
    assert record.read_text().split()[0] == "started"
    python.write_text("#!/bin/bash\nexit 5\n")  # pytest's code if no test was selected
    assert subprocess.run(words, cwd=REPOSITORY, capture_output=True, timeout=60).returncode == 0


def test_whole_runs_start_until_a_time() -> None:
    for words, variable in ((["LAST_START=1800000000"], "=1800000000 "), ([], "= ")):
        told = subprocess.run(
            ["make", "--dry-run", "e2e", *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=True
        )
        assert f"GRPO_LAST_START{variable}" in told.stdout


def test_clean_removes_what_was_built_and_no_run(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    built = ["site/index.html", "src/a/__pycache__/a.pyc", "build/x", ".pytest_cache/x", "src/a.egg-info/x"]
    files = ["runs/a/run.json", "logs/a.log", "src/a/a.py", ".venv/bin/python", "tests/a.py"]
    for name in (*built, *files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    subprocess.run(["make", "clean"], cwd=tmp_path, capture_output=True, timeout=30, check=True)
    assert [name for name in built if (tmp_path / name).exists()] == []
    assert [name for name in files if not (tmp_path / name).exists()] == []


def test_one_script_runs_everything_before_a_change() -> None:
    lines = (REPOSITORY / ".ci/run").read_text().splitlines()
    steps = [line.split()[1:3] for line in lines if line.startswith("step make")]
    assert steps == [["make", target] for target in ("lint", "test", "e2e", "coverage", "docs")]


def test_what_builds_the_documentation_is_in_the_locks() -> None:
    for lock in ("cpu", "gpu"):
        names = [line.split("==")[0] for line in (REPOSITORY / "requirements" / f"{lock}.txt").read_text().splitlines()]
        assert {"mkdocs", "mkdocs-material", "mkdocstrings"} <= set(names)


def test_what_differs_between_clusters_stands_in_the_header_as_a_comment() -> None:
    lines = (REPOSITORY / "training.sh").read_text().splitlines()
    comments = " ".join(line for line in lines if line.startswith("# "))
    for option in ("--gres=gpu:", "--cpus-per-task=", "--mem=", "--account=", "--partition=", "--exclusive"):
        assert option in comments


def test_make_test_runs_both_parts_and_the_tests_that_run_alone(tmp_path: Path) -> None:
    """The parts run at the same time; a failure of either fails make test."""
    python = tmp_path / "environment/bin/python"
    python.parent.mkdir(parents=True)
    variables = [f"ENV_DIR={tmp_path / 'environment'}", f"RAN_TESTS={tmp_path / 'ran.txt'}"]
    words = [*documented("make test"), "--old-file=setup", *variables]
    for failing in ("core: ", "above: ", "and alone"):
        python.write_text(
            f'#!/bin/bash\nrun="$GRPO_TEST_PART: $*"\necho "run of $run"\n[[ "$run" != *"{failing}"* ]]\n'
        )
        python.chmod(0o755)
        done = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        above, core, alone = [line for line in done.stdout.splitlines() if line.startswith("run of ")]
        assert core.startswith("run of core: tests/core_alone.py env GRPO_RAN_TESTS=") and "and not alone" in core
        assert above.startswith("run of above: -m pytest") and "and not alone" in above
        assert alone.startswith("run of : -m pytest") and "and alone" in alone


def test_every_file_that_marks_tests_alone_is_among_those_that_make_names() -> None:
    """Pytest runs the tests marked ``alone`` from named files, so that it need not collect the others."""
    shown = "files:\n\t@printf '%s\\n' $(ALONE_FILES)\n"
    listed = subprocess.run(
        ["make", "--silent", "--file=Makefile", "--file=-", "files"],
        cwd=REPOSITORY, input=shown, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    named = {REPOSITORY / name for name in listed.stdout.split()}
    for path in (REPOSITORY / "tests").rglob("*.py"):
        if "pytest.mark." + "alone" in path.read_text() or 'add_marker("' + 'alone")' in path.read_text():
            assert path in named or path.parent in named, path
