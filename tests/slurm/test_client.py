"""The end of a job: its time, and whether Slurm starts the run again."""

from __future__ import annotations

import datetime
import signal

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.slurm.client import (
    SlurmJob,
    query,
    read_job_end_time,
    requeue_job,
    submit,
)


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


def test_the_end_of_the_job_is_read_with_any_time_format_of_the_user(fake_scontrol, monkeypatch):
    fake_scontrol(
        '[ "$SLURM_TIME_FORMAT" = standard ] && echo "JobId=7 EndTime=2026-01-01T12:00:00 Deadline=N/A" && exit\n'
        'echo "JobId=7 EndTime=Tomorr 12:00 Deadline=N/A"'
    )
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    assert read_job_end_time({"SLURM_JOB_ID": "7"}) == datetime.datetime(2026, 1, 1, 12).timestamp()


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
