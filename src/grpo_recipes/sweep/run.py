"""`grpo sweep` from the command line to the comparison. Reads top to bottom in ``start``."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch.resolve_run import note_job
from grpo_recipes.launch.submission import (
    frozen_environment,
    need_environment,
    on_scratch,
    prepare,
    site_environment,
    site_resources,
    submit_script,
)
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Plan
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.recipe import read_frozen
from grpo_recipes.runs.rundir import Run, claim, code_state, is_claimed
from grpo_recipes.slurm.client import MaybeSubmitted, cluster_name, tasks_in_queue
from grpo_recipes.slurm.profile import Profile, Request, render
from grpo_recipes.sweep.folder import (
    COMPLETED,
    GONE,
    Sweep,
    freeze_trial,
    new_sweep,
    read_sweep,
    sweep_root,
    unfinished,
)
from grpo_recipes.sweep.page import write_sweep
from grpo_recipes.sweep.results import text_table
from grpo_recipes.sweep.sequential import SignalForwarder, run_sequentially, run_trial
from grpo_recipes.sweep.spec import SweepSpec, Trial, for_each, is_number, make_trials

INDEX = "SLURM_ARRAY_TASK_ID"


@dataclass(frozen=True)
class Backend:
    """Where the runs of a sweep run."""

    profile: Profile | None = None  # of the site, for one array job; None: sequentially on this machine
    most: int | None = None  # tasks of the array that run at the same time, None for all

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """Return the user's variables, with what the site adds."""
        return site_environment(self.profile, environment) if self.profile else environment

    def resources(self, environment: Mapping[str, str]) -> Resources:
        """Return what a run will have; it is not part of the job in which the sweep itself may run."""
        return site_resources(self.profile) if self.profile else replace(find_resources(environment), job=None)


def start(spec: SweepSpec, backend: Backend, environment: Mapping[str, str], new: bool) -> int:
    """Check and plan every run, make the sweep or find the one that is not completed, and run what is left.

    Args:
        spec: what the runs are.
        backend: where they run.
        environment: variables of the user.
        new: begin anew though the same sweep is not completed.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: anything is wrong with any of the runs; nothing was written or started.
    """
    environment = backend.environment(environment)
    trials = make_trials(spec, environment)
    resources = backend.resources(environment)
    _plan_all(trials, resources, environment)
    if backend.profile:
        trials = _for_site(trials, spec, backend.profile, environment)
    sweep = None if new else unfinished(sweep_root(trials[0].recipe), trials)
    if sweep is None:
        return _run_new(new_sweep(spec, trials, resources, environment), backend, environment)
    say(f"going on with {shown(sweep.folder)}, the same sweep (--new begins another)")
    _restore(sweep, trials, spec, resources, environment)
    return _run_gaps(sweep, backend, environment)


def start_again(sweep: Sweep, backend: Backend, environment: Mapping[str, str]) -> int:
    """Run what is not completed in a sweep; a run directory that is gone is a ``ConfigError``."""
    gone = [sweep.names[index] for index in sweep.gaps() if sweep.status(index) == GONE]
    if gone:
        what = f"the run directory of {', '.join(gone)} is gone"
        raise config_error("--resume", what, f"make it again: {sweep.record['command']}")
    return _run_gaps(sweep, backend, backend.environment(environment))


def run_task(folder: Path, environment: Mapping[str, str]) -> int:
    """Run the trial of the array task that this process is; every task that ends writes the comparison anew."""
    sweep = read_sweep(folder)
    index = task_index(sweep, environment)
    say(f"trial {index + 1} of {len(sweep.names)}: {sweep.names[index]}")
    code = run_trial(sweep, index, SignalForwarder(), environment, None)
    print_line(_comparison(sweep)[-1])
    return code


def _plan_all(trials: Sequence[Trial], resources: Resources, environment: Mapping[str, str]) -> None:
    """Refuse runs that do not fit what they will have."""

    def plan(index: int) -> Plan:
        return make_plan(trials[index].recipe, resources, environment)

    for_each([trial.name for trial in trials], plan)


def _for_site(
    trials: Sequence[Trial], spec: SweepSpec, profile: Profile, environment: Mapping[str, str]
) -> list[Trial]:
    """Return the trials as that site runs them, each checked as `grpo submit` does.

    Models, data and rewards are loaded once for all trials that differ in numbers alone.
    """
    need_environment(profile)
    unlike: dict[tuple[str, ...], Trial] = {}
    for trial in trials:
        unlike.setdefault(tuple(text for key, text in trial.values.items() if not is_number(key)), trial)
    checked = list(unlike.values())

    def check(index: int) -> None:
        prepare(profile, str(spec.path), spec.asked.task, spec.flags_of(checked[index].values), environment)

    for_each([trial.name for trial in checked], check)
    return [replace(trial, recipe=on_scratch(trial.recipe, profile)) for trial in trials]


def _restore(
    sweep: Sweep, trials: Sequence[Trial], spec: SweepSpec, resources: Resources, environment: Mapping[str, str]
) -> None:
    """Make the run directories again that are gone, if it is still the same code."""
    gone = [trial for trial in trials if sweep.status(trial.index) == GONE]
    code = {key: value for key, value in code_state().items() if key != "patch"}
    if gone and code != sweep.record["code"]:
        what = f"the run directory of {gone[0].name} is gone, and the code is no longer the sweep's"
        raise config_error(shown(sweep.folder), what, "go back to that code, or begin another sweep with --new")
    for trial in gone:
        freeze_trial(sweep, trial, spec, resources, environment)


def _run_new(sweep: Sweep, backend: Backend, environment: Mapping[str, str]) -> int:
    say(f"{len(sweep.names)} runs in {shown(sweep.folder)}")
    try:
        return _run_gaps(sweep, backend, environment)
    except MaybeSubmitted:
        raise
    except ConfigError:  # Slurm did not take it: nothing has run
        shutil.rmtree(sweep.folder, ignore_errors=True)
        raise


def _run_gaps(sweep: Sweep, backend: Backend, environment: Mapping[str, str]) -> int:
    """Run or submit what has not completed and does not run already."""
    lock = claim(Run(sweep.folder, {}))
    try:
        gaps, waiting = sweep.gaps(), queued(sweep)
        left = [index for index in gaps if index not in waiting and not is_claimed(sweep.trial_dir(index))]
        if len(left) < len(sweep.names):
            busy = f", {len(gaps) - len(left)} queued or running" if len(left) < len(gaps) else ""
            say(f"{len(sweep.names) - len(gaps)} of {len(sweep.names)} completed{busy}, {len(left)} to run")
        if backend.profile and left:
            job = submit_array(sweep, left, backend.profile, backend.most, environment)
            say(f"job {job} is submitted, a task for each of {len(left)} runs; "
                f"one's output is in logs/slurm_{job}_TASK.out")  # fmt: skip
            say(f"the comparison, at any time: grpo report {shlex.quote(shown(sweep.folder))}")
            return 0
        code = run_sequentially(sweep, left, environment)
    finally:
        os.close(lock)
    for line in _comparison(sweep):
        print_line(line)
    return code


def _comparison(sweep: Sweep) -> list[str]:
    """Write the page and return what to print; a page that cannot be written fails no sweep, since the runs count."""
    try:
        page, results = write_sweep(sweep)
    except Exception as error:
        again = f"try again: grpo report {shown(sweep.folder)}"
        return [f"comparison not written ({type(error).__name__}: {error}); {again}"]
    lines = [text_table(sweep, results)]
    left = [f"{result.name} ({result.status})" for result in results if result.status != COMPLETED]
    if left:
        lines.append(f"grpo: not completed: {', '.join(left)}")
        lines.append(f"grpo: run them with: grpo sweep --resume {shlex.quote(shown(sweep.folder))}")
    return [*lines, f"grpo: comparison in {shown(page)}"]


def submit_array(
    sweep: Sweep, indices: Sequence[int], profile: Profile, most: int | None, environment: Mapping[str, str]
) -> int:
    """Submit trials as one array job, of which at most ``most`` tasks run at a time; record and return its id.

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
    variables = frozen_environment(sweep.trial_dir(indices[0]), environment)
    script = render(profile, request, ["grpo", "sweep", "--cell", str(sweep.folder)], variables)
    job = submit_script(sweep.folder, script)
    sweep.add_job(job)
    cluster = cluster_name()
    for index in indices:
        recipe = read_frozen(sweep.trial_dir(index) / "recipe.yaml")
        note_job(sweep.trial_dir(index), recipe, f"{cluster}-{job}_{index}")
    return job


def array_text(indices: Sequence[int], most: int | None = None) -> str:
    """Return indices as sbatch's ``--array`` takes them, e.g. ``0-2,5%2``."""
    ranges = []
    for _, members in groupby(enumerate(sorted(indices)), lambda item: item[1] - item[0]):
        run = [index for _, index in members]
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ",".join(ranges) + (f"%{most}" if most else "")


def task_index(sweep: Sweep, environment: Mapping[str, str]) -> int:
    """Return the trial of the array task that this process is, from the variable Slurm sets."""
    text = environment.get(INDEX, "")
    if not text.isdecimal() or int(text) >= len(sweep.names):
        what = f"'{text}' is not a trial of {sweep.folder.name}"
        raise config_error(INDEX, what, "submit with grpo sweep --slurm")
    return int(text)


def queued(sweep: Sweep) -> set[int]:
    """Return the indices of trials that wait or run in the sweep's array jobs."""
    return tasks_in_queue(sweep.record["jobs"])
