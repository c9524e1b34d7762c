"""``findings.yaml``: what was found by using the package, what happens today, and the test or page that shows it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from guide_rows import REPOSITORY, exists

FILE = Path(__file__).with_suffix(".yaml")
LINES = {"A": range(1, 10), "B": range(1, 8), "C": range(1, 12), "D": range(18), "E": range(1, 9)}


@dataclass(frozen=True)
class Finding:
    """A point of a line.

    Attributes:
        id: its line, a letter and a number, and a letter where the line makes several points.
        finding: what was wrong, or what works well and has to stay.
        now: what happens today.
        tests: ids of the tests that show it, ``file::function``.
        answer: of one that should not be done, the page of ``docs/`` that says so.
        says: a piece of that page's text.
    """

    id: str
    finding: str
    now: str
    tests: tuple[str, ...] = ()
    answer: str = ""
    says: str = ""

    @property
    def status(self) -> str:
        """Return what ``make coverage`` calls a finding that rests on a test."""
        return "answered"

    @property
    def line(self) -> str:
        """Return its line: ``C4`` of ``C4b``."""
        return self.id.rstrip("abcdefghijklmnopqrstuvwxyz")


def read(file: Path) -> tuple[Finding, ...]:
    """Return the entries of a file."""
    return tuple(
        Finding(**{**entry, "tests": tuple(entry.get("tests", ()))}) for entry in yaml.safe_load(file.read_text())
    )


@functools.cache
def rows() -> tuple[Finding, ...]:
    """Return every entry."""
    return read(FILE)


def faults(entries: tuple[Finding, ...]) -> list[str]:
    """Return what is wrong with these entries, one line each; the tests named in them are looked up, not run."""
    found = [f"{entry.id}: {fault}" for entry in entries for fault in _faults(entry)]
    ids = [entry.id for entry in entries]
    return found + [f"{name}: the id is given twice" for name in sorted({name for name in ids if ids.count(name) > 1})]


def unanswered(entries: tuple[Finding, ...]) -> list[str]:
    """Return the lines of the findings without an entry."""
    lines = {entry.line for entry in entries}
    return [line for line in _lines() if line not in lines]


def _lines() -> list[str]:
    return [f"{letter}{number}" for letter, numbers in LINES.items() for number in numbers]


def _faults(entry: Finding) -> Iterator[str]:
    if entry.line not in _lines() or len(entry.id) > len(entry.line) + 1:
        yield "is no line of the findings"
    if not entry.finding or not entry.now:
        yield "has no finding, or says nothing of today"
    if bool(entry.tests) == bool(entry.answer):
        yield "needs tests, or an answer with a page of the docs"
    yield from (f"there is no test {test}" for test in entry.tests if not exists(test))
    if entry.answer:
        page = REPOSITORY / entry.answer
        if not page.is_file():
            yield f"there is no page {entry.answer}"
        elif len(entry.says.split()) < 3 or _plain(entry.says) not in _plain(page.read_text()):
            yield f"{entry.answer} does not say '{entry.says}'"


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
