"""The protocol of the MaxEnt study, which is in ``evidence/``, as the page maxent-protocol.md of the site."""

from __future__ import annotations

from typing import Any

from mkdocs.structure.files import File, Files

from grpo_recipes.paths import home

PAGE = "maxent-protocol.md"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the page; called by mkdocs once."""
    files.append(File.generated(config, PAGE, abs_src_path=str(home() / "evidence/protocol.md")))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links between the two folders by links between pages."""
    return markdown.replace("](../evidence/protocol.md", f"]({PAGE}").replace("](../docs/", "](")
