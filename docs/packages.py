"""The drawing and the table of packages on the page "How it works", made from the imports of the code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import packages


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace ``<!-- packages drawing -->`` and ``<!-- packages table -->`` by the drawing and the table."""
    for marker, made in (("<!-- packages drawing -->", packages.drawing), ("<!-- packages table -->", table)):
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown


def table() -> str:
    """Return a row for each package, the highest first: its name, its subject, and the packages it imports from."""
    used = packages.package_imports()
    rows = [
        f"| `{name}` | {packages.PACKAGES[name]} | {', '.join(f'`{other}`' for other in used if other in used[name])} |"
        for name in reversed(used)
    ]
    return "\n".join(["| package | subject | imports from |", "|---|---|---|", *rows])
