"""`grpo stop`: have a run save and end, or end it at once."""

from __future__ import annotations

import argparse
import os
import signal
import socket

from grpo_recipes.cli.runs import RUN_HELP, how_it_stands, is_over, job_of, named_run
from grpo_recipes.errors import config_error
from grpo_recipes.paths import shown
from grpo_recipes.runs.find import RunFiles
from grpo_recipes.runs.rundir import finish_summary, launcher_of, no_requeue_file, stop_file
from grpo_recipes.slurm.queue import Job, cancel

HELP = "have a run save and end; --now ends it at once"
TAKES_RECIPE = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run and --now."""
    parser.add_argument("which", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--now", action="store_true", help="end it without waiting for the step in flight")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Ask a run to save and end; of a job that waits, take it out of the queue.

    Returns:
        0.

    Raises:
        ConfigError: there is no such run, or nothing of it runs or waits.
    """
    found = named_run(options.which)
    job = job_of(found)
    if is_over(found, job):
        raise config_error(
            options.which, f"{shown(found.folder)} is over: {how_it_stands(found, job)}", "nothing is to be done"
        )
    no_requeue_file(found.folder).touch()
    if job is not None and (job.waits or found.summary.get("status") != "running"):
        cancel(job.id)  # nothing of it runs: there is nothing to save, and nobody who would see a request
        finish_summary(found.folder, status="stopped", cause="taken out of the queue by grpo stop")
        print(f"grpo: job {job.id} is out of the queue; the run directory stays: {shown(found.folder)}")
    elif options.now:
        _end_at_once(found, job)
    else:
        stop_file(found.folder).touch()
        print("grpo: asked: it saves after the step in flight and ends (at once: --now)")
    return 0


def _end_at_once(run: RunFiles, job: Job | None) -> None:
    """By Slurm where it is a job; else by two signals to the launcher, of which the second is final."""
    if job is not None:
        cancel(job.id)
        print(f"grpo: job {job.id} is cancelled; it saves if Slurm leaves it the time")
        return
    host, pid = launcher_of(run.folder)
    if host != socket.gethostname():
        raise config_error("--now", f"the launcher runs on {host}, this is {socket.gethostname()}", "do it there")
    for _ in range(2):
        os.kill(pid, signal.SIGTERM)
    print(f"grpo: its launcher (pid {pid}) was told to end at once")
