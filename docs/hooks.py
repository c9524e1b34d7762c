"""Tables of the site that are made from the code, so that they cannot go stale.

A page says ``<!-- keys CLASS -->`` for the keys that ``configs.py`` defines in that class, and
``<!-- refused keys -->`` for the keys that are refused with a replacement. torch and TRL are not imported.
"""

from __future__ import annotations

import ast
import html
import json
import re
from typing import Any

from grpo_recipes import keys

_MARKER = re.compile(r"^<!-- (keys (?P<owner>\w+)|refused keys) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables in the place of their markers; called by mkdocs for every page."""

    def table(match: re.Match[str]) -> str:
        return keys_table(match["owner"]) if match["owner"] else refused_table()

    return _MARKER.sub(table, markdown)


def own_keys() -> dict[str, list[str]]:
    """The fields that each class of ``configs.py`` defines itself, those of TRL redefined there included."""
    tree = ast.parse(keys.CATALOGUE_FILE.with_name("configs.py").read_text())
    return {
        node.name: [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]  # type: ignore[union-attr]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def keys_table(owner: str) -> str:
    """A row a key: name, type with limits, default, help."""
    rows = [(name, keys.catalogue()[name]) for name in own_keys()[owner]]
    return _table(
        ("key", "type", "default", "meaning"),
        [(f"`{name}`", _type(entry), f"`{_default(entry)}`", _text(entry["help"])) for name, entry in rows],
    )


def refused_table() -> str:
    """A row for each key that is refused with what to do instead."""
    refused = sorted({**keys.OBSOLETE_KEYS, **keys.OWNED_KEYS}.items())
    return _table(("key", "do this instead"), [(f"`{name}`", _text(instead)) for name, instead in refused])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _type(entry: dict[str, Any]) -> str:
    if entry.get("choices"):
        return ", ".join(f"`{choice}`" for choice in entry["choices"])
    low, high = entry.get("min"), entry.get("max")
    if low is None and high is None:
        return str(entry["type"])
    if high is None:
        return f"{entry['type']} ≥ {low:g}"
    return f"{entry['type']}, {low:g}" if low == high else f"{entry['type']}, {low:g} to {high:g}"


def _default(entry: dict[str, Any]) -> str:
    return json.dumps(entry["default"]).strip('"')


def _text(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")
