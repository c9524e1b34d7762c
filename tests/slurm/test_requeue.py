"""Whether Slurm starts a stopped run again, and what is told to scontrol."""

from __future__ import annotations

import signal

import pytest

from grpo_recipes.slurm.client import SlurmJob, requeue, why_no_requeue

JOB = SlurmJob(7, "cluster", 1, None)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ((False, 0, 100, 0), None),
        ((False, 99, 100, 1), None),
        ((True, 0, 100, 0), "grpo stop asked for the end"),
        ((False, 100, 100, 0), "the job was requeued 100 times (max_requeues 100)"),
        ((False, 0, 0, 0), "the job was requeued 0 times (max_requeues 0)"),
        ((False, 3, 100, 2), "2 attempts in a row made no new step"),
    ],
)
def test_a_run_is_requeued_unless_there_is_a_reason(facts, why):
    assert why_no_requeue(*facts) == why


@pytest.fixture
def fake_scontrol(tmp_path, monkeypatch):
    """``fake_scontrol(script)``: a scontrol on PATH that notes its arguments."""

    def make(script: str):
        program = tmp_path / "scontrol"
        program.write_text(f'#!/bin/bash\necho "$@" >> "{tmp_path}/asked"\n{script}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return tmp_path / "asked"

    yield make
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("job", "name"), [(JOB, "7"), (SlurmJob(9, "cluster", 1, None, array="7_2"), "7_2")], ids=["job", "task"]
)
def test_scontrol_is_asked_for_our_own_job_and_its_sigterm_awaited(fake_scontrol, job, name):
    asked = fake_scontrol("kill -TERM $PPID")
    assert requeue(job) is None
    assert asked.read_text() == f"requeue {name}\n"


def test_what_scontrol_says_against_it_is_told(fake_scontrol):
    fake_scontrol('echo "Requested operation is presently disabled" >&2; exit 1')
    assert requeue(JOB) == "scontrol requeue 7 failed (Requested operation is presently disabled)"


def test_a_missing_scontrol_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue(JOB) == "scontrol requeue 7 failed (FileNotFoundError)"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
