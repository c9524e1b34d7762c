"""The frame of a page: one file, nothing loaded, a policy that lets only its own style and script run."""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from grpo_recipes.report.markup import Html, element, together


def page(title: str, heading: Html, sections: Sequence[tuple[str, Html | None]]) -> str:
    """A whole page.

    Args:
        title: of the window.
        heading: the first screen.
        sections: name and content; those without content are left out.
    """
    present = [(name, content) for name, content in sections if content]
    links = element("nav", *[element("a", name, href=f"#{_anchor(name)}") for name, _ in present])
    body = [element("section", element("h2", name), content, id=_anchor(name)) for name, content in present]
    style, script = _asset("page.css"), _asset("page.js")
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", style),
    )
    footer = element("footer", element("p", f"Written by grpo-recipes on {now}."))
    main = element("main", heading, links, *body, footer)
    document = element("html", head, element("body", main, element("script", script)), lang="en")
    return f"<!doctype html>\n{document}\n"


def write_page(path: Path, text: str) -> None:
    """Write so that a reader sees the old page or the new one.

    Raises:
        OSError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def stacked(*parts: Html | None) -> Html | None:
    """Parts one under the other; None when there are none."""
    present = [part for part in parts if part]
    return together(present) if present else None


def chart_grid(charts: Sequence[Html | None], *, wide: bool = False) -> Html | None:
    """Charts beside one another, three in a row, or two wide ones."""
    present = [chart for chart in charts if chart]
    return element("div", *present, class_="grid-charts wide" if wide else "grid-charts") if present else None


def _asset(name: str) -> Html:
    """A file of ours, which needs no escape."""
    return Html((Path(__file__).parent / name).read_text(encoding="utf-8"))


def _policy(style: str, script: str) -> str:
    rules = ("default-src 'none'", f"style-src '{_hash(style)}'", f"script-src '{_hash(script)}'", "base-uri 'none'")
    return "; ".join((*rules, "form-action 'none'"))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")
