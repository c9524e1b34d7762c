"""Record which tests ran in the file GRPO_RAN_TESTS, which `make coverage` reads afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from whole_runs import LEFT_OUT


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line for each test: its outcome, or `left_out` (whole_runs.py), and its id without parameters."""
    file = os.environ.get("GRPO_RAN_TESTS")
    if file and (report.when == "call" or not report.passed):  # a fixture can fail and skip as well
        outcome = "left_out" if report.skipped and LEFT_OUT in str(report.longrepr) else report.outcome
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("a") as lines:
            lines.write(f"{outcome} {report.nodeid.partition('[')[0]}\n")


def passed_tests(file: Path) -> set[str]:
    """Return the ids of tests that passed, with no parameter that failed."""
    pairs = [line.split(" ", 1) for line in file.read_text().splitlines()]
    tests = {outcome: {test for status, test in pairs if status == outcome} for outcome in ("passed", "failed")}
    return tests["passed"] - tests["failed"]
