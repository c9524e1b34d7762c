"""The drawing and the table of rooms on the page "How it works", made from the imports by ``scripts/rooms.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import rooms


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the drawing and the table in the place of ``<!-- rooms drawing -->`` and ``<!-- rooms table -->``."""
    for marker, made in (("<!-- rooms drawing -->", rooms.drawing), ("<!-- rooms table -->", table)):
        if marker in markdown:
            markdown = markdown.replace(marker, made())
    return markdown


def table() -> str:
    """Return a row for each room, the highest first: its name, what it holds, and the rooms it imports from."""
    used = rooms.room_imports()
    rows = [
        f"| `{name}` | {rooms.ROOMS[name]} | {', '.join(f'`{other}`' for other in used if other in used[name])} |"
        for name in reversed(used)
    ]
    return "\n".join(["| room | holds | imports from |", "|---|---|---|", *rows])
