"""The findings: well-formed, each line answered by a test that ran or by words of the docs."""

from __future__ import annotations

from pathlib import Path

import check_guide_rows
import findings
import pytest
from findings import Finding, faults, unanswered

TEST = "tests/plan/test_plan.py::test_vllm_tp_size_moves_the_devices"
PAGE, SAYS = "CONTRIBUTING.md", "A commit does one thing and passes the quick tests"


def test_the_entries_are_well_formed_and_their_tests_and_answers_exist() -> None:
    assert faults(findings.rows()) == []
    assert unanswered(findings.rows()) == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Finding("F1", "x", "y", (TEST,)), "is no line"),
        (Finding("A10", "x", "y", (TEST,)), "is no line"),
        (Finding("A1ab", "x", "y", (TEST,)), "is no line"),
        (Finding("A1", "", "y", (TEST,)), "has no finding"),
        (Finding("A1", "x", "", (TEST,)), "says nothing of today"),
        (Finding("A1", "x", "y"), "needs tests, or an answer"),
        (Finding("A1", "x", "y", (TEST,), PAGE, SAYS), "needs tests, or an answer"),
        (Finding("A1", "x", "y", (f"{TEST}_",)), "there is no test"),
        (Finding("A1", "x", "y", (), "docs/none.md", SAYS), "there is no page"),
        (Finding("A1", "x", "y", (), PAGE, "words that are nowhere"), "does not say"),
        (Finding("A1", "x", "y", (), PAGE, "commit"), "does not say"),
    ],
)
def test_what_is_wrong_with_an_entry_is_told(entry: Finding, said: str) -> None:
    assert any(fault.startswith(f"{entry.id}: ") and said in fault for fault in faults((entry,)))


def test_a_right_entry_has_no_fault_and_an_id_stands_once() -> None:
    entries = (Finding("D0", "x", "y", (TEST,)), Finding("D0b", "x", "y", (), PAGE, SAYS))
    assert faults(entries) == []
    assert faults((*entries, entries[0])) == ["D0: the id is given twice"]


def test_a_line_without_an_entry_is_told() -> None:
    every = tuple(Finding(line, "x", "y") for line in findings._lines())
    assert (len(every), unanswered(every)) == (53, [])
    assert unanswered(every[1:]) == ["A1"] and unanswered((Finding("A1b", "x", "y"), *every[1:])) == []


def test_an_entry_whose_test_did_not_pass_is_a_fault(tmp_path: Path) -> None:
    file = tmp_path / "findings.yaml"
    file.write_text(f"- {{id: A1a, finding: x, now: y, tests: ['{TEST}']}}\n")
    (wrong,), _ = check_guide_rows.judge(findings.read(file), set(), lambda _: True)
    assert "A1a is answered by" in wrong and TEST in wrong
    assert check_guide_rows.judge(findings.read(file), {TEST}, lambda _: True) == ([], {})
