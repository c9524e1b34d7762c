"""Which of the rotating tests run on a day, where GRPO_DAY says one (a whole number): `.ci/run` counts them.

Whole runs take minutes. Those marked `rotating` all run with `make e2e`; in CI a test with four or more parameters has
a quarter of them a day, so that some of it runs every day, so have those that inject a `fault`, and of the others every
eighth runs.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

QUARTERS, EIGHTHS = 4, 8


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rotating tests of the other days."""
    asked = os.environ.get("GRPO_DAY")
    if asked is None:
        return
    rotating = [item for item in items if item.get_closest_marker("rotating")]
    parameters = Counter(_test(item) for item in rotating)
    many = [item for item in rotating if parameters[_test(item)] >= QUARTERS or item.get_closest_marker("fault")]
    few = [item for item in rotating if item not in many]
    chosen = {*many[int(asked) % QUARTERS :: QUARTERS], *few[int(asked) % EIGHTHS :: EIGHTHS]}
    left_out = set(rotating) - chosen
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
