"""The rotating tests of a day, chosen from the real tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from ledgers import is_rotating
from rotation import (
    ALL_OF,
    COMMITS,
    DAYS_OF_FAULTS,
    DAYS_OF_OTHERS,
    SWEEP,
    TIME_IS_OVER,
    count_newer_commits,
    read_recent_changes,
    skip_where_time_is_over,
)

TESTS = Path(__file__).parent
EACH_DAY = """
import json, sys
import pytest, rotation
class Days:
    def pytest_collection_finish(self, session):
        names = lambda items: sorted(item.nodeid for item in items)
        days = [names(rotation.share(session.items, day)) for day in range(rotation.DAYS_OF_OTHERS)]
        print("days", json.dumps([names(rotation.rotating(session.items)), days, names(session.items)]))
sys.exit(pytest.main(["--collect-only", "-q", *sys.argv[1:]], plugins=[Days()]))
"""
FILES = ("e2e/test_deaths.py", "e2e/test_faults.py", "e2e/test_submit.py")


def run(*command: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRPO_DAY", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=TESTS, env=clean | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def days() -> tuple[set[str], list[set[str]]]:
    """Return the names of all rotating tests, and of the tests of each day until all have run."""
    (line,) = [line for line in run("-c", EACH_DAY, *FILES).splitlines() if line.startswith("days ")]
    whole, shares, _ = json.loads(line.removeprefix("days "))
    return set(whole), [set(day) for day in shares]


def test_every_test_runs_on_one_of_the_days(days) -> None:
    whole, shares = days
    assert len(shares) == DAYS_OF_OTHERS
    assert len(whole) > DAYS_OF_OTHERS and set.union(*shares) == whole
    assert all(len(share) <= len(whole) / 2 + 1 for share in shares)


def test_all_faults_run_within_fewer_days(days) -> None:
    whole, shares = days
    first, second = set.union(*shares[:DAYS_OF_FAULTS]), set.union(*shares[-DAYS_OF_FAULTS:])
    faults = {name for name in whole if "test_kill_9" in name or "test_faults.py" in name}
    assert len(faults) > 5 and faults <= first and faults <= second


def test_a_day_leaves_out_those_of_the_other_days(days) -> None:
    whole, shares = days
    listed = run("-m", "pytest", "--collect-only", "-q", *FILES, GRPO_DAY="20781")
    new = {file for file in FILES if count_newer_commits(TESTS / file, read_recent_changes()) < ALL_OF}
    for name in whole:
        of_today = name in shares[20781 % DAYS_OF_OTHERS] or name.partition("::")[0].removeprefix("tests/") in new
        assert (name in listed) == of_today, name


def test_a_commit_concerns_the_tests_that_it_changes_and_those_of_its_source_files(tmp_path) -> None:
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
    commit(*(f"src/grpo_recipes/launch/step_{number}.py" for number in range(SWEEP + 1)))
    changes = read_recent_changes(tmp_path)
    assert len(changes) == 3 and "launch" not in changes[0]
    files = ("e2e/test_lora.py", "weights/test_nccl.py", "e2e/test_ports.py", "launch/test_nodes.py")
    assert [count_newer_commits(TESTS / file, changes) for file in files] == [1, 1, 2, COMMITS]


@pytest.mark.parametrize(
    ("mark", "seconds", "skipped"), [("rotating", -1, True), ("rotating", 60, False), ("slow", -1, False)]
)
def test_once_the_time_is_over_rotating_tests_are_not_started(monkeypatch, mark, seconds, skipped) -> None:
    monkeypatch.setenv("GRPO_ROTATE_UNTIL", str(time.time() + seconds))
    item = SimpleNamespace(get_closest_marker={mark: mark}.get)
    with pytest.raises(pytest.skip.Exception, match="today's") if skipped else nullcontext():
        skip_where_time_is_over(item)


@pytest.mark.slow
@pytest.mark.rotating
def test_one_that_is_not_started_counts_as_one_of_another_day(tmp_path) -> None:
    ran = tmp_path / "ran"
    late = {"GRPO_ROTATE_UNTIL": "1", "GRPO_RAN_TESTS": str(ran)}
    output = run("-m", "pytest", "-rs", "setup/test_setup.py", "-k", "silent_index or conda_prefix", **late)
    assert output.count(TIME_IS_OVER) == 1
    assert {line.split("::")[1] for line in ran.read_text().splitlines()} == {"test_conda_prefix"}


@pytest.mark.slow
@pytest.mark.rotating
def test_make_coverage_takes_those_for_rotating_that_pytest_does() -> None:
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.rotating" in path.read_text()]
    output = run("-c", EACH_DAY, *files, PYTHONPATH=str(TESTS.parent))
    (line,) = [line for line in output.splitlines() if line.startswith("days ")]
    whole, _, listed = json.loads(line.removeprefix("days "))
    daily = {name.partition("[")[0] for name in set(listed) - set(whole)}
    rotating = {name.partition("[")[0] for name in whole}
    assert len(rotating) > 40 and len(daily) > 10
    assert {name for name in rotating | daily if is_rotating(name)} == rotating - daily
