"""Slurm jobs of our batch scripts (``SCRIPTS``) without a run directory, because they still wait or failed early.

``find_bare_job`` returns such a job as a ``BareJob``, which has the attributes of a run that `grpo logs` reads. The job
is recognized by its batch script or by its logs, ``logs/slurm_JOB.out`` and ``.err``, in the working folder or in the
repository. ``SlurmPoll`` limits how often a command queries Slurm and how long it waits for an answer.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, cast

from grpo_recipes.errors import config_error
from grpo_recipes.paths import display_path, find_code_root
from grpo_recipes.process.terminal import strip_control_codes
from grpo_recipes.secrets import mask_secrets
from grpo_recipes.slurm.client import NO_ANSWER, Job, find_job

T = TypeVar("T")
SLURM_SECONDS = 15.0  # between two queries of Slurm
SILENCE_SECONDS = 300.0  # a command that follows a run ends after this time without an answer from Slurm
SCRIPTS = ("training.sh", "run_atropos_grpo.sh", "train.slurm")
# Lines of our scripts and of Slurm that give the reason for an early end of a job.
_CAUSE = re.compile(r"^(?:[\w.]+\.sh|setup|grpo|ERROR|slurmstepd|sbatch|srun)\b.*:|error", re.IGNORECASE)
_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class BareJob:
    """A Slurm job without a run directory. It has the attributes of ``Run`` that `grpo logs` reads."""

    job_id: str
    job: Job | None  # None if Slurm no longer knows it
    logs: dict[str, Path]  # slurm.out and slurm.err, if they exist
    folder: Path  # a run directory that does not exist

    def is_running(self) -> bool:
        """Return whether the job may still write its logs."""
        return self.job is not None and self.job.active

    @property
    def state(self) -> str:
        """The state of the Slurm job in a few words, for example ``waiting in the queue (Priority)``."""
        if self.job is None:
            return "ended before its run directory existed"
        if self.job.waits:
            return f"waiting in the queue{f' ({self.job.reason})' if self.job.reason else ''}"
        if self.job.state == NO_ANSWER:
            return "unknown, Slurm does not answer"
        return f"{self.job.state}, {'no run directory yet' if self.job.active else 'without a run directory'}"

    @property
    def script(self) -> str:
        """The name of the batch script, empty if Slurm does not show it."""
        return self.job.script.name if self.job is not None and self.job.script is not None else ""

    @property
    def cause(self) -> str:
        """The last line of the logs with an error, or else the last line; empty while the job is active."""
        lines: list[str] = []
        for path in self.logs.values() if not self.is_running() else ():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
                text = strip_control_codes(mask_secrets(file.read().decode(errors="replace")))
            lines += [line.strip() for line in text.splitlines() if line.strip()]
        causes = [line for line in lines if _CAUSE.search(line)] or lines
        return causes[-1] if causes else ""

    def lines(self) -> list[str]:
        """Return the facts for `grpo status`."""
        job = f"{self.job_id} {self.job or 'is no longer known to Slurm'}"
        facts = [("job", job), ("state", self.state), ("cause", self.cause)]
        facts += [("log", display_path(path)) for path in self.logs.values()]
        return [f"{name:<8} {text}" for name, text in facts if text]


class SlurmPoll(Generic[T]):
    """Slurm's latest answer to a query. It is repeated at most every ``SLURM_SECONDS`` to spare a shared service."""

    def __init__(self, query: Callable[[], T]):
        self._query = query
        self._answer: T | None = None
        self._next = -math.inf
        self._silent_since: float | None = None

    def answer(self) -> T:
        """Return the latest answer of the query; repeat the query if the answer is older than ``SLURM_SECONDS``."""
        if time.monotonic() >= self._next:
            self._answer = self._query()
            self._next = time.monotonic() + SLURM_SECONDS
        return cast(T, self._answer)

    def need_answer(self, where: str, silent: bool) -> None:
        """Record whether Slurm is ``silent`` now; raise ConfigError after a silence of ``SILENCE_SECONDS``.

        ``where`` is the run or job in the message. Call this once per poll.
        """
        self._silent_since = (self._silent_since or time.monotonic()) if silent else None
        if self._silent_since is not None and time.monotonic() - self._silent_since >= SILENCE_SECONDS:
            minutes = f"{SILENCE_SECONDS / 60:.0f} minutes"
            problem = f"Slurm has not answered for {minutes}, and no process of it runs on this machine"
            raise config_error(where, problem, "repeat the command when squeue answers")


def find_bare_job(job_id: str) -> BareJob | None:
    """Query Slurm for a job, and return it if it runs one of our batch scripts or left logs; else None.

    Raise a ConfigError if Slurm does not answer and there are no logs.
    """
    job = find_job(job_id)
    logs = _find_logs(job_id, job)
    if not logs and job is not None and job.state == NO_ANSWER:
        raise config_error(job_id, "Slurm does not answer, and no run or log has this job id", "try again later")
    if not logs and not (job is not None and is_ours(job)):
        return None
    return BareJob(job_id, job, logs, Path(f"job-{job_id}"))


def is_ours(job: Job) -> bool:
    """Return whether the job runs one of the batch scripts of a checkout of this project."""
    script = job.script
    if script is None or script.name not in SCRIPTS:
        return False
    return any((folder / "src/grpo_recipes").is_dir() for folder in (script.parent, script.parent.parent))


def list_bare_jobs(jobs: Iterable[Job], job_ids: set[str]) -> list[BareJob]:
    """Return the jobs of our batch scripts that have no run directory; ``job_ids`` are the jobs of runs."""
    return [
        BareJob(job.id, job, _find_logs(job.id, job), Path(f"job-{job.id}"))
        for job in jobs
        if job.id not in job_ids and is_ours(job)
    ]


def _find_logs(job_id: str, job: Job | None) -> dict[str, Path]:
    """Return the job's existing logs: at the paths that Slurm shows, else in logs/ here or in the repository."""
    logs = {}
    for suffix in ("out", "err"):
        path = getattr(job, suffix, None)
        paths = [path] if path else [folder / f"logs/slurm_{job_id}.{suffix}" for folder in (Path(), find_code_root())]
        if existing := next((path for path in paths if path.is_file()), None):
            logs[f"slurm.{suffix}"] = existing
    return logs
