"""Fails when a row rests on a test that did not pass here: `make coverage`.

Rows are those of guide_rows.yaml, atropos_rows.yaml, findings.yaml and faults.yaml.
GRPO_RAN_TESTS is the file in which ran_tests.py recorded the tests of `make test` and `make e2e`. If `make e2e-today`
ran a day's share of the rotating tests, a test of another day is counted unless it ran and did not pass.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import fault_rows
import findings
from fault_rows import Fault, is_rotating
from findings import Finding
from guide_rows import ATROPOS, GUIDE, Row, exists, faults, needs, rows
from ran_tests import passed_tests


def main() -> int:
    """Say what is not shown; 0 when everything is, 1 when not, 2 when no tests ran."""
    file = os.environ.get("GRPO_RAN_TESTS", "")
    if not Path(file).is_file():
        print("coverage: no record of tests found. Fix: run make test and make e2e, then make coverage")
        return 2
    resting = (*rows(), *findings.rows())
    shown = counted([test for row in resting for test in row.tests], Path(file))
    wrong, excused = judge(resting, shown, _runs_here)
    for test in sorted(shown - passed_tests(Path(file))):
        print(f"coverage: {test} is of another day")
    for test, program in sorted(excused.items()):
        print(f"coverage: {test} was skipped, {program} is not on this machine or not for this user to start")
    wrong += without_a_test(fault_rows.rows(), Path(file))
    for fault in (wrong := [*faults(), *fault_rows.faults(), *findings.faults(findings.rows()), *wrong]):
        print(f"coverage: {fault}", file=sys.stderr)
    tested = sum(bool(row.tests) for row in rows())
    print(
        f"coverage: {len(rows(GUIDE))} rows of the training guide, {len(rows(ATROPOS))} of Atropos, "
        f"{tested} rest on tests; "
        f"{len(fault_rows.rows())} faults, {len(findings.rows())} findings"
    )
    print(f"coverage: {len(wrong)} rows are wrong")
    return 1 if wrong else 0


def _runs_here(program: str) -> bool:
    return shutil.which(program) is not None and os.geteuid() == 0  # a Slurm of one's own needs root


def counted(tests: Iterable[str], file: Path) -> set[str]:
    """Return the tests that passed, and after a run of one day's share also the rotating tests of other days."""
    lines = file.read_text().splitlines()
    ran, is_share = {line.partition(" ")[2] for line in lines}, any(line.startswith("day ") for line in lines)
    passed = passed_tests(file)
    resting = {test for test in tests if is_share and test not in ran and exists(test)}
    return passed.intersection(tests) | set(filter(is_rotating, resting))


def judge(
    all_rows: tuple[Row | Finding, ...], shown: set[str], present: Callable[[str], bool]
) -> tuple[list[str], dict[str, str]]:
    """Faults, and tests that could not run here -> the program they need.

    Args:
        all_rows: rows of the guide and of Atropos, and findings.
        shown: ids of the tests that count as passed.
        present: whether a program is on this machine.
    """
    wrong, excused = [], {}
    for row in all_rows:
        for test in row.tests:
            if test in shown or not exists(test):  # `faults` tells of those that do not exist
                continue
            program = next((program for start, program in needs().items() if test.startswith(start)), None)
            if program and not present(program):
                excused[test] = program
            else:
                wrong.append(f"{row.id} is {row.status} by {test}, which did not pass in this run")
    return wrong, excused


def without_a_test(injected: tuple[Fault, ...], file: Path) -> list[str]:
    """Faults that no test of this run injected, nor any that ran on another day would."""
    ran, wrong = file.read_text(), []
    for row in injected:
        failed = [test for test in row.tests if f"failed {test}\n" in ran]
        if failed or not counted(row.tests, file):
            wrong.append(f"'{row.fault}' rests on {', '.join(failed or row.tests)}, which did not pass in this run")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
