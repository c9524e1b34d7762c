"""Order the whole runs for `make e2e-today`, and start none of those marked ``rotating`` after the time limit.

`make e2e` runs all tests without a limit. CI runs the rotating tests after all others, and starts none of them after
GRPO_ROTATE_UNTIL (seconds since 1970). On a slow machine some of them therefore run on another day. The files begin
with those that the last commits concern, newest first. The other files follow, from a start that moves by
``STEP`` files each day (GRPO_DAY, an integer), so that all have their turn.

A commit concerns the test files that it changes, and the test files with a word of its source files in their path:
`src/grpo_recipes/weights/lora.py` concerns `tests/weights/` and `tests/e2e/test_lora.py`.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COMMITS = 5  # the last commits: their tests come before all others
SWEEP = 20  # a commit with more files, such as a renaming, concerns no test more than another
COMMON_WORDS = {"", "src", "grpo", "recipes", "grpo_recipes", "extensions", "tests", "test", "e2e"}
STEP = 11  # files; a prime number, so that each file is the first on some day
TIME_IS_OVER = "the time of today's rotating tests is over: make e2e runs all"
ROTATES = (pytest.mark.slow, pytest.mark.rotating)  # marks of a parameter that takes many seconds


def order_for_the_day(items: list[pytest.Item]) -> None:
    """Sort the tests if GRPO_DAY is set: rotating tests last, their files by the last commits and by the day."""
    day = os.environ.get("GRPO_DAY")
    if day is None:
        return
    changes = read_recent_changes()
    ages = {path: count_newer_commits(path, changes) for path in {item.path for item in items}}
    files = sorted({item.path for item in items if ages[item.path] == COMMITS})
    start = int(day) * STEP % max(1, len(files))
    positions = {path: position for position, path in enumerate(files[start:] + files[:start])}
    items.sort(key=lambda item: (is_rotating(item), ages[item.path], positions.get(item.path, 0)))


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
        changes.append(set().union(*of_files) if len(files) <= SWEEP else set())
    return changes


def subject_words(path: Path) -> set[str]:
    """Return the words of a path that name its subject: `tests/e2e/test_two_nodes.py` has `two` and `nodes`."""
    return {*path.parent.parts, *path.stem.split("_")} - COMMON_WORDS


def count_newer_commits(path: Path, changes: list[set[str]]) -> int:
    """Return how many commits are newer than the last one that concerns a test file, at most ``COMMITS``."""
    subjects = {str(path.relative_to(TESTS.parent)), *subject_words(path.relative_to(TESTS.parent))}
    return next((index for index, change in enumerate(changes) if subjects & change), COMMITS)


def skip_where_time_is_over(item: pytest.Item) -> None:
    """Skip a rotating test that would start too late."""
    until = os.environ.get("GRPO_ROTATE_UNTIL")
    if until and is_rotating(item) and time.time() > float(until):
        pytest.skip(TIME_IS_OVER)


def is_rotating(item: pytest.Item) -> bool:
    """Return whether an item does not run every day."""
    return item.get_closest_marker("rotating") is not None
