"""The run a person means, and how it stands: shared by the commands that look after runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs.find import RunFiles
from grpo_recipes.runs.rundir import find_run
from grpo_recipes.slurm.queue import NO_ANSWER, Job, find_job

RUN_HELP = "run directory, its name in RUN_ROOT, last for the newest there, or the id of a Slurm job"
_OVER = ("completed", "failed", "stopped")


def run_root() -> Path:
    """The folder of run directories: RUN_ROOT, or the default of the recipe key."""
    return Path(os.path.expanduser(os.environ.get("RUN_ROOT") or catalogue()["run_root"]["default"]))


def named_run(which: str) -> RunFiles:
    """The run a person means by a folder, a name, a job id or ``last``.

    Raises:
        ConfigError: there is none.
    """
    if which == "last":
        return RunFiles(find_run(run_root(), "last", "last").folder)
    if re.fullmatch(r"\d+(_\d+)?", which):
        return RunFiles(_folder_of_job(which))
    for folder in (Path(which), run_root() / which):
        if os.path.isfile(folder / "run.json"):  # False too for a name that is too long, or not ours
            return RunFiles(folder.absolute())
    fix = "name a run directory, a run in RUN_ROOT, or the id of its job"
    raise config_error(which or "RUN", "is no run directory (no run.json)", fix)


def _folder_of_job(job_id: str) -> Path:
    """By the pointer its launcher or its submission left, else by where its batch script is."""
    pointers = [path for path in (run_root() / ".jobs").glob(f"*-{job_id}") if path.is_file()]
    for pointer in sorted(pointers, key=lambda path: path.stat().st_mtime, reverse=True):
        folder = Path(pointer.read_text().strip())
        if os.path.isfile(folder / "run.json"):
            return folder
    tasks = sorted(path.name.rpartition("-")[2] for path in (run_root() / ".jobs").glob(f"*-{job_id}_*"))
    if tasks:
        fix = f"name one of them, e.g. {tasks[0]}; scancel {job_id} ends them all"
        raise config_error(job_id, f"is an array job of {len(tasks)} runs", fix)
    job = find_job(job_id)
    if job and job.script and os.path.isfile(job.script.parent / "run.json"):
        return job.script.parent
    raise config_error(job_id, "is no job of a run that is known here", "name the run directory, or set RUN_ROOT")


def job_of(run: RunFiles) -> Job | None:
    """The run's last Slurm job as Slurm sees it now; None where it had none, or Slurm does not say."""
    return find_job(run.job_id) if run.job_id else None


def is_over(run: RunFiles, job: Job | None) -> bool:
    """Whether nothing more will come of the run by itself."""
    if job is not None and job.active:
        return False
    status = run.summary.get("status")
    return status in _OVER or not run.is_running()


def how_it_stands(run: RunFiles, job: Job | None) -> str:
    """The run's state in a few words."""
    status = str(run.summary.get("status", "unknown"))
    if job is not None and job.waits:
        return f"waiting in the queue{f' ({job.reason})' if job.reason else ''}"
    if status in _OVER:
        return status
    if job is not None and job.state == NO_ANSWER:
        return f"{status}, but Slurm does not answer"
    if is_over(run, job):
        told = f", its job is {job.state}" if job is not None else ""
        return f"never started{told}" if status == SUBMITTED else f"lost: its launcher is gone{told}"
    return "starting" if status == SUBMITTED else status
