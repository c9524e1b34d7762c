"""The end of a job: how early the launcher asks for the stop, and whether Slurm starts the run again."""

from __future__ import annotations

import datetime
import signal

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.slurm.client import (
    SlurmJob,
    Walltime,
    query,
    read_job_end_time,
    read_signal_lead,
    requeue_job,
    submit,
)

END = 10_000.0
ROW = {"seconds/sample": 40.0, "seconds/score": 1.0, "seconds/update": 20.0, "seconds/step": 70.0, "seconds/save": 5.0}


def test_the_lead_is_twice_the_longest_phase_plus_the_save():
    walltime = Walltime(lambda: END, 300.0)
    assert walltime.lead == 30
    walltime.observe({**ROW, "seconds/save": None})
    assert walltime.lead == 3 * 40 + 30  # no save was seen yet
    walltime.observe(ROW)
    walltime.observe({"seconds/sample": 1.0})
    assert walltime.lead == 2 * 40 + 5 + 30


def test_the_stop_is_due_when_the_lead_begins():
    walltime = Walltime(lambda: END, 300.0)
    walltime.observe(ROW)
    assert walltime.find_stop_reason(END - 116) is None
    assert walltime.find_stop_reason(END - 115) == "the job's time limit comes in 115 s"


def test_a_limit_that_was_raised_meanwhile_counts():
    ends = iter([END, END + 3600])
    walltime = Walltime(lambda: next(ends), 300.0)
    assert walltime.find_stop_reason(END - 1) is None
    assert walltime.find_stop_reason(END + 3000) is None


def test_phases_too_long_for_slurms_signal_are_noted_once():
    walltime = Walltime(lambda: END, 300.0)
    assert walltime.take_warning() is None
    walltime.observe({"seconds/sample": 400.0, "seconds/save": 20.0})
    assert walltime.take_warning() == (
        "note: phases take up to 400 s, so the signal 300 s before the time limit may come too late; the launcher "
        "stops the run 850 s before the limit"
    )
    assert walltime.take_warning() is None


def test_the_note_is_of_the_lead_that_the_jobs_script_has():
    early, late = (Walltime(lambda: END, read_signal_lead({"GRPO_SIGNAL_LEAD": lead})) for lead in ("900", "77"))
    for walltime in (early, late):
        walltime.observe({"seconds/sample": 40.0, "seconds/save": 20.0})
    assert early.take_warning() is None
    assert "the signal 77 s before the time limit" in str(late.take_warning())
    assert read_signal_lead({}) == read_signal_lead({"GRPO_SIGNAL_LEAD": "soon"}) == 300


def test_without_an_end_nothing_is_due():
    assert Walltime(lambda: None, 300.0).find_stop_reason(1e12) is None


@pytest.mark.parametrize(
    ("printed", "variables", "expected"),
    [
        (
            "JobId=7 StartTime=2026-01-01T10:00:00 EndTime=2026-01-01T12:00:00 Deadline=N/A",
            {"SLURM_JOB_END_TIME": "5"},
            datetime.datetime(2026, 1, 1, 12).timestamp(),
        ),
        ("JobId=7 EndTime=Unknown Deadline=N/A", {}, None),
        ("", {"SLURM_JOB_END_TIME": "1767268800"}, 1767268800.0),
        ("", {}, None),
    ],
    ids=["controller", "no-limit", "variable", "nothing"],
)
def test_the_end_of_the_job_is_the_controllers_else_slurms_variable(
    tmp_path, monkeypatch, printed, variables, expected
):
    fake = tmp_path / "scontrol"
    fake.write_text(f'#!/bin/bash\necho "{printed}"\n' if printed else "#!/bin/bash\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert read_job_end_time({"SLURM_JOB_ID": "7", **variables}) == expected


def test_outside_slurm_there_is_no_end():
    assert read_job_end_time({}) is None


JOB = SlurmJob(7, "cluster", 1, None)


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
    command_log = fake_scontrol("kill -TERM $PPID")
    assert requeue_job(job) is None
    assert command_log.read_text() == f"requeue {name}\n"


def test_what_is_printed_of_other_jobs_counts_where_one_has_left_the_queue(fake_scontrol):
    fake_scontrol("echo JobId=7; echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert query("scontrol", "show", "job", "7,8") == "JobId=7"


def test_what_scontrol_says_against_it_is_told(fake_scontrol):
    fake_scontrol('echo "Requested operation is presently disabled" >&2; exit 1')
    assert requeue_job(JOB) == "scontrol requeue 7: Requested operation is presently disabled"


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        (
            "sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
            "load the site's Slurm module",
        ),
        ("sbatch: error: Invalid account or partition", "correct the profile, or set another value"),
    ],
)
def test_a_refused_submission_has_the_fix_of_its_cause(tmp_path, monkeypatch, message, fix):
    fake_sbatch = tmp_path / "sbatch"
    fake_sbatch.write_text(f"#!/bin/bash\necho '{message}' >&2; exit 1\n")
    fake_sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ConfigError, match=fix):
        submit(tmp_path / "job.sh")


def test_a_missing_scontrol_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert requeue_job(JOB) == "scontrol requeue 7: does not run on this machine (No such file or directory)"
    (tmp_path / "scontrol").write_text("not a program")
    (tmp_path / "scontrol").chmod(0o755)
    assert requeue_job(JOB) == "scontrol requeue 7: does not run on this machine (Exec format error)"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
