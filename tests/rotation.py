"""Choose the rotating tests of a day, where GRPO_DAY gives one (a whole number): `.ci/run` counts the days.

Whole runs take minutes. `make e2e` runs all that are marked `rotating`. CI runs an eighth a day of those that have four
or more parameters or inject a `fault`, and a sixteenth of the others.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

MANY_PARAMETERS = 4
DAYS_OF_MANY, DAYS_OF_FEW = 8, 16


def leave_out_other_days(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rotating tests of the other days."""
    day = os.environ.get("GRPO_DAY")
    if day is None:
        return
    left_out = set(rotating(items)) - share(items, int(day))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def rotating(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items that do not run every day."""
    return [item for item in items if item.get_closest_marker("rotating")]


def share(items: list[pytest.Item], day: int) -> set[pytest.Item]:
    """Return the rotating items that run on a day."""
    resting = rotating(items)
    parameters = Counter(item.nodeid.partition("[")[0] for item in resting)
    many = [
        item
        for item in resting
        if parameters[item.nodeid.partition("[")[0]] >= MANY_PARAMETERS or item.get_closest_marker("fault")
    ]
    few = [item for item in resting if item not in many]
    return {*many[day % DAYS_OF_MANY :: DAYS_OF_MANY], *few[day % DAYS_OF_FEW :: DAYS_OF_FEW]}
