"""Tables generated from the ledgers in ``tests/``: the ``*_rows.yaml`` files and ``faults.yaml``.

A page contains ``<!-- rows of FILE -->`` or ``<!-- faults -->`` in the places of the tables.
"""

from __future__ import annotations

import html
import re
import sys
from pathlib import Path
from typing import Any

from grpo_recipes.paths import find_code_root

sys.path.insert(0, str(find_code_root() / "tests"))
import ledgers
from ledgers import Row

_MARKER = re.compile(r"^<!-- rows of (?P<file>\S+) -->$", re.MULTILINE)
_FAULTS = "<!-- faults -->"
# Beginning of a row's id -> the form of the names that follow it.
_NAMES = {"key": "`{}`", "flag": "`--{}`", "option": "`--{}`", "variable": "`{}`", "make": "`{}`"}
_CODE = re.compile(r"[_/=%*]|[a-z]\.[a-z]|^[A-Z]{5,}$")


def fill(markdown: str) -> str:
    """Return a page with tables instead of their markers."""
    markdown = _MARKER.sub(lambda match: row_tables(find_code_root() / match["file"]), markdown)
    return markdown.replace(_FAULTS, fault_table()) if _FAULTS in markdown else markdown


def fault_table() -> str:
    """Return a table with a line per fault: the end of the run, the message and the fix. A tooltip has the tests."""
    lines = []
    for row in ledgers.read_faults():
        within = f" within {_text(row.limit)}" if row.ends in ("ended", "recovered") else ""
        fault = f'<span title="{", ".join(row.tests)}">{_text(row.fault)}</span>'
        lines.append((fault, f"**{row.ends}**{within}", _text(row.said).replace("{}", "…"), _text(row.fix)))
    return _table(("fault", "how it ends", "message", "what to do"), lines)


def row_tables(file: Path) -> str:
    """Return the number of rows of each status and each kind of evidence, then a heading and a table per section."""
    head, rows = ledgers.document(file), ledgers.read_rows(file)
    parts = [
        _counts("status", [row.status for row in rows], head["statuses"]),
        _counts("evidence", [row.evidence.partition(":")[0] for row in rows], head["evidence"]),
    ]
    for section in head["sections"]:
        cells = [_cells(row) for row in rows if row.section == section]
        parts += [f"## {section}", _table(("item", "today", "evidence", "tests"), cells)]
    return "\n\n".join(parts)


def _counts(title: str, names: list[str], meanings: dict[str, str]) -> str:
    lines = [(f"**{name}**", names.count(name), meaning) for name, meaning in meanings.items()]
    return _table((title, "rows", "meaning"), lines)


def _cells(row: Row) -> tuple[str, ...]:
    programs = {program for test in row.tests for start, program in ledgers.needs().items() if test.startswith(start)}
    kind, _, part = row.evidence.partition(":")
    evidence = [kind, *([f"of {part}"] if part else []), *(f"(needs {program})" for program in sorted(programs))]
    today = f"**{row.status}**" + (f": {_text(row.note)}" if row.note else "")
    return _text(in_words(row.id)), today, _text(" ".join(evidence)), "<br>".join(map(_sentence, row.tests))


def in_words(name: str) -> str:
    """Return a row's id as words: names of keys, flags, variables and files become code."""
    subject, _, names = name.partition("-")
    if subject in _NAMES:
        return f"{subject} {', '.join(map(_NAMES[subject].format, names.split(',')))}"
    return " ".join(f"`{word}`" if _CODE.search(word) else word for word in name.split("-"))


def _sentence(test: str) -> str:
    """Return a test's name as words, with its id as a tooltip."""
    file, _, function = test.partition("::")
    place = file.removeprefix("tests/").removesuffix(".py").replace("test_", "")
    words = function.removeprefix("test_").replace("_", " ")
    return f'<span title="{test}">{place}: {words}</span>'


def _text(text: str) -> str:
    """Return the Markdown of a cell; code between backticks stays as it is."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|"))
    return "".join(part if part.startswith("`") else html.escape(part, quote=False) for part in parts)


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in [head, ("---",) * len(head), *rows])
