"""Tables that rest on tests: of the training guide, from ``tests/guide_rows.yaml``; of Atropos, ``atropos_rows.yaml``;
of faults, ``faults.yaml``.

A page says ``<!-- guide rows -->``, ``<!-- atropos-rows -->`` or ``<!-- faults -->`` where they go.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.paths import home

TESTS = home() / "tests"
_MARKERS = {
    "<!-- guide rows -->": lambda: row_tables(TESTS / "guide_rows.yaml"),
    "<!-- atropos-rows -->": lambda: row_tables(TESTS / "atropos_rows.yaml"),
    "<!-- faults -->": lambda: fault_table(),
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in the place of their markers; called by mkdocs for every page."""
    for marker, table in _MARKERS.items():
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


def fault_table() -> str:
    """A row for each fault: how it ends, what is said and what to do; its tests are told where the pointer rests."""
    rows = []
    for row in yaml.safe_load((TESTS / "faults.yaml").read_text())["faults"]:
        within = f" within {_text(str(row.get('limit', '30 s')))}" if row["ends"] in ("ended", "recovered") else ""
        said = _text(row["said"]).replace("{}", "…")
        fault = f'<span title="{", ".join(row["tests"])}">{_text(row["fault"])}</span>'
        rows.append((fault, f"**{row['ends']}**{within}", said, _text(row["fix"])))
    return _table(("fault", "how it ends", "what is said", "what to do"), rows)


def row_tables(file: Path) -> str:
    """How many rows have each status and each kind of evidence, then a heading and a table a section."""
    document = yaml.safe_load(file.read_text())
    rows, meaning = document["rows"], document["statuses"]
    counts = [(f"**{status}**", sum(row["status"] == status for row in rows), meaning[status]) for status in meaning]
    kinds = document["evidence"]
    seen = [(f"**{kind}**", sum(row.get("evidence") == kind for row in rows), kinds[kind]) for kind in kinds]
    parts = [_table(("status", "rows", "meaning"), counts), _table(("evidence", "rows", "meaning"), seen)]
    for section, about in document["sections"].items():
        cells = [_cells(row, document["needs"]) for row in rows if row["section"] == section]
        parts += [f"## {about['title']}", _table(("item", "today", "evidence", "shown by"), cells)]
    return "\n\n".join(parts)


def _cells(row: dict[str, Any], needs: dict[str, str]) -> tuple[str, ...]:
    tests = row.get("tests", [])
    programs = {program for test in tests for start, program in needs.items() if test.startswith(start)}
    evidence = [row.get("evidence", ""), *([f"of {row['of']}"] if "of" in row else [])]
    evidence += [f"(where there is {program})" for program in sorted(programs)]
    today = f"**{row['status']}**: {_text(row.get('how') or row['why'])}"
    return _text(row["item"]), today, _text(" ".join(evidence)), "<br>".join(map(_sentence, tests))


def _sentence(test: str) -> str:
    """A test's name as words, with its id for the pointer that rests on it."""
    file, _, function = test.partition("::")
    place = file.removeprefix("tests/").removesuffix(".py").replace("test_", "")
    words = function.removeprefix("test_").replace("_", " ")
    return f'<span title="{test}">{place}: {words}</span>'


def _text(text: str) -> str:
    """Markdown of a cell; what stands between backticks is left as it is."""
    parts = re.split(r"(`[^`]*`)", text.replace("|", "\\|"))
    return "".join(part if part.startswith("`") else html.escape(part, quote=False) for part in parts)


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in [head, ("---",) * len(head), *rows])
