"""The pages of the site as plain Markdown in build/docs, which any site generator can read.

Sources are docs/*.md, the changelog and two files of evidence/. Markers for tables and drawings are replaced by what
``tables``, ``ledger_tables`` and ``packages`` make from the code. mkdocs builds the site from build/docs and calls the
two hooks of this module, so `mkdocs serve` shows a changed source too. build/docs must exist. To write only the pages:

    python scripts/documentation/pages.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import packages

from documentation import ledger_tables, tables

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = REPOSITORY / "docs"
PAGES = REPOSITORY / "build/docs"
# Pages that are files outside docs/: page -> file.
OUTSIDE = {
    "maxent-protocol.md": "evidence/protocol.md",
    "maxent-evidence.md": "evidence/README.md",
    "changelog.md": "CHANGELOG.md",
}
# Weight of a page in the search, if it is not 1: guides that answer questions come before long special pages.
SEARCH_BOOST = {
    "troubleshooting.md": 2.3, "slurm.md": 2.5, "installation.md": 1.2, "evaluation.md": 1.5, "performance.md": 1.5,
    "weights.md": 1.5, "reports.md": 2, "rewards.md": 1.5, "datasets.md": 1.5,
    "configuration.md": 0.5, "reference.md": 0.5, "environments.md": 0.7, "atropos.md": 0.4, "migrate.md": 0.5,
    "changelog.md": 0.2, "maxent-evidence.md": 0.2, "maxent-protocol.md": 0.2, "measurements.md": 0.3,
}  # fmt: skip


def on_pre_build(config: Any) -> None:
    """Write the pages; mkdocs calls this before each build."""
    write_pages()


def on_post_build(config: Any) -> None:
    """Write llms.txt and a copy of each page into the built site; mkdocs calls this after each build."""
    site = Path(config.site_dir)
    lines = [f"- [{read_title(PAGES / name)}]({name})" for name in _names_in(config.nav)]
    (site / "llms.txt").write_text(
        "\n".join([f"# {config.site_name}", "", f"> {config.site_description}", "", *lines, ""])
    )
    for page in PAGES.glob("*.md"):
        (site / page.name).write_text(remove_front_matter(page.read_text()))


def write_pages() -> None:
    """Write every page and asset to build/docs, and remove the files of earlier versions.

    Files that are already right keep their time of change, because `mkdocs serve` watches them.
    """
    contents = {name: make_page(name).encode() for name in page_names()}
    assets = [path for path in SOURCES.rglob("*") if path.is_file() and path.suffix not in (".md", ".pyc")]
    contents |= {str(path.relative_to(SOURCES)): path.read_bytes() for path in assets}
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in PAGES.rglob("*"):
        if path.is_file() and str(path.relative_to(PAGES)) not in contents:
            path.unlink()
    for name, content in contents.items():
        path = PAGES / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def page_names() -> list[str]:
    """Return the file names of all pages, for example ``rewards.md``."""
    return sorted([*(path.name for path in SOURCES.glob("*.md")), *OUTSIDE])


def make_page(name: str) -> str:
    """Return a page with its tables, drawings and weight in the search."""
    text = (REPOSITORY / OUTSIDE[name] if name in OUTSIDE else SOURCES / name).read_text()
    for fill in (tables.fill, ledger_tables.fill, packages.fill):
        text = fill(text)
    text = link_pages(text)
    if name in SEARCH_BOOST:
        assert not text.startswith("---"), f"{name}: a page with front matter sets its own boost"
        text = f"---\nsearch:\n  boost: {SEARCH_BOOST[name]}\n---\n\n{text}"
    return text


def link_pages(markdown: str) -> str:
    """Replace links between docs/ and files outside of it by links between pages."""
    for page, source in OUTSIDE.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
        if source.startswith("evidence/"):  # links between the files of evidence/
            markdown = markdown.replace(f"]({source.removeprefix('evidence/')}", f"]({page}")
    return markdown.replace("](../docs/", "](").replace("](docs/", "](")


def remove_front_matter(markdown: str) -> str:
    """Return a page without its settings for the site generator."""
    return markdown.split("---\n", 2)[2].lstrip() if markdown.startswith("---\n") else markdown


def read_title(page: Path) -> str:
    """Return the title of a page: the text of its first heading."""
    return next(line for line in page.read_text().splitlines() if line.startswith("# ")).removeprefix("# ")


def _names_in(nav: Any) -> list[str]:
    """Return the file names in a navigation, in its order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [name for entry in entries for name in _names_in(entry)]


if __name__ == "__main__":
    write_pages()
