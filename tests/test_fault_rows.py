"""The table of faults: well-formed, in our own words, and each injected by a test."""

from __future__ import annotations

import fault_rows


def test_every_fault_is_injected_by_a_test_and_told_in_our_words() -> None:
    assert fault_rows.faults() == []


def test_there_are_enough_of_them_and_none_twice() -> None:
    names = [row.fault for row in fault_rows.rows()]
    assert len(names) == len(set(names)) >= 25


def test_what_is_not_true_is_told(monkeypatch) -> None:
    row = fault_rows.Fault("x", "vanished", "words that nobody says {}", "", ("tests/test_no.py::test_no_such",))
    monkeypatch.setattr(fault_rows, "rows", lambda: (row, fault_rows.Fault("y", "ended", "grpo", "", ())))
    assert fault_rows.faults() == [
        "x: unknown end 'vanished'",
        "x: there is no test tests/test_no.py::test_no_such",
        "x: nothing in the source says 'words that nobody says '",
        "y: has no test",
    ]
