"""The directory of a sweep: ``sweep.json``, a run directory for each cell, and how far they have come."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.sources import find_sources
from grpo_recipes.launch.submission import freeze
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import Recipe, Value
from grpo_recipes.recipe.tasks import entry_of
from grpo_recipes.runs.rundir import code_state, read_json, timestamp, write_json
from grpo_recipes.secrets import masked
from grpo_recipes.sweep.trials import Cell, Question

RECORD = "sweep.json"
FOLDER = "sweeps"  # under run_root
GONE = "gone"  # status of a cell whose run directory is not there
COMPLETED = "completed"
_SQUEUE_SECONDS = 60


@dataclass(frozen=True)
class Sweep:
    """A sweep directory.

    Attributes:
        folder: the directory, absolute.
        record: the content of ``sweep.json``.
    """

    folder: Path
    record: dict[str, Any]

    @property
    def names(self) -> list[str]:
        """The cells by their index."""
        return [str(cell["name"]) for cell in self.record["cells"]]

    def values(self, index: int) -> dict[str, str]:
        """What a cell varies: key -> value as it was written."""
        return dict(self.record["cells"][index]["values"])

    def cell(self, index: int) -> Path:
        """A cell's run directory."""
        return self.folder / "cells" / self.names[index]

    def status(self, index: int) -> str:
        """As in the cell's ``summary.json``, or ``GONE``."""
        summary = read_json(self.cell(index) / "summary.json")
        return str(summary.get("status", "unknown")) if summary else GONE

    def gaps(self) -> list[int]:
        """Indices of the cells that have not completed."""
        return [index for index in range(len(self.names)) if self.status(index) != COMPLETED]

    def add_job(self, job: int) -> None:
        """Remember an array job of this sweep."""
        self.record["jobs"].append(job)
        write_json(self.folder / RECORD, self.record)


def sweep_name(recipe: Recipe) -> str:
    """What a sweep of this recipe is called: the run name, or that of the file."""
    return str(recipe["run_name"] or recipe.path.stem.removeprefix("config_"))


def fingerprint(cells: Sequence[Cell]) -> str:
    """A hash of what the cells are: the same command makes the same one as long as its recipe is the same."""
    given = [
        [cell.name, {key: entry.value for key, entry in cell.recipe.values.items()
                     if cell.recipe.given(key) and key != "run_root"}]
        for cell in cells
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


def sweep_root(recipe: Recipe) -> Path:
    """The folder of sweep directories."""
    return Path(os.path.expanduser(recipe["run_root"])) / FOLDER


def new_sweep(question: Question, cells: Sequence[Cell], resources: Resources, environment: Mapping[str, str]) -> Sweep:
    """Make the directory of a sweep with a frozen run for each cell.

    Args:
        question: what was asked for.
        cells: its cells, each already planned for ``resources``.
        resources: what each run will have.
        environment: variables of the user.

    Raises:
        ConfigError: the directory or one of the runs cannot be made; nothing is left of it then.
    """
    recipe = cells[0].recipe
    stamp = timestamp()
    folder = (sweep_root(recipe) / f"{sweep_name(recipe)}-{stamp}").absolute()
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as error:
        what = f"cannot make the sweep directory {shown(folder)} ({error.strerror})"
        raise config_error("run_root", what, "try again, or name a folder you may write to with run_root") from None
    code = code_state()
    (folder / "code.patch").write_text(masked(code.pop("patch")))
    record = {
        "name": sweep_name(recipe),
        "timestamp": stamp,
        "command": masked(shlex.join(["grpo", *sys.argv[1:]])),
        "recipe": str(question.path.absolute()),
        "flags": [masked(flag) for flag in question.flags],
        "axes": {axis.key: list(axis.values) for axis in question.axes},
        "fingerprint": fingerprint(cells),
        "code": code,
        "jobs": [],
        "cells": [{"name": cell.name, "values": dict(cell.values)} for cell in cells],
    }
    sweep = Sweep(folder, record)
    try:
        for cell in cells:
            freeze_cell(sweep, cell, question, resources, environment)
        write_json(folder / RECORD, record)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sweep


def freeze_cell(
    sweep: Sweep, cell: Cell, question: Question, resources: Resources, environment: Mapping[str, str]
) -> None:
    """Make the run directory of a cell; in W&B its run stands in the sweep's group unless the user named one."""
    recipe = cell.recipe
    if not recipe.given("wandb_run_group"):
        group = Value(sweep.folder.name, "grpo sweep")
        recipe = replace(recipe, values={**recipe.values, "wandb_run_group": group})
    names, sources = names_of(sweep, cell), find_sources(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, entry_of(recipe, question.asked), sources)
    freeze(recipe, plan, sources, names, resources, environment)


def names_of(sweep: Sweep, cell: Cell) -> Names:
    """What a cell's run is called."""
    name = f"{sweep.record['name']}-{cell.name}"
    return Names(sweep.cell(cell.index), name, name, sweep.record["timestamp"])


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep directory.

    Raises:
        ConfigError: it is none, or its record is damaged.
    """
    record = read_json(folder / RECORD)
    if record is None:
        raise config_error(
            shown(folder), f"is no sweep directory (no {RECORD})", f"name a folder under run_root/{FOLDER}"
        )
    return Sweep(folder.absolute(), record)


def find_sweep(root: Path, which: str) -> Sweep:
    """The sweep a person means by ``last`` or a path.

    Args:
        root: folder of sweep directories, for ``last``.
        which: what they wrote.

    Raises:
        ConfigError: there is none, or the folder is no sweep directory.
    """
    if which != "last":
        return read_sweep(Path(which))
    sweeps = sweeps_in(root)
    if not sweeps:
        raise config_error("last", f"there is no sweep in {shown(root)}", "name the sweep directory, or set RUN_ROOT")
    return sweeps[-1]


def is_sweep(folder: Path) -> bool:
    """Whether this is the directory of a sweep."""
    return os.path.isfile(folder / RECORD)  # False too for a name that is too long


def sweeps_in(root: Path) -> list[Sweep]:
    """The sweeps of a folder, the newest last."""
    records = sorted(root.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    return [read_sweep(path.parent) for path in records]


def unfinished(root: Path, cells: Sequence[Cell]) -> Sweep | None:
    """The newest sweep of the same cells that has gaps, or None."""
    mark = fingerprint(cells)
    same = [sweep for sweep in sweeps_in(root) if sweep.record["fingerprint"] == mark and sweep.gaps()]
    return same[-1] if same else None


def queued(sweep: Sweep) -> set[int]:
    """Indices of cells that wait or run in the sweep's array jobs."""
    if not sweep.record["jobs"]:
        return set()
    jobs = ",".join(str(job) for job in sweep.record["jobs"])
    argv = ["squeue", "--noheader", "--array", f"--jobs={jobs}", "--format=%K"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SQUEUE_SECONDS, check=False)
    except FileNotFoundError:
        return set()  # another machine than the one it was submitted from
    except subprocess.TimeoutExpired:
        raise config_error("squeue", f"did not answer within {_SQUEUE_SECONDS} seconds", "try again later") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        raise config_error("squeue", done.stderr.strip() or f"exit code {done.returncode}", "try again later")
    return {int(line) for line in done.stdout.split() if line.isdigit()}
