"""The days of the rotating tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

E2E = Path(__file__).with_name("e2e")


def collected(day: int | None, file: str = "test_deaths.py") -> set[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GRPO_DAY"}
    environment |= {} if day is None else {"GRPO_DAY": str(day)}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(E2E / file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, 5), done.stdout  # 5: none of them on that day
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}


def test_eight_days_are_the_whole_and_each_has_some_of_a_test_with_many_parameters() -> None:
    whole, days = collected(None), [collected(day) for day in range(8)]
    always = set.intersection(*days)
    assert set.union(*days) == whole and len(whole - always) > 4
    assert all(len(day) < len(whole) for day in days)
    assert all(any(name.startswith("test_kill_9") for name in day) for day in days)


def test_of_injected_faults_four_days_are_the_whole() -> None:
    days = [collected(day, "test_faults.py") for day in range(4)]
    assert set.union(*days) == collected(None, "test_faults.py") and all(set.union(*days) != day for day in days)
