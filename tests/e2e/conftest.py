"""Fixtures of the end-to-end tests: `launch`, and a real Slurm as `slurm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import Launch, start_launches
from slurm_cluster import slurm

__all__ = ["slurm"]
SLOW_SECONDS = 1200  # of a slow test without a limit: three whole runs share a machine that may be slower than this one


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick whole runs one by one, because each of them uses both cores. Give the slow ones more time."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        if not item.get_closest_marker("slow"):
            item.add_marker("alone")
        elif not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start launches; end those that a failing test leaves."""
    with start_launches(tmp_path) as start:
        yield start
