"""Slurm's commands, each with a time limit: the job we run in and its end, the queue, submit, requeue, cancel."""

import contextlib
import datetime
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, Problem, config_error, translate
from grpo_recipes.process.reports import say
from grpo_recipes.recipe.keys import SIGNAL_LEAD

NO_ANSWER = "UNKNOWN"  # state of a job while Slurm is here and does not answer
# States of a job that has not come to its end, as far as is known.
_ACTIVE = (
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING",
    NO_ANSWER,
)  # fmt: skip
_SIGNAL_LEAD_SECONDS = 300.0  # how early Slurm sends USR1, by the header of training.sh (`--signal=B:USR1@300`)
_MARGIN_SECONDS = 30.0
_PHASES = tuple(f"seconds/{phase}" for phase in ("sample", "score", "sync", "update", "evaluate"))
# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
_NO_CONTROLLER = re.compile("resolve_ctls|contact slurm controller", re.IGNORECASE)
_SECONDS = 30.0
_SBATCH_SECONDS = 120.0  # a busy controller answers late
_SIGTERM_SECONDS = 60.0


class NoAnswer(Exception):
    """A command of Slurm fails or does not answer; the message says how."""


class _NotHere(NoAnswer):
    """This machine has no such command."""


class _Refused(NoAnswer):
    """The command says no; the message has its own words."""


class MaybeSubmitted(ConfigError):
    """The job may be in the queue or not: what it would run must stay."""


def _run(*argv: str, seconds: float = _SECONDS, unless: str | None = None) -> str:
    """Return what one of Slurm's commands prints; where it fails, raise NoAnswer, unless it complains of ``unless``."""
    with (
        translate(subprocess.TimeoutExpired, lambda _: NoAnswer(f"did not answer within {seconds:.0f} seconds")),
        translate(OSError, lambda error: _NotHere(f"does not run on this machine ({error.strerror})")),
    ):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds, check=False)
    if done.returncode and (unless is None or unless not in done.stderr):
        lines = [line.removeprefix(f"{argv[0]}: ").removeprefix("error: ").strip() for line in done.stderr.splitlines()]
        raise _Refused("; ".join(filter(None, lines)).rstrip(".") or f"exit code {done.returncode}")
    return done.stdout.strip()


def ask(*argv: str, seconds: float = _SECONDS) -> str | None:
    """Return what one of Slurm's commands prints; None where it is silent or not here, or there is no such job.

    Raise NoAnswer where it fails or takes too long.
    """
    with contextlib.suppress(_NotHere):
        return _run(*argv, seconds=seconds, unless="Invalid job id") or None
    return None


def _printed(*argv: str, seconds: float = _SECONDS) -> str:
    """Return what one of Slurm's commands prints, nothing where it fails, or is not here."""
    with contextlib.suppress(NoAnswer):
        return ask(*argv, seconds=seconds) or ""
    return ""


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job we run in."""

    id: int
    cluster: str
    nodes: int
    gpus_on_node: int | None  # Slurm's own count, compared with what the driver shows, never used
    restarts: int = 0  # how often the job was requeued
    array: str = ""  # the job as a task of an array, e.g. 7_2; empty for any other

    @property
    def name(self) -> str:
        """``<cluster>-<job>``, for a task of an array ``<cluster>-<job>_<task>``."""
        return f"{self.cluster}-{self.array or self.id}"


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Return the job of SLURM_JOB_ID, or None; a variable must hold a number where Slurm puts one."""

    def number(name: str, default: str = "") -> int:
        text = environment.get(name) or default
        if not text.isdecimal():
            fix = f"unset {name}, or submit with sbatch"
            raise config_error(name, f"'{text}' is not the number that Slurm sets", fix)
        return int(text)

    if not environment.get("SLURM_JOB_ID"):
        return None
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return SlurmJob(
        id=number("SLURM_JOB_ID"),
        cluster=environment.get("SLURM_CLUSTER_NAME", "slurm"),
        nodes=number("SLURM_JOB_NUM_NODES", "1"),
        gpus_on_node=int(count) if count.isdigit() else None,
        restarts=number("SLURM_RESTART_COUNT", "0"),
        array=f"{array}_{task}" if array and task else "",
    )


def requeue(job: SlurmJob) -> str | None:
    """Have Slurm start our job again, which ends it by SIGTERM; return why that failed, or None when it came."""
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # whichever thread the kernel gives it to
    name = job.array or str(job.id)  # one task, not the whole array
    try:
        _run("scontrol", "requeue", name, seconds=60)
    except NoAnswer as error:
        return f"scontrol requeue {name}: {error}"
    say(f"job {name} is requeued and goes on in the same run directory")
    ended.wait(_SIGTERM_SECONDS)
    return None


@dataclass(frozen=True)
class Job:
    """A job as Slurm's queue shows it."""

    id: str  # <job>_<task> for an array
    state: str  # Slurm's word, e.g. PENDING, or NO_ANSWER
    reason: str = ""  # why it waits, if Slurm says so
    ends: str = ""  # when its time is over at the latest, as Slurm writes it, if known
    script: Path | None = None  # its batch script, if known
    out: Path | None = None  # its logs, if Slurm names them
    err: Path | None = None

    @property
    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in _ACTIVE

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD")

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.waits and self.reason else self.state


def find_job(job_id: str) -> Job | None:
    """Return the job of that id; None where Slurm does not know it, or is not here."""
    with contextlib.suppress(NoAnswer):
        if shown := ask("scontrol", "show", "job", job_id, "-o"):
            # A value may hold spaces; it ends where the next `Key=` begins.
            fields = dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", shown.splitlines()[0]))
            known = {key: text for key, text in fields.items() if text not in ("", "None", "Unknown", "(null)")}
            script, out, err = (Path(known[key]) if key in known else None for key in ("Command", "StdOut", "StdErr"))
            state, reason, ends = (known.get(key, "") for key in ("JobState", "Reason", "EndTime"))
            return Job(job_id, state, reason, ends, script, out, err)
        recorded = _printed("sacct", "-X", "-n", "-P", "-j", job_id, "-o", "State")  # many sites keep no records
        return Job(job_id, recorded.split()[0]) if recorded else None
    return Job(job_id, NO_ANSWER)


def my_jobs() -> dict[str, Job] | None:
    """Return the user's jobs that wait or run, by their ids; empty without Slurm, None where it does not answer."""
    with contextlib.suppress(NoAnswer):
        listed = ask("squeue", "--me", "-r", "-h", "-o", "%i|%T|%r|%o") or ""
        rows = [f"{line}|".split("|", 3) for line in listed.splitlines() if line.count("|") >= 2]
        return {
            job_id: Job(job_id, state, "" if reason == "None" else reason, script=Path(command.rstrip("|")))
            for job_id, state, reason, command in rows
        }
    return None


def tasks_in_queue(jobs: Iterable[int]) -> set[int]:
    """Return the indices of the tasks of array jobs that wait or run; none on a machine without Slurm."""
    ids = ",".join(map(str, jobs))
    with translate(NoAnswer, lambda error: config_error("squeue", str(error), "try again later")):
        command = ("squeue", "--noheader", "--array", f"--jobs={ids}", "--format=%K")
        listed = ask(*command, seconds=60) if ids else None
    return {int(line) for line in (listed or "").split() if line.isdigit()}


def address_of_node(name: str) -> str | None:
    """Return ``NodeAddr`` of a node as Slurm has it, an address or a name; None where scontrol shows none."""
    found = re.search(r"\bNodeAddr=(\S+)", _printed("scontrol", "show", "node", name, "-o", seconds=60))
    return found[1] if found else None


def cluster_name() -> str:
    """Return the name of this cluster, as jobs find it in SLURM_CLUSTER_NAME; ``slurm`` where Slurm does not say."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _printed("scontrol", "show", "config"), re.MULTILINE)
    return found[1] if found else "slurm"


def cancel(job_id: str) -> None:
    """Take a job out of the queue, or end it; where Slurm refuses, raise a ConfigError in its own words."""
    fix = "look at the job with squeue, on the login node"
    with translate(NoAnswer, lambda error: config_error("scancel", str(error), fix)):
        _run("scancel", job_id)


def submit(script: Path) -> int:
    """Submit a batch script from the working folder, and return the job id.

    Where sbatch refuses or is not here, raise a ConfigError; where it does not answer or prints no id, MaybeSubmitted.
    """

    def failed(error: NoAnswer) -> ConfigError:
        """Return the error with the fix of its cause."""
        if isinstance(error, _NotHere):
            return config_error("sbatch", str(error), "submit on the cluster's login node")
        if isinstance(error, _Refused):
            fix = "correct the profile, or give another value on the command line"
            if _NO_CONTROLLER.search(str(error)):
                fix = "Slurm does not answer here: load the site's Slurm module, or submit on the cluster's login node"
            return config_error("sbatch", str(error), fix)
        fix = "look with squeue whether the job was submitted; the files it runs from were kept"
        return MaybeSubmitted(Problem("sbatch", str(error), fix))

    with translate(NoAnswer, failed):
        printed = _run("sbatch", "--parsable", str(script), seconds=_SBATCH_SECONDS)
        job = re.search(r"^(\d+)(;\S+)?$", printed, re.MULTILINE)  # some sites print more than that
        if job is None:
            raise NoAnswer(f"prints no job id ('{' '.join(printed.split())}')")
        return int(job[1])


class Walltime:
    """Ask for the stop where the lead of Slurm's signal is short, or the signal does not come at all.

    The lead is twice the longest phase seen plus the longest save, and half a minute. ``end_time`` returns when the
    job ends in seconds since the epoch, or None for a job without an end; ``signal_lead`` is that of the signal.
    """

    def __init__(self, end_time: Callable[[], float | None], signal_lead: float) -> None:
        self._signal_lead = signal_lead
        self._end_time = end_time
        self._end = end_time()
        self._longest = 0.0
        self._save = 0.0
        self._noted = False

    @property
    def lead(self) -> float:
        """Seconds before the job's end at which the trainers are asked."""
        return 2 * self._longest + (self._save or self._longest) + _MARGIN_SECONDS

    def observe(self, row: Mapping[str, Any]) -> None:
        """Learn from a row of ``metrics.jsonl`` how long phases take."""
        self._longest = max(self._longest, *(float(row.get(phase) or 0.0) for phase in _PHASES))
        self._save = max(self._save, float(row.get("seconds/save") or 0.0))

    def note(self) -> str | None:
        """Return, once, what the user should know when phases are longer than the signal's lead allows."""
        if self._noted or self._end is None or self.lead <= self._signal_lead:
            return None
        self._noted = True
        return (
            f"note: with phases of {self._longest:.0f} s the signal {self._signal_lead:.0f} s before the time limit "
            f"may come too late; the launcher stops {self.lead:.0f} s before the limit"
        )

    def due(self, now: float | None = None) -> str | None:
        """Return why it is time to stop at ``now``, in seconds since the epoch, or None."""
        now = time.time() if now is None else now
        if self._end is not None and now >= self._end - self.lead:
            self._end = self._end_time()  # the limit may have been raised meanwhile
        if self._end is None or now < self._end - self.lead:
            return None
        return f"the job's time limit comes in {max(0.0, self._end - now):.0f} s"


def signal_lead(environment: Mapping[str, str]) -> float:
    """Return how many seconds before the time limit Slurm sends our job's signal, as its batch script says."""
    given = environment.get(SIGNAL_LEAD, "")
    return float(given) if given.isdecimal() else _SIGNAL_LEAD_SECONDS


def job_end_time(environment: Mapping[str, str]) -> float | None:
    """Return the end of our Slurm job in seconds since the epoch, as the controller knows it now, or at its start."""
    job = environment.get("SLURM_JOB_ID")
    if not job:
        return None
    # The monitor waits for it near the end of a job: less than the margin it keeps before the limit.
    shown = _printed("scontrol", "show", "job", job, "-o", seconds=20)
    match = re.search(r"\sEndTime=(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown)
    if match is not None:
        return datetime.datetime.fromisoformat(match[1]).timestamp()
    given = environment.get("SLURM_JOB_END_TIME", "")
    return float(given) if given.isdigit() and not shown else None


def walltime_seconds(text: str) -> int | None:
    """Return the seconds of a time limit as Slurm writes it; None where it is not one."""
    if not _TIME.fullmatch(text):
        return None
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:
        parts.insert(0, 0)  # without days the first of one or two numbers is minutes
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + seconds
