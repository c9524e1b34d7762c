"""Whether a stopped run is started again by Slurm, and how."""

from __future__ import annotations

import signal
import subprocess
import threading

from grpo_recipes.launch.resources import SlurmJob
from grpo_recipes.launch.say import say

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
