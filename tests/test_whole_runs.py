"""The order of slow tests, and those that are left out because they would start too late."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledgers import read_left_out
from whole_runs import (
    COMMITS,
    DAY,
    DAYS,
    LEFT_OUT,
    LONG_RUNS,
    MOST_FILES,
    count_newer_commits,
    leave_out_if_late,
    read_recent_changes,
    sort_key,
)

TESTS = Path(__file__).parent


def test_a_commit_concerns_the_tests_that_it_changes_and_those_of_its_source_files(tmp_path: Path) -> None:
    def commit(*files: str) -> None:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text("new")
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        subprocess.run(["git", *author, "commit", "-qm", "change"], cwd=tmp_path, check=True)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit("tests/e2e/test_ports.py")
    commit("src/grpo_recipes/weights/lora.py")
    commit(*(f"src/grpo_recipes/launch/step_{number}.py" for number in range(MOST_FILES + 1)))
    changes = read_recent_changes(tmp_path)
    assert len(changes) == 3 and "launch" not in changes[0]
    files = ("e2e/test_lora.py", "weights/test_nccl.py", "e2e/test_ports.py", "launch/test_nodes.py")
    assert [count_newer_commits(TESTS / file, changes) for file in files] == [1, 1, 2, COMMITS]


def test_files_of_new_commits_come_first_and_long_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whole_runs.read_recent_changes", lambda: [{"tests/e2e/test_ports.py"}, {"lora"}])
    monkeypatch.setenv(DAY, str(DAYS * 5000))
    today, other = LONG_RUNS[0], LONG_RUNS[1]
    files = (other, "e2e/test_eval.py", "trainers/test_ahead.py", today, "e2e/test_lora.py", "e2e/test_ports.py")
    order = sorted((TESTS / file for file in files), key=sort_key)
    assert [str(path.relative_to(TESTS)) for path in order] == [
        "e2e/test_ports.py", "e2e/test_lora.py", today, "trainers/test_ahead.py", "e2e/test_eval.py", other,
    ]  # fmt: skip
    assert all((TESTS / file).is_file() for file in LONG_RUNS)


def test_the_order_of_the_other_files_changes_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whole_runs.read_recent_changes", lambda: [])
    files, orders = [TESTS / f"e2e/test_{number}.py" for number in range(20)], set()
    for day in (20_000, 20_000, 20_001):
        monkeypatch.setenv(DAY, str(day))
        orders.add(tuple(sorted(files, key=sort_key)))
    assert len(orders) == 2


@pytest.mark.parametrize(
    ("mark", "seconds", "skipped"), [("slow", -1, True), ("slow", 60, False), ("alone", -1, False)]
)
def test_slow_tests_do_not_start_after_the_time(
    monkeypatch: pytest.MonkeyPatch, mark: str, seconds: int, skipped: bool
) -> None:
    monkeypatch.setenv("GRPO_LAST_START", str(time.time() + seconds))
    item = SimpleNamespace(get_closest_marker={mark: mark}.get)
    with pytest.raises(pytest.skip.Exception, match="CI has") if skipped else nullcontext():
        leave_out_if_late(item)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_test_that_is_left_out_is_recorded_for_make_coverage(tmp_path: Path) -> None:
    record = tmp_path / "ran"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    variables = clean | {"GRPO_LAST_START": "1", "GRPO_RAN_TESTS": str(record)}
    words = ("-m", "pytest", "-rs", "setup/test_setup.py", "-k", "silent_index or conda_prefix")
    done = subprocess.run(
        [sys.executable, *words], cwd=TESTS, env=variables, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(LEFT_OUT) == 1
    (left_out,) = read_left_out(record)
    lines = record.read_text().splitlines()
    assert f"left_out {left_out}" in lines and "silent_index" in left_out
    assert [line for line in lines if line.startswith("passed ") and line.endswith("::test_conda_prefix")]
