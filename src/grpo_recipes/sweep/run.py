"""`grpo sweep` from the question to the comparison. Reads top to bottom in ``start``."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.launch.submission import need_environment, on_scratch, prepare, site_environment, site_resources
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import Resources, find_resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Plan
from grpo_recipes.process.reports import print_line, say
from grpo_recipes.runs.rundir import Run, claim, code_state, is_claimed
from grpo_recipes.slurm.profile import Profile
from grpo_recipes.slurm.sbatch import MaybeSubmitted
from grpo_recipes.sweep.array import submit_array, task_index
from grpo_recipes.sweep.folder import (
    COMPLETED,
    GONE,
    Sweep,
    freeze_cell,
    new_sweep,
    queued,
    read_sweep,
    sweep_root,
    unfinished,
)
from grpo_recipes.sweep.page import write_sweep
from grpo_recipes.sweep.results import text_table
from grpo_recipes.sweep.sequential import Relay, run_cell, run_in_turn
from grpo_recipes.sweep.spec import is_number
from grpo_recipes.sweep.trials import Cell, Question, flags_of, for_each, make_cells


@dataclass(frozen=True)
class Way:
    """Where the runs of a sweep run.

    Attributes:
        profile: the site's for one array job; None: in turn on this machine.
        most: tasks of the array that run at the same time, None for all.
    """

    profile: Profile | None = None
    most: int | None = None

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """The user's variables, with what the site adds."""
        return site_environment(self.profile, environment) if self.profile else environment

    def resources(self, environment: Mapping[str, str]) -> Resources:
        """What a run will have; it is no part of the job in which the sweep itself may run."""
        return site_resources(self.profile) if self.profile else replace(find_resources(environment), job=None)


def start(question: Question, way: Way, environment: Mapping[str, str], new: bool) -> int:
    """Check and plan every run, make the sweep or find the one that is not completed, and run what is left.

    Args:
        question: what is asked for.
        way: where the runs run.
        environment: variables of the user.
        new: begin anew though the same sweep is not completed.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: anything is wrong with any of the runs; nothing was written or started.
    """
    environment = way.environment(environment)
    cells = make_cells(question, environment)
    resources = way.resources(environment)
    _plan_all(cells, resources, environment)
    if way.profile:
        cells = _for_site(cells, question, way.profile, environment)
    sweep = None if new else unfinished(sweep_root(cells[0].recipe), cells)
    if sweep is None:
        return _run_new(new_sweep(question, cells, resources, environment), way, environment)
    say(f"going on with {shown(sweep.folder)}, the same sweep (--new begins another)")
    _restore(sweep, cells, question, resources, environment)
    return _run_gaps(sweep, way, environment)


def start_again(sweep: Sweep, way: Way, environment: Mapping[str, str]) -> int:
    """Run what is not completed in a sweep.

    Raises:
        ConfigError: a run directory is gone, or nothing can be started.
    """
    gone = [sweep.names[index] for index in sweep.gaps() if sweep.status(index) == GONE]
    if gone:
        what = f"the run directory of {', '.join(gone)} is gone"
        raise config_error("--resume", what, f"make it again: {sweep.record['command']}")
    return _run_gaps(sweep, way, way.environment(environment))


def run_task(folder: Path, environment: Mapping[str, str]) -> int:
    """Run the cell of the array task that this process is; every task that ends writes the comparison anew."""
    sweep = read_sweep(folder)
    index = task_index(sweep, environment)
    say(f"cell {index + 1} of {len(sweep.names)}: {sweep.names[index]}")
    code = run_cell(sweep, index, Relay(), environment, None)
    print_line(_written(sweep)[-1])
    return code


def _plan_all(cells: Sequence[Cell], resources: Resources, environment: Mapping[str, str]) -> None:
    """Every run must fit what it will have."""

    def plan(index: int) -> Plan:
        return make_plan(cells[index].recipe, resources, environment)

    for_each([cell.name for cell in cells], plan)


def _for_site(
    cells: Sequence[Cell], question: Question, profile: Profile, environment: Mapping[str, str]
) -> list[Cell]:
    """The cells as that site runs them, looked at as `grpo submit` does.

    Models, data and rewards are loaded once for all cells that differ in numbers alone.
    """
    need_environment(profile)
    unlike: dict[tuple[str, ...], Cell] = {}
    for cell in cells:
        unlike.setdefault(tuple(text for key, text in cell.values.items() if not is_number(key)), cell)
    looked_at = list(unlike.values())

    def look(index: int) -> None:
        flags = flags_of(question, looked_at[index].values)
        prepare(profile, str(question.path), question.asked.task, flags, environment)

    for_each([cell.name for cell in looked_at], look)
    return [replace(cell, recipe=on_scratch(cell.recipe, profile)) for cell in cells]


def _restore(
    sweep: Sweep, cells: Sequence[Cell], question: Question, resources: Resources, environment: Mapping[str, str]
) -> None:
    """Make the run directories again that are gone, if it is still the same code."""
    gone = [cell for cell in cells if sweep.status(cell.index) == GONE]
    code = {key: value for key, value in code_state().items() if key != "patch"}
    if gone and code != sweep.record["code"]:
        what = f"the run directory of {gone[0].name} is gone, and the code is no longer the sweep's"
        raise config_error(shown(sweep.folder), what, "go back to that code, or begin another sweep with --new")
    for cell in gone:
        freeze_cell(sweep, cell, question, resources, environment)


def _run_new(sweep: Sweep, way: Way, environment: Mapping[str, str]) -> int:
    say(f"{len(sweep.names)} runs in {shown(sweep.folder)}")
    try:
        return _run_gaps(sweep, way, environment)
    except MaybeSubmitted:
        raise
    except ConfigError:  # Slurm did not take it: nothing has run
        shutil.rmtree(sweep.folder, ignore_errors=True)
        raise


def _run_gaps(sweep: Sweep, way: Way, environment: Mapping[str, str]) -> int:
    """Run or submit what has not completed and does not run already."""
    lock = claim(Run(sweep.folder, {}))
    try:
        gaps, waiting = sweep.gaps(), queued(sweep)
        left = [index for index in gaps if index not in waiting and not is_claimed(sweep.cell(index))]
        if len(left) < len(sweep.names):
            busy = f", {len(gaps) - len(left)} queued or running" if len(left) < len(gaps) else ""
            say(f"{len(sweep.names) - len(gaps)} of {len(sweep.names)} completed{busy}, {len(left)} to run")
        if way.profile and left:
            return _submit(sweep, left, way.profile, way.most, environment)
        code = run_in_turn(sweep, left, environment)
    finally:
        os.close(lock)
    for line in _written(sweep):
        print_line(line)
    return code


def _submit(
    sweep: Sweep, left: Sequence[int], profile: Profile, most: int | None, environment: Mapping[str, str]
) -> int:
    job = submit_array(sweep, left, profile, most, environment)
    folder = shlex.quote(shown(sweep.folder))
    say(f"job {job} is submitted, a task for each of {len(left)} runs; one's output is in logs/slurm_{job}_TASK.out")
    say(f"the comparison, at any time: grpo report {folder}")
    return 0


def _written(sweep: Sweep) -> list[str]:
    """The page written, and what to print of the sweep; what goes wrong with it is said, since the runs count."""
    try:
        page, results = write_sweep(sweep)
    except Exception as error:
        return [
            f"comparison not written ({type(error).__name__}: {error}); try again: grpo report {shown(sweep.folder)}"
        ]
    left = [f"{result.name} ({result.status})" for result in results if result.status != COMPLETED]
    told = [f"grpo: not completed: {', '.join(left)}"] if left else []
    again = [f"grpo: run them with: grpo sweep --resume {shlex.quote(shown(sweep.folder))}"] if left else []
    return [text_table(sweep, results), *told, *again, f"grpo: comparison in {shown(page)}"]
