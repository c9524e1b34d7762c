"""The tables and the figure of bench/overlap_figure.py, from runs that are written down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.scripts import script


@pytest.fixture(scope="module")
def figure() -> Iterator[ModuleType]:
    with script("overlap_figure") as module:
        yield module


def runs(task: str, overlap: bool, *rewards: list[float]) -> list[dict[str, Any]]:
    row = {"part": "curves", "task": task, "overlap": overlap}
    return [{**row, "seed": seed, "reward": reward} for seed, reward in enumerate(rewards)]


def record() -> list[dict[str, Any]]:
    slow, fast = [0.5] * 12 + [0.9] * 8, [0.5] * 7 + [0.9] * 13
    return [
        *runs("smoke", False, fast, fast, fast), *runs("smoke", True, slow, fast),  # the third was run in one way
        *runs("modebench", False, fast, slow), *runs("modebench", True, [0.5] * 20, slow),
        {"part": "time"},
    ]  # fmt: skip


def test_a_table_compares_the_seeds_of_each_task_that_were_run_in_both_ways(figure: ModuleType) -> None:
    sums, countdown = figure.tables(record()).split("**ModeBench countdown**")
    assert "**Sums (the smoke task)**, 2 seeds:\n\n| steps |" in sums
    # 0.62 and 0.62 against 0.5 and 0.62: -0.06 in the mean, and 12.71 of their standard errors.
    assert "| 1 to 10 | 0.620 | 0.560 | -0.060 ± 0.763 |\n| 11 to 20 | 0.900 | 0.860 | -0.040 ± 0.508 |" in sums
    assert "was 0.8: 11 to 11, median 11; with overlap 11 to 16, median 13.5.\n" in sums
    assert countdown.startswith(", 2 seeds:")
    assert "was 0.8: 11 to 16, median 13.5; with overlap 16 to 16, median 16 (in 1 of 2 seeds).\n" in countdown
    assert "with overlap never." in figure.tables(runs("smoke", False, *[[0.5] * 20] * 2)
                                                  + runs("smoke", True, *[[0.5] * 20] * 2))  # fmt: skip


def test_a_task_has_a_panel_once_two_seeds_are_there(figure: ModuleType, tmp_path: Path) -> None:
    for task, title in figure.TITLES.items():
        for rows, drawn in ((record(), True), ([row for row in record() if row.get("task") != task], False)):
            figure.draw(tmp_path / "drawn.svg", rows)
            assert (f">{title}</text>" in (tmp_path / "drawn.svg").read_text()) is drawn
