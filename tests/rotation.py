"""Which quarter of the rotating tests runs, where GRPO_QUARTER says one (0 to 3): `.ci/run` takes the day's.

Whole runs take minutes. Those marked `rotating` all run with `make e2e`, and within four days of CI. Parameters of one
test stand side by side, so that every quarter has some of a test with four or more of them.
"""

from __future__ import annotations

import os

import pytest

QUARTERS = 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the rotating tests of the other quarters."""
    asked = os.environ.get("GRPO_QUARTER")
    if asked is None:
        return
    rotating = [item for item in items if item.get_closest_marker("rotating")]
    left_out = set(rotating) - set(rotating[int(asked) % QUARTERS :: QUARTERS])
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
