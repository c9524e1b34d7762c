"""evidence/maxent_tables.py: tables and figures of evidence/README.md have the numbers of the study's records."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from bench.scripts import restored_tables, script


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    with script("maxent_tables", folder="evidence") as module:
        yield module


def test_the_page_and_its_figures_have_the_numbers_of_the_records(tables: ModuleType) -> None:
    written = tables.pages_and_figures()
    figures = {f"{name}.svg" for name, _, _ in tables.multi_answer_report.figures()}
    assert {path.name for path in written} == {"README.md", "maxent_tabular.svg", "tabular_length.svg"} | figures
    assert [path.name for path, text in written.items() if path.read_text() != text] == [], "run make evidence"


@pytest.mark.slow
def test_an_edited_table_is_written_again(tables: ModuleType) -> None:
    assert restored_tables(tables) == sorted(tables.TABLES)
