"""Ledgers: the tests that show each row of the ``*_rows.yaml`` files and of ``faults.yaml``.

A row of a ``*_rows.yaml`` file is one promise of others: its status and its tests. A row of ``faults.yaml`` is one
fault: how a run ends, and the tests that inject it. As a program (`make coverage`), this module fails if a row rests
on a test that did not pass. It reads the record GRPO_RAN_TESTS, which ``ran_tests.py`` writes during `make test` and
`make e2e`. A slow test that CI had no time for counts, unless it also ran with other parameters and did not pass.

Usage: ``GRPO_RAN_TESTS=.cache/ran-tests.txt python tests/ledgers.py``
"""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ran_tests import passed_tests

TESTS = Path(__file__).resolve().parent
REPOSITORY = TESTS.parent
ROW_FILES = tuple(sorted(TESTS.glob("*_rows.yaml")))
FAULTS = TESTS / "faults.yaml"
SHOWN = ("kept", "modern", "refused")  # a test must show these statuses
EXPLAINED = ("refused", "declined", "later")  # a note must explain these statuses
ENDS = ("refused", "ended", "recovered", "kept")
# Beginning of a row's id -> the list that the rest of the id belongs to.
SUBJECTS = {"key": "keys", "flag": "keys", "variable": "variables"}


@dataclass(frozen=True)
class Row:
    """A promise of the training guide, or of another trainer.

    Attributes:
        id: a slug, unique in its section.
        section: title of one of the file's sections.
        status: one of the file's statuses.
        evidence: one of the file's kinds; ``fake:PART`` if a test replaces a part.
        tests: ids of the tests that show it, ``file::function``.
        keys: recipe keys that are accepted, refused, or (status ``later``) unknown.
        variables: environment variables that are read, or (status ``later``) not read.
        note: the replacement of a refused row, or the reason. For keys, the fix that `grpo check` prints.
    """

    id: str
    section: str
    status: str
    evidence: str = ""
    tests: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Fault:
    """A fault and the end of a run that meets it.

    Attributes:
        fault: the event, such as a killed process.
        ends: one of ``ENDS``.
        said: words of ours that the user sees, ``{}`` for the parts that vary.
        fix: the user's next step.
        tests: ids of the tests that inject it, ``file::function``.
        limit: the longest time until the run has ended.
    """

    fault: str
    ends: str
    said: str
    fix: str
    tests: tuple[str, ...]
    limit: str = "30 s"


@functools.cache
def document(file: Path) -> Any:
    """Read a ledger."""
    return yaml.safe_load(file.read_text())


def parse_row(section: str, name: str, text: str) -> Row:
    """Parse ``STATUS EVIDENCE TEST ... [keys=KEY,...] [variables=NAME,...] [| NOTE]``, the text of the row ``name``."""
    text, _, note = text.partition(" | ")
    status, *words = text.split()
    subject, _, subjects = name.partition("-")
    lists: dict[str, list[str]] = {"tests": [], "evidence": [], "keys": [], "variables": []}
    if subject in SUBJECTS:
        lists[SUBJECTS[subject]] += subjects.split(",")
    for word in words:
        field, equals, names = word.partition("=")
        if "::" in word:
            lists["tests"].append(word)
        elif equals and field in ("keys", "variables"):
            lists[field] += names.split(",")
        else:
            lists["evidence"].append(word)
    tests, evidence, keys, variables = map(tuple, lists.values())
    return Row(name, section, status, " ".join(evidence), tests, keys, variables, note)


@functools.cache
def read_rows(*files: Path) -> tuple[Row, ...]:
    """Read every row of these files, or of all files."""
    return tuple(
        parse_row(section, name, text)
        for file in files or ROW_FILES
        for section, entries in document(file)["sections"].items()
        for name, text in entries.items()
    )


@functools.cache
def read_faults() -> tuple[Fault, ...]:
    """Read every fault."""
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in document(FAULTS))


def needs() -> dict[str, str]:
    """Return the beginning of a test's id -> the program without which pytest skips the test."""
    programs = [entry for file in ROW_FILES for entry in document(file).get("needs", {}).items()]
    return {start: program for program, starts in programs for start in starts.split()}


def problems() -> list[str]:
    """Return the problems of the ledgers, one line each. Tests are looked up, not run."""
    lines = []
    for file in ROW_FILES:
        head, rows = document(file), read_rows(file)
        lines += [f"{row.id}: {problem}" for row in rows for problem in _row_problems(row, head)]
        if len(rows) != head["count"]:  # YAML drops a row without a word if a section has its id twice
            lines.append(f"{file.name}: {len(rows)} rows, its count is {head['count']}")
    return lines + [f"{row.fault}: {problem}" for row in read_faults() for problem in _fault_problems(row)]


def _row_problems(row: Row, head: dict[str, Any]) -> Iterator[str]:
    kind, _, part = row.evidence.partition(":")
    if row.status not in head["statuses"]:
        yield f"unknown status '{row.status}'"
    if row.status in EXPLAINED and not row.note:
        yield f"is {row.status} without a note"
    if row.status in SHOWN and not row.tests:
        yield f"is {row.status} without a test"
    if row.status in SHOWN and kind not in head["evidence"]:
        yield f"unknown evidence '{kind}'"
    if row.status not in SHOWN and kind:
        yield f"is {row.status} with evidence"
    if (kind == "fake") != bool(part):
        yield "must name the faked part, and only for fake evidence"
    yield from (f"no test {test}" for test in row.tests if not exists(test))


def _fault_problems(row: Fault) -> Iterator[str]:
    if row.ends not in ENDS:
        yield f"unknown end '{row.ends}'"
    if not row.tests:
        yield "has no test"
    yield from (f"no test {test}" for test in row.tests if not exists(test))
    missing = [part for part in row.said.split("{}") if part.strip() and part not in _source()]
    yield from (f"nothing in the source says '{part}'" for part in missing)


@functools.cache
def _source() -> str:
    """Return all of ``src`` with adjacent literals joined."""
    text = "\n".join(path.read_text() for path in sorted((REPOSITORY / "src").rglob("*.py")))
    return re.sub(r'["\']\s*\n\s*f?["\']', "", re.sub(r"\{[^{}\n]*\}", "{}", text))


def exists(test: str) -> bool:
    """Return whether the file of a test's id defines its function."""
    file, _, function = test.partition("::")
    return (REPOSITORY / file).is_file() and function in _functions(REPOSITORY / file)


@functools.cache
def _functions(path: Path) -> set[str]:
    """Return the names of the test functions of a file."""
    body = ast.parse(path.read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def read_left_out(file: Path) -> set[str]:
    """Return the tests that CI had no time for, if they did not run with other parameters and fail."""
    pairs = [line.split(" ", 1) for line in file.read_text().splitlines()]
    failed = {test for outcome, test in pairs if outcome == "failed"}
    return {test for outcome, test in pairs if outcome == "left_out"} - failed


def counted(tests: Iterable[str], file: Path) -> set[str]:
    """Return the tests that passed, and those that CI had no time for."""
    return (passed_tests(file) | read_left_out(file)).intersection(tests)


def judge_rows(
    rows: Iterable[Row], shown: set[str], is_present: Callable[[str], bool]
) -> tuple[list[str], dict[str, str]]:
    """Return a problem for each test that did not pass, and the excused tests with the program that they need.

    Args:
        rows: rows of any file.
        shown: ids of the tests that count as passed.
        is_present: whether a program is on this machine.
    """
    wrong, excused = [], {}
    for row in rows:
        for test in row.tests:
            if test in shown or not exists(test):  # `problems` reports tests that do not exist
                continue
            program = next((program for start, program in needs().items() if test.startswith(start)), None)
            if program and not is_present(program):
                excused[test] = program
            else:
                wrong.append(f"{row.id} is {row.status} by {test}, which did not pass in this run")
    return wrong, excused


def judge_faults(rows: Iterable[Fault], file: Path) -> list[str]:
    """Return a problem for each fault with a failed test, or without a test that counts as passed."""
    record, wrong = file.read_text(), []
    for row in rows:
        failed = [test for test in row.tests if f"failed {test}\n" in record]
        if failed or not counted(row.tests, file):
            wrong.append(f"'{row.fault}' rests on {', '.join(failed or row.tests)}, which did not pass in this run")
    return wrong


def _is_present(program: str) -> bool:
    return shutil.which(program) is not None and os.geteuid() == 0  # a private Slurm needs root


def main() -> int:
    """Print the rows that no test shows. Return 0 if there are none, 1 if there are, 2 if no tests ran."""
    file = Path(os.environ.get("GRPO_RAN_TESTS", ""))
    if not file.is_file():
        print("coverage: no record of tests found. Fix: run make test and make e2e, then make coverage")
        return 2
    shown = counted([test for row in read_rows() for test in row.tests], file)
    wrong, excused = judge_rows(read_rows(), shown, _is_present)
    for test in sorted(shown - passed_tests(file)):
        print(f"coverage: {test} was left out, because CI had no time")
    for test, program in sorted(excused.items()):
        print(f"coverage: {test} was skipped: {program} is missing, or you are not root")
    wrong = [*problems(), *wrong, *judge_faults(read_faults(), file)]
    for problem in wrong:
        print(f"coverage: {problem}", file=sys.stderr)
    counts = [f"{len(read_rows(path))} in {path.name}" for path in ROW_FILES]
    print(f"coverage: rows: {', '.join(counts)}, {len(read_faults())} in {FAULTS.name}; {len(wrong)} are wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
