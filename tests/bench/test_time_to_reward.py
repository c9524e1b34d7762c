"""The tables and the figure of bench/time_to_reward_figure.py, from runs that are written down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.scripts import script

SECONDS = {"trl": 40.0, "default": 20.0, "overlap": 10.0, "replicas": 30.0}


@pytest.fixture(scope="module")
def figure() -> Iterator[ModuleType]:
    with script("time_to_reward_figure") as module:
        yield module


def record(task: str = "smoke", seeds: int = 2) -> list[dict[str, Any]]:
    """Return runs of 8 steps, with half as many tokens without overlap."""
    return [
        {
            "task": task, "seed": seed, "arm": arm, "steps": 8, "reached": arm != "overlap" or seed > 0,
            "seconds": seconds, "tokens": 2500 if arm == "overlap" else 1000,
            "reward": [0.1 * step for step in range(8)],
            "seconds_by_step": [seconds * step / 8 for step in range(8)],
        }
        for seed in range(seeds)
        for arm, seconds in SECONDS.items()
    ]  # fmt: skip


def test_a_table_compares_seconds_and_seconds_at_equal_tokens(figure: ModuleType) -> None:
    table = figure.tables([*record(), *record("modebench", 1)])
    assert table.startswith("**Sums (the smoke task)**, 2 seeds:") and "ModeBench" not in table
    assert "| ours | 2 of 2 | 8 | 1,000 | 20.0 | 0.50 (0.50 to 0.50) | 0.50 (0.50 to 0.50) |" in table
    assert (
        "| ours, `overlap_generation` | 1 of 2 | 8 | 2,500 | 10.0 | 0.25 (0.25 to 0.25) | 0.10 (0.10 to 0.10) |"
        in table
    )


def test_a_seed_counts_when_all_trainers_have_run_it(figure: ModuleType) -> None:
    assert "2 seeds" in figure.tables([*record(), {**record()[0], "seed": 2}])


def test_a_task_has_a_panel_once_two_seeds_are_there(figure: ModuleType, tmp_path: Path) -> None:
    figure.draw(tmp_path / "drawn.svg", [*record(), *record("modebench", 1)])
    drawn = (tmp_path / "drawn.svg").read_text()
    assert ">Sums (the smoke task)</text>" in drawn and ">ModeBench countdown</text>" not in drawn
    assert all(name.replace("`", "") in drawn for name in figure.NAMES.values())
