"""Run Slurm's commands: read jobs and time limits, submit, requeue and cancel.

Every command has a time limit. Functions that read return None or an empty value on a machine without Slurm. Functions
that change a job report Slurm's own error message.
"""

import contextlib
import datetime
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import ConfigError, Problem, config_error, translate_errors
from grpo_recipes.process.reports import say

NO_ANSWER = "UNKNOWN"  # state of a job while Slurm is here and does not answer
# States of a job that may not have ended.
_ACTIVE = (
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING",
    NO_ANSWER,
)  # fmt: skip
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
_NO_CONTROLLER = re.compile("resolve_ctls|contact slurm controller", re.IGNORECASE)
_COMMAND_SECONDS = 30.0
_SBATCH_SECONDS = 120.0  # a busy controller answers late
_LOGIN_NODE = "submit on the cluster's login node, or load the site's Slurm module"
_SIGTERM_SECONDS = 60.0


class SlurmError(Exception):
    """A command of Slurm failed or did not answer; the message has the reason."""


class _NotInstalled(SlurmError):
    """This machine does not have the command."""


class _Rejected(SlurmError):
    """The command failed; the message contains its own error."""


class MaybeSubmitted(ConfigError):
    """It is unknown whether the job is in the queue, so the files that it would run must not be removed."""


def _run_command(*argv: str, seconds: float = _COMMAND_SECONDS, harmless_error: str | None = None) -> str:
    """Run a command and return its stripped standard output.

    Raise SlurmError if it takes more than ``seconds``, is not installed (_NotInstalled), or fails (_Rejected). Its
    exit code is ignored if standard error contains ``harmless_error``.
    """
    with (
        translate_errors(
            subprocess.TimeoutExpired, lambda _: SlurmError(f"did not answer within {seconds:.0f} seconds")
        ),
        translate_errors(OSError, lambda error: _NotInstalled(f"does not run on this machine ({error.strerror})")),
    ):
        environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}  # users may have set another format
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False, env=environment)
    if done.returncode and (harmless_error is None or harmless_error not in done.stderr):
        lines = [line.removeprefix(f"{argv[0]}: ").removeprefix("error: ").strip() for line in done.stderr.splitlines()]
        raise _Rejected("; ".join(filter(None, lines)).rstrip(".") or f"exit code {done.returncode}")
    return done.stdout.strip()


def query(*argv: str, seconds: float = _COMMAND_SECONDS) -> str | None:
    """Run a command of Slurm and return its output; None if it prints nothing, is not installed, or knows no such job.

    Raise SlurmError if it fails for another reason or takes more than ``seconds``.
    """
    with contextlib.suppress(_NotInstalled):
        return _run_command(*argv, seconds=seconds, harmless_error="Invalid job id") or None
    return None


def _query_or_empty(*argv: str, seconds: float = _COMMAND_SECONDS) -> str:
    """Run a command of Slurm and return its output; "" if it fails, prints nothing or is not installed."""
    with contextlib.suppress(SlurmError):
        return query(*argv, seconds=seconds) or ""
    return ""


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job that this process runs in."""

    id: int
    cluster: str
    nodes: int
    gpus_on_node: int | None  # Slurm's count, which is only compared with the driver's count
    restarts: int = 0  # number of requeues
    array: str = ""  # id of an array job and its task, e.g. 7_2; empty for other jobs

    @property
    def name(self) -> str:
        """``<cluster>-<job>``, or ``<cluster>-<job>_<task>`` for a task of an array job."""
        return f"{self.cluster}-{self.array or self.id}"


def read_slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Read the job that this process runs in from Slurm's variables (SLURM_JOB_ID and others); None outside a job.

    Raise ConfigError if the id, the number of nodes or the number of restarts is not a number.
    """

    def read_number(name: str, default: str = "") -> int:
        """Return a variable of Slurm as a number, by default ``default``. Raise ConfigError for another text."""
        text = environment.get(name) or default
        if not text.isdecimal():
            fix = f"unset {name}, or submit with sbatch"
            raise config_error(name, f"expected a number from Slurm, got '{text}'", fix)
        return int(text)

    if not environment.get("SLURM_JOB_ID"):
        return None
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return SlurmJob(
        id=read_number("SLURM_JOB_ID"),
        cluster=environment.get("SLURM_CLUSTER_NAME", "slurm"),
        nodes=read_number("SLURM_JOB_NUM_NODES", "1"),
        gpus_on_node=int(count) if count.isdigit() else None,
        restarts=read_number("SLURM_RESTART_COUNT", "0"),
        array=f"{array}_{task}" if array and task else "",
    )


def requeue_job(job: SlurmJob) -> str | None:
    """Requeue the job of this process with scontrol, then wait for the SIGTERM with which Slurm ends the job.

    Replace the handler of SIGTERM. Return None after the signal or a minute, or a text with Slurm's error if it
    rejects the requeue.
    """
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # works in every thread that may get the signal
    name = job.array or str(job.id)  # one task, not the whole array
    try:
        _run_command("scontrol", "requeue", name, seconds=60)
    except SlurmError as error:
        return f"scontrol requeue {name}: {error}"
    say(f"job {name} is requeued and continues in the same run directory")
    ended.wait(_SIGTERM_SECONDS)
    return None


@dataclass(frozen=True)
class Job:
    """A job in Slurm's queue."""

    id: str  # <job>_<task> for an array
    state: str  # Slurm's name of the state, e.g. PENDING, or NO_ANSWER
    reason: str = ""  # reason why it waits, if known
    ends: str = ""  # latest end of the job in Slurm's format, if known
    script: Path | None = None  # its batch script, if known
    out: Path | None = None  # its output log, if known
    err: Path | None = None  # its error log, if known

    @property
    def active(self) -> bool:
        """Whether the job may not have ended yet; also true if Slurm does not answer."""
        return self.state in _ACTIVE

    @property
    def waits(self) -> bool:
        """Whether the job waits in the queue."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD")

    def __str__(self) -> str:
        """Return the state, with the reason if the job waits."""
        return f"{self.state} ({self.reason})" if self.waits and self.reason else self.state


def find_job(job_id: str) -> Job | None:
    """Return the job with that id from scontrol, or from sacct after its end; None if neither knows it.

    The result is also None without Slurm. From sacct, only id and state are known. The state is NO_ANSWER if Slurm
    is installed and does not answer.
    """
    with contextlib.suppress(SlurmError):
        if output := query("scontrol", "show", "job", job_id, "-o"):
            # A value may contain spaces; it ends before the next `Key=`.
            fields = dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", output.splitlines()[0]))
            known = {key: text for key, text in fields.items() if text not in ("", "None", "Unknown", "(null)")}
            script, out, err = (Path(known[key]) if key in known else None for key in ("Command", "StdOut", "StdErr"))
            state, reason, ends = (known.get(key, "") for key in ("JobState", "Reason", "EndTime"))
            return Job(job_id, state, reason, ends, script, out, err)
        recorded = _query_or_empty(
            "sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State"
        )  # many sites do not keep records
        return Job(job_id, recorded.split()[0]) if recorded else None
    return Job(job_id, NO_ANSWER)


def list_my_jobs() -> dict[str, Job] | None:
    """Return the user's waiting and running jobs by id; empty without Slurm, None if Slurm does not answer."""
    with contextlib.suppress(SlurmError):
        listed = query("squeue", "--me", "-r", "-h", "-o", "%i|%T|%r|%o") or ""
        rows = [f"{line}|".split("|", 3) for line in listed.splitlines() if line.count("|") >= 2]
        return {
            job_id: Job(job_id, state, "" if reason == "None" else reason, script=Path(command.rstrip("|")))
            for job_id, state, reason, command in rows
        }
    return None


def find_queued_tasks(jobs: Iterable[int]) -> set[int]:
    """Return the task indices of the array jobs ``jobs`` that are in the queue (squeue): waiting or running tasks.

    The result is empty without jobs or without Slurm. Raise ConfigError if squeue fails.
    """
    ids = ",".join(map(str, jobs))
    with translate_errors(SlurmError, lambda error: config_error("squeue", str(error), "try again later")):
        command = ("squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%K")
        listed = query(*command, seconds=60) if ids else None
    return {int(line) for line in (listed or "").split() if line.isdigit()}


def read_node_address(name: str) -> str | None:
    """Return ``NodeAddr`` of the node ``name``, an IP address or a host name; None if scontrol does not show it."""
    match = re.search(r"\bNodeAddr=(\S+)", _query_or_empty("scontrol", "show", "node", name, "-o", seconds=60))
    return match[1] if match else None


def read_cluster_name() -> str:
    """Return the name of this cluster from scontrol, as in SLURM_CLUSTER_NAME inside a job; "slurm" if unknown."""
    match = re.search(r"^ClusterName\s*=\s*(\S+)", _query_or_empty("scontrol", "show", "config"), re.MULTILINE)
    return match[1] if match else "slurm"


def cancel_job(job_id: str) -> None:
    """Cancel a waiting or running job with scancel; raise ConfigError with Slurm's message if that fails."""
    fix = "inspect the job with squeue on the login node"
    with translate_errors(SlurmError, lambda error: config_error("scancel", str(error), fix)):
        _run_command("scancel", job_id)


def require_sbatch() -> None:
    """Raise ConfigError if this machine does not have sbatch, before checks that take minutes."""
    if shutil.which("sbatch") is None:
        raise config_error("sbatch", "this machine does not have Slurm's command sbatch", _LOGIN_NODE)


def submit(script: Path, after: int | None = None) -> int:
    """Submit a batch script with sbatch from the working folder, and return the job id.

    The job waits for the success of the job ``after``. If that job fails, Slurm cancels the new job. Raise ConfigError
    if sbatch fails or is not installed, and MaybeSubmitted if it does not answer or prints no id.
    """
    try:
        waits = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after is not None else []
        printed = _run_command("sbatch", "--parsable", *waits, str(script), seconds=_SBATCH_SECONDS)
        job = re.search(r"^(\d+)(;\S+)?$", printed, re.MULTILINE)  # some sites print additional lines
        if job is None:
            raise SlurmError(f"prints no job id ('{' '.join(printed.split())}')")
        return int(job[1])
    except _NotInstalled as error:
        raise config_error("sbatch", str(error), _LOGIN_NODE) from error
    except _Rejected as error:
        fix = "correct the profile, or set another value on the command line"
        if _NO_CONTROLLER.search(str(error)):
            fix = _LOGIN_NODE
        raise config_error("sbatch", str(error), fix) from error
    except SlurmError as error:
        fix = "check with squeue whether the job was submitted; its files were not removed"
        raise MaybeSubmitted(Problem("sbatch", str(error), fix)) from error


def read_job_end_time(environment: Mapping[str, str]) -> float | None:
    """Return the end of the job that this process runs in, in seconds since the epoch; None if it is unknown.

    The source is scontrol, or SLURM_JOB_END_TIME if scontrol does not answer. Return None outside a job, and for a job
    without a time limit.
    """
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None
    # The monitor waits for this command near the end of a job, so its time limit is below the monitor's margin.
    output = _query_or_empty("scontrol", "show", "job", job_id, "-o", seconds=20)
    match = re.search(r"\sEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", output)
    if match is not None:
        return datetime.datetime.fromisoformat(match[1]).timestamp()
    variable = environment.get("SLURM_JOB_END_TIME", "")
    return float(variable) if variable.isdigit() and not output else None


def parse_walltime(text: str) -> int | None:
    """Convert a time limit in Slurm's format to seconds; None if the text is not a time limit.

    Examples are 90 and 90:00 (minutes), 72:00:00 (hours) and 3-0 (days).
    """
    if not _TIME.fullmatch(text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # without days, one or two numbers begin with minutes
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
