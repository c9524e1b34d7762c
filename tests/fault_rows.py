"""``faults.yaml``: what can go wrong around a run, how it ends, and the tests that inject it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from guide_rows import REPOSITORY, exists

FILE = Path(__file__).with_name("faults.yaml")
ROTATING = "pytest.mark.rotating"
ENDS = ("refused", "ended", "recovered", "kept")


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        fault: what happens.
        ends: one of ``ENDS``.
        said: words of ours that the user sees, ``{}`` for what varies.
        fix: what to do.
        tests: ids of the tests that inject it, ``file::function``.
        limit: what bounds the time until it has ended, when not 30 seconds.
    """

    fault: str
    ends: str
    said: str
    fix: str
    tests: tuple[str, ...]
    limit: str = "30 s"


@functools.cache
def rows() -> tuple[Fault, ...]:
    """Every row."""
    entries = yaml.safe_load(FILE.read_text())["faults"]
    return tuple(Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries)


def faults() -> list[str]:
    """What is wrong with the file, one line each; the tests named in it are looked up, not run."""
    return [f"{row.fault}: {fault}" for row in rows() for fault in _faults(row)]


def _faults(row: Fault) -> Iterator[str]:
    if row.ends not in ENDS:
        yield f"unknown end '{row.ends}'"
    if not row.tests:
        yield "has no test"
    yield from (f"there is no test {test}" for test in row.tests if not exists(test))
    missing = [part for part in row.said.split("{}") if part.strip() and part not in _source()]
    yield from (f"nothing in the source says '{part}'" for part in missing)


def is_rotating(test: str) -> bool:
    """Whether a test runs on some days only (``rotation.py``): it has the mark, or its whole file has."""
    file, _, function = test.partition("::")
    return function in _rotating(REPOSITORY / file)


@functools.cache
def _rotating(path: Path) -> frozenset[str]:
    body = ast.parse(path.read_text()).body
    whole = any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark" and ROTATING in ast.unparse(node)
        for node in body
    )
    return frozenset(
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and (whole or ROTATING in map(ast.unparse, node.decorator_list))
    )


@functools.cache
def _source() -> str:
    """All of ``src`` with literals joined that stand on lines of their own."""
    text = "\n".join(path.read_text() for path in sorted((REPOSITORY / "src").rglob("*.py")))
    return re.sub(r'["\']\s*\n\s*f?["\']', "", re.sub(r"\{[^{}\n]*\}", "{}", text))
