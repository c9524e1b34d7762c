"""bench/tables.py: tables and figures of the docs have the numbers of the records."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from bench.scripts import restored_tables, script


@pytest.fixture(scope="module")
def tables() -> Iterator[ModuleType]:
    with script("tables") as module:
        yield module


def test_pages_and_figures_have_the_numbers_of_the_records(tables: ModuleType) -> None:
    written = tables.pages_and_figures()
    pages = {"environments.md", "measurements.md", "performance.md", "rewards.md", "weights.md"}
    assert {path.name for path in written} == pages | {"overlap.svg", "speed.svg", "time_to_reward.svg"}
    assert [path.name for path, text in written.items() if path.read_text() != text] == [], "run make evidence"


@pytest.mark.slow
def test_an_edited_table_is_written_again(tables: ModuleType) -> None:
    assert restored_tables(tables) == sorted(tables.TABLES)


def test_the_command_prints_the_names_of_new_files(
    tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr("pages.find_code_root", lambda: tmp_path)
    monkeypatch.setattr(tables, "pages_and_figures", lambda: {tmp_path / "same.md": "1", tmp_path / "new.md": "2"})
    (tmp_path / "same.md").write_text("1")
    tables.main()
    assert capsys.readouterr().out == "new.md is new\n" and (tmp_path / "new.md").read_text() == "2"
