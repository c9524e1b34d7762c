"""What Slurm says of jobs. Every question has a time limit; no answer is None."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import config_error

_SECONDS = 30
NO_ANSWER = "UNKNOWN"  # state of a job while Slurm is here and does not answer
# States of a job that has not come to its end, as far as is known.
_ACTIVE = frozenset(
    {
        "PENDING",
        "RUNNING",
        "CONFIGURING",
        "COMPLETING",
        "SUSPENDED",
        "REQUEUED",
        "REQUEUE_HOLD",
        "RESIZING",
        "SIGNALING",
        NO_ANSWER,
    }
)


@dataclass(frozen=True)
class Job:
    """A job as Slurm sees it.

    Attributes:
        id: job id, ``<job>_<task>`` of an array.
        state: Slurm's word, e.g. ``PENDING``, or ``NO_ANSWER``.
        reason: why it waits, as Slurm says it; empty where it says none.
        ends: when its time is over at the latest, as Slurm writes it; empty where it is not known.
        script: its batch script, where that is known.
    """

    id: str
    state: str
    reason: str = ""
    ends: str = ""
    script: Path | None = None

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD")

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.waits and self.reason else ""
        return f"{self.state}{why}"


class NoAnswer(Exception):
    """Slurm is here, and its controller does not answer."""


def find_job(job_id: str) -> Job | None:
    """The job of that id; None where Slurm does not know it, or is not there."""
    try:
        shown = ask("scontrol", "show", "job", job_id, "-o")
    except NoAnswer:
        return Job(job_id, NO_ANSWER)
    if shown:
        # A value may hold spaces; it ends where the next `Key=` begins.
        fields = dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", shown.splitlines()[0]))
        told = {key: "" if text in ("None", "Unknown", "(null)") else text for key, text in fields.items()}
        script = Path(told["Command"]) if told.get("Command") else None
        return Job(job_id, told.get("JobState", ""), told.get("Reason", ""), told.get("EndTime", ""), script)
    try:
        recorded = ask("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State")
    except NoAnswer:  # many sites keep no records
        return None
    return Job(job_id, recorded.split()[0]) if recorded else None


def my_jobs() -> dict[str, Job] | None:
    """The user's jobs that wait or run, by their ids; empty without Slurm, None where it does not answer."""
    try:
        told = ask("squeue", "--me", "-r", "-h", "-o", "%i|%T|%r")
    except NoAnswer:
        return None
    rows = [line.split("|") for line in (told or "").splitlines()]
    return {row[0]: Job(row[0], row[1], "" if row[2] == "None" else row[2]) for row in rows if len(row) == 3}


def cluster_name() -> str:
    """The name of this cluster, as jobs find it in SLURM_CLUSTER_NAME; ``slurm`` where Slurm does not say."""
    try:
        told = ask("scontrol", "show", "config")
    except NoAnswer:
        told = None
    found = re.search(r"^ClusterName\s*=\s*(\S+)", told or "", re.MULTILINE)
    return found[1] if found else "slurm"


def cancel(job_id: str) -> None:
    """Take a job out of the queue, or end it.

    Raises:
        ConfigError: Slurm does not do it, in its own words.
    """
    try:
        done = subprocess.run(["scancel", job_id], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        raise config_error("scancel", "is not here, or does not answer", "try on the login node") from None
    if done.returncode:
        words = done.stderr.removeprefix("scancel: ").removeprefix("error: ").strip()
        raise config_error("scancel", words or f"ends with code {done.returncode}", "look at the job with squeue")


def ask(*argv: str) -> str | None:
    """What one of Slurm's commands prints; None where it is silent or not there, or there is no such job.

    Raises:
        NoAnswer: it fails, or takes too long.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        raise NoAnswer from None
    if done.returncode == 0:
        return done.stdout.strip() or None
    if "Invalid job id" in done.stderr:
        return None
    raise NoAnswer
