"""A sweep as one array job: a task for each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.launch.resolve_run import note_job
from grpo_recipes.launch.submission import frozen_environment
from grpo_recipes.recipe import read_frozen
from grpo_recipes.slurm.profile import Profile
from grpo_recipes.slurm.queue import cluster_name
from grpo_recipes.slurm.sbatch import submit
from grpo_recipes.slurm.script import Request, render
from grpo_recipes.sweep.folder import Sweep

INDEX = "SLURM_ARRAY_TASK_ID"


def submit_array(
    sweep: Sweep, indices: Sequence[int], profile: Profile, most: int | None, environment: Mapping[str, str]
) -> int:
    """Submit cells as one array job.

    Args:
        sweep: the sweep.
        indices: the cells to run, at least one.
        profile: the site's.
        most: tasks that may run at the same time, None for no limit.
        environment: variables of the user.

    Returns:
        The job id, which the sweep remembers.

    Raises:
        ConfigError: the log folder or the script cannot be written, or sbatch refuses.
    """
    request = Request(
        job_name=profile.job_name or str(sweep.record["name"]),
        array=array_text(indices, most),
        output="logs/slurm_%A_%a.out",
        error="logs/slurm_%A_%a.err",
        chdir=Path.cwd(),
    )
    script = sweep.folder / "job.sh"
    variables = frozen_environment(sweep.cell(indices[0]), environment)
    try:
        Path("logs").mkdir(exist_ok=True)  # Slurm opens its logs before the script runs
        script.write_text(render(profile, request, ["grpo", "sweep", "--cell", str(sweep.folder)], variables))
    except OSError as error:
        what = f"cannot write {error.filename} ({error.strerror})"
        raise config_error("working folder", what, "submit from a folder you may write to") from None
    job = submit(script, Path.cwd())
    sweep.add_job(job)
    cluster = cluster_name()
    for index in indices:
        recipe = read_frozen(sweep.cell(index) / "recipe.yaml")
        note_job(sweep.cell(index), recipe, f"{cluster}-{job}_{index}")
    return job


def array_text(indices: Sequence[int], most: int | None = None) -> str:
    """Indices as sbatch's ``--array`` takes them, e.g. ``0-2,5%2``."""
    ends: list[list[int]] = []
    for index in sorted(indices):
        if ends and ends[-1][-1] == index - 1:
            ends[-1] = [ends[-1][0], index]
        else:
            ends.append([index])
    return ",".join("-".join(map(str, run)) for run in ends) + (f"%{most}" if most else "")


def task_index(sweep: Sweep, environment: Mapping[str, str]) -> int:
    """The cell of the array task we are.

    Raises:
        ConfigError: we are none, or of another sweep.
    """
    text = environment.get(INDEX, "")
    if not text.isdecimal() or int(text) >= len(sweep.names):
        raise config_error(INDEX, f"'{text}' is no cell of {sweep.folder.name}", "submit with grpo sweep --slurm")
    return int(text)
