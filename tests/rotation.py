"""Choose the rotating tests of the day GRPO_DAY (an integer), which `make e2e-today` sets.

Whole runs take minutes. `make e2e` runs all tests marked `rotating`. On each day, CI runs half of those that
inject a `fault` and a quarter of the others, after all other tests. It starts none of them after GRPO_ROTATE_UNTIL
(seconds since 1970): on a slow machine they run on another day.

The day's files begin with those that the last commits concern, newest first. A commit concerns the test files that it
changes, and the test files with a word of its source files in their path: `src/grpo_recipes/weights/lora.py` concerns
`tests/weights/` and `tests/e2e/test_lora.py`. Whole runs that the newest ``ALL_OF`` commits concern run on every day.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
COMMITS = 40  # older commits do not change the order
ALL_OF = 5  # commits of which each rotating test runs
SWEEP = 20  # a commit with more files, such as a renaming, concerns no test more than another
COMMON_WORDS = {"", "src", "grpo", "recipes", "grpo_recipes", "extensions", "tests", "test", "e2e"}
DAYS_OF_FAULTS, DAYS_OF_OTHERS = 2, 4
TIME_IS_OVER = "the time of today's rotating tests is over: make e2e runs all"
ROTATES = (pytest.mark.slow, pytest.mark.rotating)  # marks of a parameter that takes many seconds


def leave_out_other_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rotating tests of the other days."""
    day = os.environ.get("GRPO_DAY")
    if day is None:
        return
    ages = {path: count_newer_commits(path, read_recent_changes()) for path in {item.path for item in items}}
    new = {item for item in rotating(items) if ages[item.path] < ALL_OF}
    left_out = set(rotating(items)) - share(items, int(day)) - new
    config.hook.pytest_deselected(items=list(left_out))
    chosen = [item for item in items if item not in left_out]
    items[:] = sorted(chosen, key=lambda item: (is_rotating(item), ages[item.path]))


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


def rotating(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that do not run every day."""
    return [item for item in items if is_rotating(item)]


def share(items: list[pytest.Item], day: int) -> set[pytest.Item]:
    """Return the rotating items that run on a day."""
    resting = rotating(items)
    faults = [item for item in resting if item.get_closest_marker("fault")]
    without_fault = [item for item in resting if item not in faults]
    return {*faults[day % DAYS_OF_FAULTS :: DAYS_OF_FAULTS], *without_fault[day % DAYS_OF_OTHERS :: DAYS_OF_OTHERS]}
