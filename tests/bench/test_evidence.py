"""bench/evidence.py: tables and figures of the docs are those of the records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType

import pytest

from bench.scripts import HOME, script


@pytest.fixture(scope="module")
def evidence() -> Iterator[ModuleType]:
    with script("evidence") as module:
        yield module


def test_pages_and_figures_are_those_of_the_records(evidence: ModuleType) -> None:
    made = evidence.made()
    pages = {"environments.md", "gpu.md", "maxent.md", "overlap.md", "performance.md", "planning.md", "weights.md"}
    own = {f"{name}.svg" for name, _, _ in evidence.multi_answer_report.figures()}
    assert {path.name for path in made} == pages | own | {
        "maxent_tabular.svg",
        "overlap.svg",
        "speed.svg",
        "tabular_length.svg",
    }
    old = [path.name for path, text in made.items() if path.read_text() != text]
    assert not old, "make evidence writes these anew"


@pytest.mark.slow
@pytest.mark.rotating
def test_a_table_that_someone_changed_is_written_again(evidence: ModuleType) -> None:
    told = list[str]()
    for page in sorted((HOME / "docs").glob("*.md")):
        text = page.read_text()
        for _, name, _ in evidence._MARKED.findall(text):
            told.append(name)
            table = evidence.TABLES[name]()
            if " runs are recorded so far" in table:
                continue
            row = table.splitlines()[-1]
            assert len(table.splitlines()) > 5 and re.search(r"\d", row)
            assert evidence.filled(text.replace(row, re.sub(r"\d", "7", row) + " 1 |")) == text
    assert sorted(told) == sorted(evidence.TABLES)


def test_the_command_names_what_it_wrote(
    evidence: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys
) -> None:
    monkeypatch.setattr(evidence, "home", lambda: tmp_path)
    monkeypatch.setattr(evidence, "made", lambda: {tmp_path / "same.md": "1", tmp_path / "new.md": "2"})
    (tmp_path / "same.md").write_text("1")
    evidence.main()
    assert capsys.readouterr().out == "new.md is new\n" and (tmp_path / "new.md").read_text() == "2"
