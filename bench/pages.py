"""Pages and figures that scripts write from records.

A table is between two markers of its page, ``<!-- made by SCRIPT: NAME -->`` and ``<!-- end -->``. A script passes a
function for each NAME. Other tables of the page do not change.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from grpo_recipes.paths import find_code_root

DOCS = find_code_root() / "docs"
READMES = (find_code_root() / "bench/README.md", find_code_root() / "evidence/README.md")
Tables = Mapping[str, Callable[[], str]]


def marked(script: str) -> re.Pattern[str]:
    """Return a pattern for the tables of a script: first marker, name of the table, end marker."""
    return re.compile(rf"(<!-- made by {re.escape(script)}: (.+?) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)


def filled(text: str, script: str, tables: Tables) -> str:
    """Return the text of a page with new tables between the markers of a script."""
    return marked(script).sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", text)


def filled_pages(script: str, tables: Tables) -> dict[Path, str]:
    """Return every page that has tables of a script, with new tables."""
    pages = {path: path.read_text() for path in (*sorted(DOCS.glob("*.md")), *READMES)}
    return {path: filled(text, script, tables) for path, text in pages.items() if marked(script).search(text)}


def write_changed(files: Mapping[Path, str]) -> None:
    """Write the changed files, and print their names."""
    for path, text in files.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"{path.relative_to(find_code_root())} is new")


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table of a page."""
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)])
