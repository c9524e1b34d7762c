"""``guide_rows.yaml``: what became of each point of the training guide, and the tests that show it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_suffix(".yaml")
SHOWN = ("kept", "modern", "refused")  # statuses that a test must show
STATUSES = (*SHOWN, "later")
EVIDENCE = ("real", "fake", "argv", "text")


@dataclass(frozen=True)
class Row:
    """A point of the guide.

    Attributes:
        id: its name, made once.
        section: a key of ``sections``.
        item: what the guide promises.
        status: one of ``STATUSES``.
        how: what happens today; of ``refused`` keys, the very words of ``grpo check``.
        evidence: one of ``EVIDENCE``, what its tests look at.
        of: of ``fake`` evidence, the part that a test stands in for.
        tests: ids of the tests that show it, ``file::function``.
        why: why not yet; of ``later`` rows only.
        keys: recipe keys it speaks of: accepted, refused, or (``later``) unknown.
        variables: environment variables it speaks of: read or (``later``) not.
    """

    id: str
    section: str
    item: str
    status: str
    how: str = ""
    evidence: str = ""
    of: str = ""
    tests: tuple[str, ...] = ()
    why: str = ""
    keys: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


@functools.cache
def document() -> dict[str, Any]:
    """The file as it is."""
    return yaml.safe_load(FILE.read_text())


def sections() -> dict[str, dict[str, Any]]:
    """Section -> its title and its number of rows."""
    return document()["sections"]


def needs() -> dict[str, str]:
    """Beginning of a test's id -> the program without which the test is skipped."""
    return document()["needs"]


@functools.cache
def rows() -> tuple[Row, ...]:
    """Every row."""
    lists = ("tests", "keys", "variables")
    return tuple(
        Row(**{name: tuple(value) if name in lists else value for name, value in entry.items()})
        for entry in document()["rows"]
    )


def faults() -> list[str]:
    """What is wrong with the file, one line a fault; the tests named in it are looked up, not run."""
    found = [f"{row.id}: {fault}" for row in rows() for fault in _faults(row)]
    ids = [row.id for row in rows()]
    found += [f"{name}: the id is given twice" for name in sorted({name for name in ids if ids.count(name) > 1})]
    for section, about in sections().items():
        count = sum(row.section == section for row in rows())
        if count != about["rows"]:
            found.append(f"section {section}: {count} rows, its header says {about['rows']}")
    return found


def _faults(row: Row) -> Iterator[str]:
    if row.section not in sections():
        yield f"unknown section '{row.section}'"
    if row.status not in STATUSES:
        yield f"unknown status '{row.status}'"
    if not row.item:
        yield "no item"
    if row.status == "later" and not row.why:
        yield "says later without a why"
    if row.status in SHOWN and not (row.how and row.tests):
        yield f"is {row.status} without a how or without a test"
    if row.status in SHOWN and row.evidence not in EVIDENCE:
        yield f"unknown evidence '{row.evidence}'"
    if (row.evidence == "fake") != bool(row.of):
        yield "names the part that is faked, or has no fake"
    if row.status == "later" and row.evidence:
        yield "says later with evidence"
    yield from (f"there is no test {test}" for test in row.tests if not exists(test))


def exists(test: str) -> bool:
    """Whether the file of a test's id defines its function."""
    file, _, function = test.partition("::")
    return (REPOSITORY / file).is_file() and function in _functions(REPOSITORY / file)


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    body = ast.parse(path.read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
