"""Record which tests ran in the file GRPO_RAN_TESTS, which `make coverage` reads afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rotation import TIME_IS_OVER


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line for each test: its outcome and its id without parameters. A test that rests today has none."""
    file = os.environ.get("GRPO_RAN_TESTS")
    rests = report.skipped and TIME_IS_OVER in str(report.longrepr)
    if file and not rests and (report.when == "call" or not report.passed):  # a fixture can fail and skip as well
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        with Path(file).open("a") as lines:
            lines.write(f"{report.outcome} {report.nodeid.partition('[')[0]}\n")


def passed_tests(file: Path) -> set[str]:
    """Return the ids of tests that passed, with no parameter that failed."""
    pairs = [line.split(" ", 1) for line in file.read_text().splitlines()]
    tests = {outcome: {test for status, test in pairs if status == outcome} for outcome in ("passed", "failed")}
    return tests["passed"] - tests["failed"]
