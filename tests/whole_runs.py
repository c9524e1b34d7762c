"""The order of the tests, and the time after which no slow test starts.

A slow test takes from ten seconds to minutes. `make e2e` runs all of them. The files that the last commits concern come
first. A commit concerns the test files that it changes, and the test files with a word of its source files in their
path: ``src/grpo_recipes/weights/lora.py`` concerns ``tests/weights/`` and ``tests/e2e/test_lora.py``.

CI sets a time, the variable GRPO_LAST_START in seconds since 1970. Slow tests that would start later are left out. The
files of ``LONG_RUNS`` take about half of the time. So on each day, a quarter of them comes next, and the others come
last. The order of all other files changes every day, too.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COMMITS = 10  # older commits do not change the order
MOST_FILES = 20  # a commit with more files, such as a renaming, concerns no test more than another
COMMON_WORDS = {"", "src", "grpo", "recipes", "grpo_recipes", "extensions", "tests", "test", "e2e"}
LEFT_OUT = "would start after the time that CI has: make e2e runs it"
# Files that take 100 to 1000 seconds of a processor, below tests/: complete trainings and installations.
LONG_RUNS = (
    "e2e/test_environments.py", "e2e/test_environment_recipes.py", "setup/test_other_installs.py",
    "e2e/test_gpu_stages.py", "e2e/test_tools.py", "e2e/test_container.py", "evidence/test_multi_answer.py",
    "trainers/test_exact_resume.py", "e2e/test_examples.py", "e2e/test_code.py", "e2e/test_judge.py",
    "e2e/test_maxent.py", "e2e/test_your_own_run.py",
)  # fmt: skip
DAYS = 4  # in which each of them comes early
# Folders and files of quick tests that take longest: the processes of pytest then end at about the same time.
LONGEST = (
    "docs", "trainers", "evidence", "bench", "data", "fetch", "launch", "setup", "evaluate", "test_wrong_recipes.py",
)  # fmt: skip
# Processes of pytest-xdist inherit the day, because they must agree on the order also at midnight.
DAY = "GRPO_TEST_DAY"
os.environ.setdefault(DAY, str(int(time.time() // 86400)))


def sort_key(path: Path) -> tuple[int, int, int, bytes]:
    """Return the place of a test file: by the commits that concern it, by its turn, ``LONGEST`` and the day."""
    day, name = int(os.environ[DAY]), str(path.relative_to(TESTS))
    turn = 1
    if name in LONG_RUNS:
        turn = 0 if LONG_RUNS.index(name) % DAYS == day % DAYS else 2
    places = (place for place, folder in enumerate(LONGEST) if path.is_relative_to(TESTS / folder))
    shuffled = hashlib.sha256(f"{day} {name}".encode()).digest()
    return count_newer_commits(path, read_recent_changes()), turn, next(places, len(LONGEST)), shuffled


@functools.cache
def read_recent_changes(repository: Path = TESTS.parent) -> list[set[str]]:
    """Return what each of the last commits concerns, newest first: test files, and words of its source files' paths.

    A copy without git's history has no commits.
    """
    log = subprocess.run(
        ["git", "log", f"-{COMMITS}", "--format=%x00", "--name-only", "--", "src/grpo_recipes", "tests"],
        cwd=repository, capture_output=True, text=True, check=False,
    )  # fmt: skip
    changes = []
    for commit in log.stdout.split("\0")[1:]:
        files = commit.split()
        of_files = [{file} if file.startswith("tests/") else subject_words(Path(file)) for file in files]
        changes.append(set().union(*of_files) if len(files) <= MOST_FILES else set())
    return changes


def subject_words(path: Path) -> set[str]:
    """Return the words of a path that name its subject: `tests/e2e/test_two_nodes.py` has `two` and `nodes`."""
    return {*path.parent.parts, *path.stem.split("_")} - COMMON_WORDS


def count_newer_commits(path: Path, changes: list[set[str]]) -> int:
    """Return how many commits are newer than the last one that concerns a test file, at most ``COMMITS``."""
    subjects = {str(path.relative_to(TESTS.parent)), *subject_words(path.relative_to(TESTS.parent))}
    return next((index for index, change in enumerate(changes) if subjects & change), COMMITS)


def leave_out_if_late(item: pytest.Item) -> None:
    """Skip a slow test that would start too late."""
    last_start = os.environ.get("GRPO_LAST_START")
    if last_start and item.get_closest_marker("slow") and time.time() > float(last_start):
        pytest.skip(LEFT_OUT)
