"""README.md and docs/*.md as the tests of the documentation read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```(\S*)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, its language, its lines, and the file in its title."""

    page: str
    language: str
    lines: tuple[str, ...]
    file: str | None = None


def blocks(language: str | None = None) -> list[Block]:
    """Return the fenced blocks of all pages, in a language or in all."""
    blocks = [
        Block(page.name, match[1], tuple(match[3].splitlines()), match[2])
        for page in PAGES
        for match in _FENCE.finditer(page.read_text())
    ]
    return [block for block in blocks if language is None or block.language == language]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def table_rows(page: Path, first: str) -> list[list[str]]:
    """The rows of every table of a page whose first column is called ``first``."""
    rows: list[list[str]] = []
    inside = False
    for line in prose(page).splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == first:
            inside = True
        elif inside and not set(line) <= set("|- "):
            rows.append(cells)
    return rows


def code_words(text: str) -> list[str]:
    """Return the texts between single backticks."""
    return re.findall(r"`([^`\n]+)`", text)
