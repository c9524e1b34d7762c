"""What a machine answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from grpo_recipes.doctor.examine import NoAnswer
from grpo_recipes.paths import existing
from grpo_recipes.process.reports import gigabytes


def test_a_program_runs_once_however_many_checks_ask(machine, fake_program, tmp_path: Path):
    fake_program("sinfo", f"echo run >> {tmp_path}/runs; sleep 0.2; echo main; echo note >&2; exit 3")
    asked = machine()
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(asked.ask("sinfo", "-h"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "runs").read_text() == "run\n"
    assert {(done.returncode, done.stdout, done.stderr) for done in answers} == {(3, "main\n", "note\n")}
    asked.ask("sinfo", "-V")
    assert (tmp_path / "runs").read_text() == "run\nrun\n", "another question is asked by itself"


def test_a_program_that_is_missing_and_one_that_hangs(machine, no_program, fake_program):
    assert machine().ask("sinfo") is None
    quick = type(machine())(machine().environment, patience=0.2)
    fake_program("sinfo", "while true; do :; done")
    with pytest.raises(NoAnswer, match="sinfo did not answer"):
        quick.ask("sinfo")


def test_folders_of_a_run(machine, read, tmp_path: Path):
    assert machine(RUN_ROOT="/r").run_root == Path("/r")
    assert machine(read(run_root="~/mine"), RUN_ROOT="/r").run_root == Path("~/mine").expanduser()
    assert machine(SLURM_TMPDIR=str(tmp_path)).temporary == tmp_path
    assert machine(SLURM_TMPDIR="/no/such").temporary != Path("/no/such")
    assert existing(tmp_path / "a/b") == tmp_path


@pytest.mark.parametrize(("number", "text"), [(999, "1 kB"), (1.5e6, "1.5 MB"), (20e9, "20.0 GB"), (3e12, "3.0 TB")])
def test_bytes_for_a_person(number, text):
    assert gigabytes(number) == text
