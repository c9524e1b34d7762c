"""The rows on the training guide and on Atropos: well-formed, true of keys and variables, shown by tests that ran."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import check_guide_rows
import fault_rows
import findings
import guide_rows
import pytest
from guide_rows import ATROPOS, FILES, GUIDE, REPOSITORY, SHOWN, Row, exists, needs, rows
from ran_tests import passed_tests, pytest_runtest_logreport

from grpo_recipes.recipe import merge_recipe
from grpo_recipes.recipe.converters import ALIASES
from grpo_recipes.recipe.keys import (
    READ_VARIABLES,
    SHELL_VARIABLES,
    catalogue,
    environment_keys,
    nested_catalogue,
)

READ = {*environment_keys(), *READ_VARIABLES, *SHELL_VARIABLES}
TEST = "tests/plan/test_plan.py::test_vllm_tp_size_moves_the_devices"
ROTATES = "tests/e2e/test_distributed.py::test_two_processes_train_through_the_server"


def named(field: str) -> list:
    return [pytest.param(row, name, id=f"{row.id}-{name}") for row in rows() for name in getattr(row, field)]


def known(key: str) -> bool:
    """Whether a recipe may hold ``key``; a dotted one stands in the mapping before the last dot."""
    path, _, name = key.rpartition(".")
    if path:
        return name in nested_catalogue()[path]
    return key in catalogue() or key in ALIASES


def test_the_file_is_well_formed_and_its_tests_exist() -> None:
    assert guide_rows.faults() == []
    assert all(any(path.is_file() for path in REPOSITORY.glob(f"{start}*")) for start in needs())


@pytest.mark.parametrize(("row", "key"), named("keys"))
def test_a_key_is_what_its_row_says(row: Row, key: str, tmp_path: Path) -> None:
    if row.status != "refused":
        assert known(key) == (row.status in SHOWN)
        return
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: x\n")
    merged, problems = merge_recipe(recipe)
    if not problems:  # noted: it asks for what happens anyway
        (note,) = merged.notes
        assert f"{key}: x changes nothing: {row.how.removeprefix('remove it; ')}" in note
        return
    (problem,) = problems
    assert problem.where == f"{recipe}:1" and key in problem.what
    assert problem.fix in (row.how, f"{row.how}: x")


@pytest.mark.parametrize("name", sorted({key for row in rows() for key in row.keys} & ALIASES.keys()))
def test_another_name_of_a_key_is_read_as_it_and_not_beside_it(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{name}: 0.5\n")
    merged, problems = merge_recipe(recipe)
    assert (merged[ALIASES[name]], problems) == (0.5, [])
    recipe.write_text(f"{name}: 0.5\n{ALIASES[name]}: 0.6\n")
    (problem,) = merge_recipe(recipe)[1]
    assert name in problem.what and problem.fix == f"remove {name}"


@pytest.mark.parametrize(("row", "name"), named("variables"))
def test_a_variable_is_what_its_row_says(row: Row, name: str) -> None:
    assert (name in READ) == (row.status in SHOWN)


@pytest.mark.parametrize("key", ["span_kl_beta", "span_kl_target"])
def test_keys_without_effect_are_unknown(key: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"{key}: 0.1\n")
    (problem,) = merge_recipe(recipe)[1]
    assert problem.what == f"unknown key '{key}'"


@pytest.mark.parametrize("name", ["path", "name", "data_dir", "data_files", "fraction"])
def test_trls_names_in_a_mixture_are_told(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"dataset_mixture:\n  datasets:\n    - id: a/b\n      {name}: x\n")
    (problem,) = merge_recipe(recipe)[1]
    assert problem.where == f"{recipe}:4" and f"'{name}'" in problem.what


# --- make coverage ---------------------------------------------------------------------------------------------------


def report(test: str, outcome: str, when: str = "call") -> pytest.TestReport:
    return pytest.TestReport(test, ("", 0, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_what_ran_is_written_down_without_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ran"
    monkeypatch.setenv("GRPO_RAN_TESTS", str(file))
    pytest_runtest_logreport(report("t.py::right[1-a]", "passed"))
    pytest_runtest_logreport(report("t.py::right[1-a]", "passed", "teardown"))
    pytest_runtest_logreport(report("t.py::right[2]", "skipped", "setup"))
    pytest_runtest_logreport(report("t.py::half[1]", "passed"))
    pytest_runtest_logreport(report("t.py::half[2]", "failed", "setup"))
    written = ["passed t.py::right", "skipped t.py::right", "passed t.py::half", "failed t.py::half"]
    assert file.read_text().splitlines() == written
    assert passed_tests(file) == {"t.py::right"}
    monkeypatch.delenv("GRPO_RAN_TESTS")
    pytest_runtest_logreport(report("t.py::later", "passed"))
    assert file.read_text().splitlines() == written


def test_a_row_whose_test_did_not_pass_is_a_fault() -> None:
    row = Row("a-row", "2.1", "item", "kept", "how", "real", "", (TEST,))
    assert check_guide_rows.judge((row,), {TEST}, lambda _: True) == ([], {})
    wrong, excused = check_guide_rows.judge((row,), set(), lambda _: False)
    assert (len(wrong), excused) == (1, {}) and "a-row" in wrong[0] and TEST in wrong[0]


def test_a_test_without_its_program_is_excused_and_one_with_it_is_not() -> None:
    (start, program), *_ = needs().items()
    test = next(test for row in rows() for test in row.tests if test.startswith(start))
    row = Row("a-row", "2.1", "item", "kept", "how", "real", "", (test,))
    assert check_guide_rows.judge((row,), set(), lambda _: False) == ([], {test: program})
    assert len(check_guide_rows.judge((row,), set(), lambda name: name == program)[0]) == 1


def test_a_test_that_rests_today_counts_and_one_that_ran_and_did_not_pass_does_not(tmp_path: Path) -> None:
    file, always, rotates = tmp_path / "ran", TEST, ROTATES
    file.write_text("started 1\n")
    assert check_guide_rows.counted([always, rotates], file) == set()
    file.write_text("day 7\n")
    assert check_guide_rows.counted([always, rotates], file) == {rotates}
    file.write_text(f"day 7\npassed {always}\nfailed {rotates}\n")
    assert check_guide_rows.counted([always, rotates], file) == {always}
    file.write_text(f"day 7\nskipped {rotates}\n")
    assert check_guide_rows.counted([always, rotates], file) == set()


@pytest.mark.parametrize(("missing", "code"), [(None, 0), (TEST, 1), (ROTATES, 0)])
def test_the_check_ends_with_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str | None, code: int
) -> None:
    file, all_rows = tmp_path / "ran", [*rows(), *fault_rows.rows(), *findings.rows()]
    passed = [f"passed {test}\n" for row in all_rows for test in row.tests if test != missing]
    file.write_text("".join(["day 7\n", *passed]))
    monkeypatch.setenv("GRPO_RAN_TESTS", str(file))
    assert check_guide_rows.main() == code
    assert (TEST in capsys.readouterr().err) == bool(code)
    monkeypatch.setenv("GRPO_RAN_TESTS", str(tmp_path / "none"))
    assert check_guide_rows.main() == 2


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (Row("x", "9.9", "item", "kept", "how", "real", "", (TEST,)), "unknown section"),
        (Row("x", "2.1", "item", "perhaps", "how", "real", "", (TEST,)), "unknown status"),
        (Row("x", "2.1", "", "kept", "how", "real", "", (TEST,)), "no item"),
        (Row("x", "2.1", "item", "kept", "how"), "without a how or without a test"),
        (Row("x", "2.1", "item", "refused", "", "real", "", (TEST,)), "without a how or without a test"),
        (Row("x", "2.1", "item", "later"), "without a why"),
        (Row("x", "2.1", "item", "kept", "how", "hearsay", "", (TEST,)), "unknown evidence 'hearsay'"),
        (Row("x", "2.1", "item", "kept", "how", "fake", "", (TEST,)), "names the part that is faked"),
        (Row("x", "2.1", "item", "kept", "how", "real", "sbatch", (TEST,)), "names the part that is faked"),
        (Row("x", "2.1", "item", "later", "", "real", "", (), "why"), "says later with evidence"),
        (Row("x", "2.1", "item", "kept", "how", "real", "", (f"{TEST}_",)), "there is no test"),
    ],
)
def test_what_is_wrong_with_a_row_is_told(entry: Row, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = faults_with(entry, GUIDE, monkeypatch)
    assert [fault for fault in found if fault.startswith("x: ") and said in fault], found


def faults_with(entry: Row, file: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(
        guide_rows, "rows", lambda *files: ((entry,) if file in (files or FILES) else ()) + rows(*files)
    )
    return guide_rows.faults()


def test_a_row_of_atropos_rests_on_what_ran_and_may_be_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("x", "verl", "item", "kept", "how", "real", "", (TEST,))
    for kind in ("argv", "text"):
        assert f"x: unknown evidence '{kind}'" in faults_with(replace(row, evidence=kind), ATROPOS, monkeypatch)
    declined = Row("x", "verl", "item", "declined", why="harms others")
    for entry, faulty in ((row, False), (declined, False), (replace(declined, why=""), True)):
        assert any(fault.startswith("x: ") for fault in faults_with(entry, ATROPOS, monkeypatch)) == faulty
    assert "x: unknown status 'declined'" in faults_with(replace(declined, section="2.1"), GUIDE, monkeypatch)


def test_a_row_is_looked_up_in_its_own_file() -> None:
    assert len(rows(ATROPOS)) == 88 and rows() == (*rows(GUIDE), *rows(ATROPOS))


def test_a_test_exists_where_its_function_is_defined() -> None:
    assert exists(TEST)
    assert not exists("tests/plan/test_plan.py::test_none") and not exists("tests/none.py::test_x")
    assert not exists("tests/plan/test_plan.py::accelerate_file")


def test_a_fault_rests_on_a_test_that_passed_or_that_another_day_runs(tmp_path: Path) -> None:
    file = tmp_path / "ran"
    always, rotates = TEST, ROTATES

    def wrong(ran: str, *tests: str) -> list[str]:
        file.write_text(f"day 7\n{ran}")
        return check_guide_rows.without_a_test((fault_rows.Fault("x", "ended", "", "", tests),), file)

    assert not wrong(f"passed {always}\n", always) and not wrong("", rotates)
    assert wrong("", always) and wrong(f"failed {rotates}\n", rotates) and wrong(f"skipped {always}\n", always)


def test_the_page_counts_each_kind_of_evidence_and_says_what_is_faked_and_where_a_test_is_skipped() -> None:
    spec = importlib.util.spec_from_file_location("guide_table", REPOSITORY / "docs/guide_table.py")
    assert spec and spec.loader
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    for file in FILES:
        lines = page.row_tables(file).splitlines()
        for kind in guide_rows.document(file)["evidence"]:
            count = sum(row.evidence == kind for row in rows(file))
            assert any(line.startswith(f"| **{kind}** | {count} |") for line in lines)
    lines = page.row_tables(GUIDE).splitlines()
    shown = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[2] for line in lines if line.count(" | ") == 3}
    assert shown["header: the whole node alone"] == "real (where there is slurmctld)"
    assert shown["CONDA_SH"] == "fake of conda" and shown["HF_HOME in the repository"] == "argv"
