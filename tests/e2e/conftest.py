"""Fixtures of the end-to-end tests: `launch`, and a real Slurm as `slurm`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from real_runs import REPOSITORY, Launch, clean_environment
from slurm_cluster import slurm

__all__ = ["slurm"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick whole runs alone: each fills the machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent and not item.get_closest_marker("slow"):
            item.add_marker("alone")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Start launches; whatever a failing test leaves is ended."""
    started: list[Launch] = []

    def start(*arguments: str, command: list[str] | None = None, folder: str = ".", **variables: str) -> Launch:
        where = tmp_path / folder
        where.mkdir(exist_ok=True)
        mark = f"{tmp_path.name}-{len(started)}-{os.getpid()}"
        named = "--resume" in arguments or any(word.endswith(".yaml") for word in arguments) or "CONFIG" in variables
        recipe = [] if named else [str(REPOSITORY / "recipes/smoke/grpo.yaml")]
        argv = command or [str(Path(sys.executable).with_name("grpo")), "launch", *recipe, *arguments]
        with (where / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                argv,
                cwd=where,
                env=clean_environment(where, mark, **variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        started.append(Launch(process, where, REPOSITORY if command else where, mark))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            try:
                one.process.wait(30)
            except subprocess.TimeoutExpired:
                one.process.kill()
        for process in one.processes():
            process.kill()
