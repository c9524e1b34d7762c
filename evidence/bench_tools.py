"""The tools of ``bench/`` that the study uses: origins of records, figures, and tables in pages."""

from __future__ import annotations

import sys
from pathlib import Path

from grpo_recipes.paths import find_code_root

sys.path.append(str(Path(__file__).resolve().parents[1] / "bench"))

from figure import Line, Panel, write_figure
from made_by import append_record, begin, write_record
from pages import DOCS, filled_pages, markdown_table, write_changed

__all__ = [
    "DOCS", "RESULTS", "Line", "Panel", "append_record", "begin", "filled_pages", "markdown_table", "write_changed",
    "write_figure", "write_record",
]  # fmt: skip

RESULTS = find_code_root() / "evidence/results"
