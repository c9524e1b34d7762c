"""``guide_rows.yaml`` and ``atropos_rows.yaml``: what became of each promise of others, and the tests that show it."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
GUIDE = Path(__file__).with_suffix(".yaml")
ATROPOS = GUIDE.with_name("atropos_rows.yaml")
FILES = (GUIDE, ATROPOS)
SHOWN = ("kept", "modern", "refused")  # statuses that a test must show; the others must give a reason


@dataclass(frozen=True)
class Row:
    """A promise: a point of the training guide, or of a trainer for Atropos.

    Attributes:
        id: its name, made once.
        section: one of the file's sections.
        item: what is promised.
        status: one of the file's statuses.
        how: what happens today; of ``refused`` keys, the very words of ``grpo check``.
        evidence: one of the file's kinds, what its tests look at.
        of: of ``fake`` evidence, the part that a test stands in for.
        tests: ids of the tests that show it, ``file::function``.
        why: why not, or not yet; of ``declined`` and ``later`` rows only.
        keys: recipe keys it speaks of: accepted, refused, or (not shown) unknown.
        variables: environment variables it speaks of: read or (not shown) not.
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
def document(file: Path) -> dict[str, Any]:
    """A file as it is."""
    return yaml.safe_load(file.read_text())


def needs() -> dict[str, str]:
    """Beginning of a test's id -> the program without which the test is skipped."""
    return {start: program for file in FILES for start, program in document(file)["needs"].items()}


@functools.cache
def rows(*files: Path) -> tuple[Row, ...]:
    """Every row of these files, or of all."""
    lists = ("tests", "keys", "variables")
    return tuple(
        Row(**{name: tuple(value) if name in lists else value for name, value in entry.items()})
        for file in files or FILES
        for entry in document(file)["rows"]
    )


def faults() -> list[str]:
    """What is wrong with the files, one line a fault; the tests named in them are looked up, not run."""
    found = [f"{row.id}: {fault}" for file in FILES for row in rows(file) for fault in _faults(row, document(file))]
    ids = [row.id for row in rows()]
    found += [f"{name}: the id is given twice" for name in sorted({name for name in ids if ids.count(name) > 1})]
    for file in FILES:
        for section, about in document(file)["sections"].items():
            count = sum(row.section == section for row in rows(file))
            if count != about["rows"]:
                found.append(f"section {section}: {count} rows, its header says {about['rows']}")
    return found


def _faults(row: Row, head: dict[str, Any]) -> Iterator[str]:
    if row.section not in head["sections"]:
        yield f"unknown section '{row.section}'"
    if row.status not in head["statuses"]:
        yield f"unknown status '{row.status}'"
    if not row.item:
        yield "no item"
    if row.status not in SHOWN and not row.why:
        yield f"says {row.status} without a why"
    if row.status in SHOWN and not (row.how and row.tests):
        yield f"is {row.status} without a how or without a test"
    if row.status in SHOWN and row.evidence not in head["evidence"]:
        yield f"unknown evidence '{row.evidence}'"
    if (row.evidence == "fake") != bool(row.of):
        yield "names the part that is faked, or has no fake"
    if row.status not in SHOWN and row.evidence:
        yield f"says {row.status} with evidence"
    yield from (f"there is no test {test}" for test in row.tests if not exists(test))


def exists(test: str) -> bool:
    """Whether the file of a test's id defines its function."""
    file, _, function = test.partition("::")
    return (REPOSITORY / file).is_file() and function in _functions(REPOSITORY / file)


@functools.cache
def _functions(path: Path) -> frozenset[str]:
    body = ast.parse(path.read_text()).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))
