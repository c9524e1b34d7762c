"""Checks run at the same time on one machine: none blocks another, and no secret is printed."""

from __future__ import annotations

import inspect
import os
import sys
import time
from pathlib import Path

import pytest

from grpo_recipes.console.doctor import DEEP, MACHINE, RECIPE, RUN
from grpo_recipes.console.doctor.examine import NoAnswer, examine, format_findings, get_check_name
from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.paths import find_code_root, nearest_existing_folder
from grpo_recipes.process.reports import format_bytes
from grpo_recipes.runs.endings import OK, PROBLEM, WARNING, Finding, combine_findings, ok, problem, warning

sys.path.insert(0, str(find_code_root() / "scripts"))
from documentation import tables

SECRET = "hf_" + "a" * 30


def good(subject: str) -> Finding:
    """One line about it.

    And more.
    """
    return ok(subject)


def refusing(subject: str) -> Finding:
    """Refuses."""
    raise ConfigError(Problem("here", "is wrong", "mend it"), Problem("there", "too", "that as well"))


def broken(subject: str) -> Finding:
    """Fails."""
    raise ZeroDivisionError("no such luck")


def silent(subject: str) -> Finding:
    """Gets no answer."""
    raise NoAnswer("sinfo did not answer within 3 s")


def leaking(subject: str) -> Finding:
    """Tells a secret."""
    return warning(f"token {SECRET}\nsecond line", f"http://user:pass@proxy:80 and {SECRET}")


def run_check(check) -> Finding:
    (finding,) = examine([check], "x", 5).values()
    return finding


def test_a_check_is_called_after_its_function():
    assert examine([good], "x", 5) == {"good": Finding(OK, "x", "")}


def test_a_refusal_becomes_a_problem_with_its_fix():
    assert run_check(refusing) == Finding(PROBLEM, "here: is wrong (and 1 more: grpo check)", "mend it")


def test_a_check_that_fails_hides_no_other():
    results = [*examine([broken, silent, good], "x", 5).values()]
    assert [result.status for result in results] == [WARNING, WARNING, OK]
    assert "ZeroDivisionError: no such luck" in results[0].value
    assert results[1].value == "sinfo did not answer within 3 s"


def test_a_check_that_hangs_is_told_when_the_time_is_over(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def hanging(subject: str) -> Finding:
        """Reads a pipe that has no writer."""
        return ok(pipe.read_text())

    began = time.monotonic()
    results = examine([hanging, good], "x", 0.4)
    assert time.monotonic() - began < 2
    assert results["hanging"].status == WARNING and "no answer within" in results["hanging"].value
    assert results["good"].status == OK
    pipe.write_text("")  # let the thread go


def test_nothing_secret_and_no_second_line_comes_out():
    result = run_check(leaking)
    text = "\n".join(format_findings({"leaking": result}))
    assert SECRET not in text and "pass@" not in text
    assert result.value == "token ******** second line"


def test_problems_come_first_and_checks_without_a_finding_share_a_line():
    results = {"a": ok("fine"), "long name": problem("bad", "mend it"), "c": warning("so", "x"), "d": ok("good")}
    findings = [
        "PROBLEM  long name  bad",
        "                    -> mend it",
        "warn     c          so",
        "                    -> x",
    ]
    counts = "grpo: 4 checks, 1 warning, 1 problem"
    assert format_findings(results) == [*findings, "ok       a, d (details: grpo doctor -v)", counts]
    every_value = ["ok       a          fine", "ok       d          good"]
    assert format_findings(results, verbose=True) == [*findings, *every_value, counts]


def test_several_findings_of_a_check_show_all_that_is_not_ok_with_the_worst_status():
    assert combine_findings([ok("a"), ok("b")]) == Finding(OK, "a; b")
    combined = combine_findings([ok("a"), problem("b", "fix"), warning("c", "other"), problem("d", "fix")])
    assert combined == Finding(PROBLEM, "b; d; c", "fix; other")


def test_every_check_has_a_name_of_its_own_and_one_line_that_describes_it():
    for checks in (MACHINE + DEEP + RECIPE, RUN):
        names = [get_check_name(check) for check in checks]
        assert len(set(names)) == len(names)
        for check in checks:
            about = inspect.getdoc(check).splitlines()[0]
            assert about.endswith((".", ")", "%")) and len(about) < 120, check


def test_the_documentation_has_a_row_a_check():
    page = (find_code_root() / "docs/troubleshooting.md").read_text()
    for subject, checks in (("machine", MACHINE + DEEP), ("recipe", RECIPE), ("run", RUN)):
        assert f"<!-- doctor {subject} -->" in page
        table = tables.doctor_table(subject)
        rows = table.splitlines()[2:]
        assert [row.split(" | ")[0].strip("| ") for row in rows] == [get_check_name(check) for check in checks]


def test_a_program_that_is_missing_and_one_that_hangs(machine, no_program, fake_program):
    assert machine().run_program("sinfo").returncode == 127
    quick = type(machine())(machine().environment, timeout=0.2)
    fake_program("sinfo", "while true; do :; done")
    with pytest.raises(NoAnswer, match="sinfo did not answer"):
        quick.run_program("sinfo")


def test_folders_of_a_run(machine, read, tmp_path: Path):
    assert machine(RUN_ROOT="/r").run_root == Path("/r")
    assert machine(read(run_root="~/mine"), RUN_ROOT="/r").run_root == Path("~/mine").expanduser()
    assert machine(SLURM_TMPDIR=str(tmp_path)).temporary == tmp_path
    assert machine(SLURM_TMPDIR="/no/such").temporary != Path("/no/such")
    assert nearest_existing_folder(tmp_path / "a/b") == tmp_path


@pytest.mark.parametrize(("number", "text"), [(999, "1 kB"), (1.5e6, "1.5 MB"), (20e9, "20.0 GB"), (3e12, "3.0 TB")])
def test_bytes_for_a_person(number, text):
    assert format_bytes(number) == text
