"""Choose the rotating tests of the day GRPO_DAY (an integer), which `make e2e-today` sets.

Whole runs take minutes. `make e2e` runs all tests marked `rotating`. CI runs a quarter per day of those that inject a
`fault`, and an eighth of the others, after all other tests. It starts none of them after GRPO_ROTATE_UNTIL (seconds
since 1970): on a slow machine they run on another day.
"""

from __future__ import annotations

import os
import time

import pytest

DAYS_OF_FAULTS, DAYS_OF_OTHERS = 4, 8
TIME_IS_OVER = "the time of today's rotating tests is over: make e2e runs all"
ROTATES = (pytest.mark.slow, pytest.mark.rotating)  # marks of a parameter that takes many seconds


def leave_out_other_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rotating tests of the other days."""
    day = os.environ.get("GRPO_DAY")
    if day is None:
        return
    left_out = set(rotating(items)) - share(items, int(day))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = sorted((item for item in items if item not in left_out), key=is_rotating)


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
