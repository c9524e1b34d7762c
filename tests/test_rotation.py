"""The quarters of the rotating tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

E2E = Path(__file__).with_name("e2e")


def collected(quarter: int | None) -> set[str]:
    environment = {name: value for name, value in os.environ.items() if name != "GRPO_QUARTER"}
    environment |= {} if quarter is None else {"GRPO_QUARTER": str(quarter)}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", str(E2E / "test_deaths.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}


def test_four_quarters_are_the_whole_and_each_has_some_of_a_test() -> None:
    whole, quarters = collected(None), [collected(quarter) for quarter in range(4)]
    always = set.intersection(*quarters)
    assert set.union(*quarters) == whole
    assert sum(len(quarter - always) for quarter in quarters) == len(whole - always) > 4
    assert all(any(name.startswith("test_kill_9") for name in quarter) for quarter in quarters)
