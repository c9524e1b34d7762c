"""Runs of fake processes for the tests of the launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from grpo_recipes.plan.types import Plan
from grpo_recipes.recipe import Recipe
from launch.fake_run import FakeRun, make_fake_run

_OF_RUN = ("steps", "phase", "bridge", "server", "first", "last")


@pytest.fixture
def fake_run(
    read: Callable[..., Recipe], planned: Callable[..., Plan], tmp_path: Path
) -> Iterator[Callable[..., FakeRun]]:
    """``fake_run(steps=..., phase=..., bridge=..., KEY=VALUE)``: the run, its processes not yet started."""

    def make(**options: Any) -> FakeRun:
        recipe = read(**{key: value for key, value in options.items() if key not in _OF_RUN})
        of_run = {key: value for key, value in options.items() if key in _OF_RUN}
        return make_fake_run(recipe, planned(recipe=recipe), tmp_path, **of_run)

    yield make
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # already ended
            child.kill()
