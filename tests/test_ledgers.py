"""The ledgers: well-formed, their tests exist, and `make coverage` fails if a row's test did not pass."""

from __future__ import annotations

import sys
from pathlib import Path

import ledgers
import pytest
from ledgers import ROW_FILES, TESTS, Fault, Row, exists, needs, parse_row, read_faults, read_rows
from ran_tests import passed_tests, pytest_runtest_logreport

sys.path.insert(0, str(ledgers.REPOSITORY / "scripts"))
from documentation import ledger_tables

GUIDE = TESTS / "guide_rows.yaml"
TEST = "tests/plan/test_plan.py::test_vllm_tp_size_moves_the_devices"
SLOW = "tests/e2e/test_distributed.py::test_two_processes_train_through_the_server"
SECTION = "Recipe keys"
PLAIN = Row("a-row", SECTION, "kept", "real", (TEST,))


def test_the_ledgers_are_well_formed_and_their_tests_exist() -> None:
    assert ledgers.problems() == []
    assert all(any(path.is_file() for path in ledgers.REPOSITORY.glob(f"{start}*")) for start in needs())


def test_a_test_exists_if_its_file_defines_its_function() -> None:
    assert exists(TEST)
    assert not exists("tests/plan/test_plan.py::test_none") and not exists("tests/none.py::test_x")
    assert not exists("tests/plan/test_plan.py::find_accelerate_file")


@pytest.mark.parametrize(
    ("name", "text", "row"),
    [
        ("a-row", f"kept real {TEST}", PLAIN),
        ("key-a,b", "refused text t::x t::y | write c: d", (("t::x", "t::y"), ("a", "b"), (), "write c: d")),
        ("variable-A", "kept fake:hub t::x keys=a,b variables=B", (("t::x",), ("a", "b"), ("A", "B"), "")),
        ("flag-a", "later | not yet", ((), ("a",), (), "not yet")),
    ],
)
def test_a_row_is_a_line(name: str, text: str, row: Row | tuple) -> None:
    parsed = parse_row(SECTION, name, text)
    assert parsed == row or (parsed.tests, parsed.keys, parsed.variables, parsed.note) == row
    assert parsed.id == name and text.startswith(f"{parsed.status} {parsed.evidence}".strip())


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("x", f"perhaps real {TEST}", "unknown status 'perhaps'"),
        ("x", f"declined real {TEST} | why", "unknown status 'declined'"),
        ("x", "kept real", "is kept without a test"),
        ("x", f"refused real {TEST}", "is refused without a note"),
        ("x", "later", "is later without a note"),
        ("x", "later real | why", "is later with evidence"),
        ("x", f"kept {TEST}", "unknown evidence ''"),
        ("x", f"kept hearsay {TEST}", "unknown evidence 'hearsay'"),
        ("x", f"kept fake {TEST}", "must name the faked part"),
        ("x", f"kept real:sbatch {TEST}", "must name the faked part"),
        ("x", f"kept real {TEST}_", f"no test {TEST}_"),
    ],
)
def test_a_wrong_row_is_reported(name: str, text: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(line.startswith(f"{name}: {problem}") for line in problems_with(name, text, GUIDE, monkeypatch))


def problems_with(name: str, text: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the problems of a ledger with another row."""
    row = parse_row(SECTION, name, text)
    monkeypatch.setattr(ledgers, "read_rows", lambda *files: (*read_rows(*files), *((row,) if file in files else ())))
    return ledgers.problems()


def test_a_row_too_many_or_too_few_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(read_rows(GUIDE))
    (problem,) = problems_with("a-row", f"kept real {TEST}", GUIDE, monkeypatch)
    assert problem == f"guide_rows.yaml: {count + 1} rows, its count is {count}"


def test_another_trainer_may_be_declined_and_needs_a_test_that_shows_the_behavior(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (file,) = (path for path in ROW_FILES if path.name == "atropos_rows.yaml")
    for kind in ("argv", "text"):
        assert f"x: unknown evidence '{kind}'" in problems_with("x", f"kept {kind} {TEST}", file, monkeypatch)
    for text, is_wrong in ((f"kept real {TEST}", False), ("declined | harms others", False), ("declined", True)):
        lines = problems_with("x", text, file, monkeypatch)
        assert any(line.startswith("x: ") for line in lines) == is_wrong


def test_there_are_enough_faults_and_none_twice() -> None:
    names = [row.fault for row in read_faults()]
    assert len(names) == len(set(names)) >= 25


def test_a_wrong_fault_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Fault("x", "vanished", "words that nobody says {}", "", ("tests/test_no.py::test_no_such",))
    monkeypatch.setattr(ledgers, "read_faults", lambda: (row, Fault("y", "ended", "grpo", "", ())))
    assert ledgers.problems() == [
        "x: unknown end 'vanished'",
        "x: no test tests/test_no.py::test_no_such",
        "x: nothing in the source says 'words that nobody says '",
        "y: has no test",
    ]


# --- make coverage ---------------------------------------------------------------------------------------------------


def report(test: str, outcome: str, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_results_are_recorded_without_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cache" / "ran"  # the folder does not exist before the first `make test` or `make e2e`
    monkeypatch.setenv("GRPO_RAN_TESTS", str(file))
    pytest_runtest_logreport(report("t.py::right[1-a]", "passed"))
    pytest_runtest_logreport(report("t.py::right[1-a]", "passed", "teardown"))
    pytest_runtest_logreport(report("t.py::right[2]", "skipped", "setup"))
    pytest_runtest_logreport(report("t.py::half[1]", "passed"))
    pytest_runtest_logreport(report("t.py::half[2]", "failed", "setup"))
    lines = ["passed t.py::right", "skipped t.py::right", "passed t.py::half", "failed t.py::half"]
    assert file.read_text().splitlines() == lines
    assert passed_tests(file) == {"t.py::right"}
    monkeypatch.delenv("GRPO_RAN_TESTS")
    pytest_runtest_logreport(report("t.py::later", "passed"))
    assert file.read_text().splitlines() == lines


def test_a_row_whose_test_did_not_pass_is_wrong() -> None:
    assert ledgers.judge_rows((PLAIN,), {TEST}, lambda _: True) == ([], {})
    wrong, excused = ledgers.judge_rows((PLAIN,), set(), lambda _: False)
    assert (len(wrong), excused) == (1, {}) and "a-row" in wrong[0] and TEST in wrong[0]


def test_a_test_is_excused_only_if_its_program_is_missing() -> None:
    (start, program), *_ = needs().items()
    test = next(test for row in read_rows() for test in row.tests if test.startswith(start))
    row = Row("a-row", SECTION, "kept", "real", (test,))
    assert ledgers.judge_rows((row,), set(), lambda _: False) == ([], {test: program})
    assert len(ledgers.judge_rows((row,), set(), lambda name: name == program)[0]) == 1


def test_a_test_that_was_left_out_counts_unless_it_failed_with_other_parameters(tmp_path: Path) -> None:
    file = tmp_path / "ran"
    for record, tests in (
        ("started 1\n", set()),
        (f"left_out {SLOW}\n", {SLOW}),
        (f"passed {TEST}\nleft_out {SLOW}\nfailed {SLOW}\n", {TEST}),
        (f"skipped {SLOW}\n", set()),
    ):
        file.write_text(record)
        assert ledgers.counted([TEST, SLOW], file) == tests


def test_a_fault_needs_a_test_that_counts_and_none_that_failed(tmp_path: Path) -> None:
    file = tmp_path / "ran"

    def wrong(record: str, *tests: str) -> list[str]:
        file.write_text(record)
        return ledgers.judge_faults((Fault("x", "ended", "", "", tests),), file)

    assert not wrong(f"passed {TEST}\n", TEST) and not wrong(f"left_out {SLOW}\n", SLOW)
    assert wrong("", TEST) and wrong("", SLOW) and wrong(f"failed {SLOW}\n", SLOW) and wrong(f"skipped {TEST}\n", TEST)


@pytest.mark.parametrize(("missing", "code"), [(None, 0), (TEST, 1)])
def test_coverage_fails_if_a_test_did_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str | None, code: int
) -> None:
    file = tmp_path / "ran"
    passed = [f"passed {test}\n" for row in (*read_rows(), *read_faults()) for test in row.tests if test != missing]
    file.write_text("".join(passed))
    monkeypatch.setenv("GRPO_RAN_TESTS", str(file))
    assert ledgers.main() == code
    assert (TEST in capsys.readouterr().err) == bool(code)
    monkeypatch.setenv("GRPO_RAN_TESTS", str(tmp_path / "none"))
    assert ledgers.main() == 2


def test_the_page_shows_status_evidence_and_needs_of_each_row() -> None:
    for file in ROW_FILES:
        lines = ledger_tables.row_tables(file).splitlines()
        for kind in ledgers.document(file)["evidence"]:
            count = sum(row.evidence.partition(":")[0] == kind for row in read_rows(file))
            assert any(line.startswith(f"| **{kind}** | {count} |") for line in lines)
    cells = [line.split(" | ") for line in ledger_tables.row_tables(GUIDE).splitlines() if line.count(" | ") == 3]
    shown = {item.removeprefix("| "): (today, evidence) for item, today, evidence, _ in cells}
    assert shown["header exclusive node"] == ("**modern**", "real (needs slurmctld)")
    assert shown["variable `CONDA_SH`"][1] == "fake of conda" and shown["cache `HF_HOME`"][1] == "argv"
    assert shown["key `torch_dtype`"][0] == "**refused**: write dtype"
