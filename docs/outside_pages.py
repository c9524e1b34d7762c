"""Pages of the site that are files outside docs/: the protocol of the MaxEnt study, its evidence, and the changelog."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from grpo_recipes.paths import home

SOURCES = {  # page -> file
    "maxent-protocol.md": "evidence/protocol.md",
    "maxent-evidence.md": "evidence/README.md",
    "changelog.md": "CHANGELOG.md",
}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages; mkdocs calls this once."""
    for page, source in SOURCES.items():
        files.append(File.generated(config, page, abs_src_path=str(home() / source)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links between docs/ and these files by links between pages."""
    for page, source in SOURCES.items():
        markdown = markdown.replace(f"](../{source}", f"]({page}")
        if source.startswith("evidence/"):  # links between the files of evidence/
            markdown = markdown.replace(f"]({source.removeprefix('evidence/')}", f"]({page}")
    return markdown.replace("](../docs/", "](").replace("](docs/", "](")
