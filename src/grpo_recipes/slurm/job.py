"""Whether a stopped run is started again by Slurm, and how."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from grpo_recipes.errors import config_error
from grpo_recipes.process.reports import say

_IDLE_ATTEMPTS = 2  # so many in a row without a new checkpoint, and a requeue would only burn the queue's time
_SIGTERM_SECONDS = 60.0


def why_no_requeue(forbidden: bool, requeues: int, most: int, idle_attempts: int) -> str | None:
    """Why a run that was stopped to go on later is not started again, or None.

    Args:
        forbidden: whether ``grpo stop`` asked for the end.
        requeues: how often Slurm has started the job again already.
        most: the recipe's ``max_requeues``.
        idle_attempts: attempts in a row, the last one included, that left no newer checkpoint.
    """
    if forbidden:
        return "grpo stop asked for the end"
    if requeues >= most:
        return f"the job was requeued {requeues} times (max_requeues {most})"
    if idle_attempts >= _IDLE_ATTEMPTS:
        return f"{idle_attempts} attempts in a row made no new step"
    return None


def requeue(job: SlurmJob) -> str | None:
    """Have Slurm start our job again. It then ends us with SIGTERM: everything must be written by now.

    Returns:
        Why that failed, or None, when Slurm has sent the signal.
    """
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())  # whichever thread the kernel gives it to
    name = job.array or str(job.id)  # one task, not the whole array
    try:
        done = subprocess.run(["scontrol", "requeue", name], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"scontrol requeue {name} failed ({type(error).__name__})"
    if done.returncode != 0:
        return f"scontrol requeue {name} failed ({done.stderr.strip() or done.returncode})"
    say(f"job {name} is requeued and goes on in the same run directory")
    ended.wait(_SIGTERM_SECONDS)
    return None


@dataclass(frozen=True)
class SlurmJob:
    """The Slurm job we run in.

    Attributes:
        id: job id.
        cluster: cluster name.
        nodes: nodes of the allocation.
        gpus_on_node: Slurm's own count, compared with what the driver shows, never used.
        restarts: how often the job was requeued.
        array: the job as a task of an array, e.g. ``7_2``, empty of any other.
    """

    id: int
    cluster: str
    nodes: int
    gpus_on_node: int | None
    restarts: int = 0
    array: str = ""

    @property
    def name(self) -> str:
        """``<cluster>-<job>``, of a task of an array ``<cluster>-<job>_<task>``."""
        return f"{self.cluster}-{self.array or self.id}"


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """The job of SLURM_JOB_ID, or None.

    Raises:
        ConfigError: a number of Slurm's is none.
    """
    if not environment.get("SLURM_JOB_ID"):
        return None
    count = environment.get("SLURM_GPUS_ON_NODE", "")
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    return SlurmJob(
        id=_slurm_number(environment, "SLURM_JOB_ID"),
        cluster=environment.get("SLURM_CLUSTER_NAME", "slurm"),
        nodes=_slurm_number(environment, "SLURM_JOB_NUM_NODES", "1"),
        gpus_on_node=int(count) if count.isdigit() else None,
        restarts=_slurm_number(environment, "SLURM_RESTART_COUNT", "0"),
        array=f"{array}_{task}" if array and task else "",
    )


def _slurm_number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name) or default
    if not text.isdecimal():
        raise config_error(name, f"'{text}' is no number, as Slurm sets it", f"unset {name}, or submit with sbatch")
    return int(text)
