"""Fixtures of the end-to-end tests: `launch`, and a real Slurm as `slurm`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import Launch, start_launches
from slurm_cluster import slurm

__all__ = ["slurm"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick whole runs one by one: each of them uses both cores."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("slow"):
            item.add_marker("alone")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start launches; end those that a failing test leaves."""
    with start_launches(tmp_path) as start:
        yield start
