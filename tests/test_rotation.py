"""The order of the whole runs on a day, and their time limit."""

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
import rotation
from ledgers import is_rotating
from rotation import (
    COMMITS,
    SWEEP,
    TIME_IS_OVER,
    count_newer_commits,
    order_for_the_day,
    read_recent_changes,
    skip_where_time_is_over,
)

TESTS = Path(__file__).parent
COLLECT = """
import json, sys
import pytest, rotation
class Collection:
    def pytest_collection_finish(self, session):
        print("items", json.dumps([[item.nodeid, rotation.is_rotating(item)] for item in session.items]))
sys.exit(pytest.main(["--collect-only", "-q", *sys.argv[1:]], plugins=[Collection()]))
"""
FILES = ("e2e/test_deaths.py", "e2e/test_faults.py", "e2e/test_lora.py", "e2e/test_submit.py")


def run(*command: str, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRPO_DAY", "PYTEST_"))}
    done = subprocess.run(
        [sys.executable, *command], cwd=TESTS, env=clean | environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def collect(*files: str, **environment: str) -> list[tuple[str, bool]]:
    """Return the tests in their order, each with whether it rotates."""
    (line,) = [line for line in run("-c", COLLECT, *files, **environment).splitlines() if line.startswith("items ")]
    return [(name, rotates) for name, rotates in json.loads(line.removeprefix("items "))]


def item(file: str, rotates: bool) -> SimpleNamespace:
    marks = {"rotating": "rotating"} if rotates else {}
    return SimpleNamespace(path=TESTS / file, get_closest_marker=marks.get, name=file)


def test_every_test_runs_every_day_and_rotating_tests_come_last() -> None:
    listed = collect(*FILES)
    today = collect(*FILES, GRPO_DAY="20781")
    assert sorted(today) == sorted(listed) and len(today) > 15
    kinds = [rotates for _, rotates in today]
    assert kinds == sorted(kinds) and {*kinds} == {False, True}


def test_files_of_the_last_commits_come_first_and_each_other_file_is_once_the_first(monkeypatch) -> None:
    monkeypatch.setattr(rotation, "read_recent_changes", lambda: [{"tests/e2e/test_ports.py"}, {"lora"}])
    names = ["e2e/test_lora.py", "e2e/test_ports.py", *(f"e2e/test_{letter}.py" for letter in "abcdefghi")]
    firsts = set()
    for day in range(9):
        monkeypatch.setenv("GRPO_DAY", str(20_000 + day))
        items = [item(name, rotates=True) for name in names] + [item("e2e/test_z.py", rotates=False)]
        order_for_the_day(items)
        order = [each.name for each in items]
        assert order[:3] == ["e2e/test_z.py", "e2e/test_ports.py", "e2e/test_lora.py"]
        assert sorted(order[3:]) == names[2:]
        firsts.add(order[3])
    assert sorted(firsts) == names[2:]


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
def test_one_that_is_not_started_is_not_recorded(tmp_path) -> None:
    ran = tmp_path / "ran"
    late = {"GRPO_ROTATE_UNTIL": "1", "GRPO_RAN_TESTS": str(ran)}
    output = run("-m", "pytest", "-rs", "setup/test_setup.py", "-k", "silent_index or conda_prefix", **late)
    assert output.count(TIME_IS_OVER) == 1
    assert {line.split("::")[1] for line in ran.read_text().splitlines()} == {"test_conda_prefix"}


@pytest.mark.slow
@pytest.mark.rotating
def test_make_coverage_takes_those_for_rotating_that_pytest_does() -> None:
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "mark.rotating" in path.read_text()]
    tests = collect(*files, PYTHONPATH=str(TESTS.parent))
    daily = {name.partition("[")[0] for name, rotates in tests if not rotates}
    rotating = {name.partition("[")[0] for name, rotates in tests if rotates}
    assert len(rotating) > 40 and len(daily) > 10
    assert {name for name in rotating | daily if is_rotating(name)} == rotating - daily
