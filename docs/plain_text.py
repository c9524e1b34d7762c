"""The site for language models: each page as Markdown next to its HTML, and llms.txt with a line for each page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_ORDER: list[str] = []  # names of the pages in the order of the navigation
_PAGES: dict[str, tuple[str, str]] = {}  # name of a page -> its title and its Markdown, with the generated tables


def on_nav(nav: Any, **_: Any) -> Any:
    """Remember the order of the pages; mkdocs calls this once."""
    _ORDER[:] = [page.file.src_uri for page in nav.pages]
    return nav


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Remember a page's title and Markdown; mkdocs calls this for every page after the other hooks have filled it."""
    _PAGES[page.file.src_uri] = page.title, page.markdown
    return html


def on_post_build(config: Any, **_: Any) -> None:
    """Write the Markdown files and llms.txt into the built site."""
    site = Path(config.site_dir)
    for name, (_, markdown) in _PAGES.items():
        (site / name).write_text(markdown)
    links = [f"- [{_PAGES[name][0]}]({name})" for name in _ORDER]
    (site / "llms.txt").write_text(
        "\n".join([f"# {config.site_name}", "", f"> {config.site_description}", "", *links, ""])
    )
