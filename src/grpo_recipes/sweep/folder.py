"""The directory of a sweep: ``sweep.json``, a run directory for each trial, and how far they have come."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch.submission import freeze
from grpo_recipes.paths import shown
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.recipe import Recipe, Value
from grpo_recipes.runs.rundir import make_folder, read_json, timestamp, write_json
from grpo_recipes.secrets import masked
from grpo_recipes.sweep.spec import SweepSpec, Trial

RECORD = "sweep.json"
FOLDER = "sweeps"  # under run_root
GONE = "gone"  # status of a trial whose run directory is not there
COMPLETED = "completed"


@dataclass(frozen=True)
class Sweep:
    """A sweep directory."""

    folder: Path  # absolute
    record: dict[str, Any]  # the content of sweep.json

    @property
    def names(self) -> list[str]:
        """Return the trials by their index."""
        return [str(trial["name"]) for trial in self.record["cells"]]

    def trial_dir(self, index: int) -> Path:
        """Return a trial's run directory."""
        return self.folder / "cells" / self.names[index]

    def status(self, index: int) -> str:
        """Return the status in the trial's ``summary.json``, or ``GONE``."""
        summary = read_json(self.trial_dir(index) / "summary.json")
        return str(summary.get("status", "unknown")) if summary else GONE

    def gaps(self) -> list[int]:
        """Return the indices of the trials that have not completed."""
        return [index for index in range(len(self.names)) if self.status(index) != COMPLETED]


def fingerprint(trials: Sequence[Trial]) -> str:
    """Return a hash of the trials: the same command makes the same one as long as its recipe is the same."""
    given = []
    for trial in trials:
        keys = (key for key in trial.recipe.values if trial.recipe.given(key) and key != "run_root")
        given.append([trial.name, {key: trial.recipe[key] for key in keys}])
    return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()


def sweep_root(recipe: Recipe) -> Path:
    """Return the folder of sweep directories."""
    return Path(os.path.expanduser(recipe["run_root"])) / FOLDER


def new_sweep(spec: SweepSpec, trials: Sequence[Trial], resources: Resources, environment: Mapping[str, str]) -> Sweep:
    """Make the directory of a sweep with a frozen run for each trial, which is already planned for ``resources``.

    Where the directory or one of the runs cannot be made, nothing is left of it.
    """
    recipe = trials[0].recipe
    stamp, name = timestamp(), str(recipe["run_name"] or recipe.path.stem.removeprefix("config_"))
    folder = (sweep_root(recipe) / f"{name}-{stamp}").absolute()
    begun = make_folder(folder, f"cannot make the sweep directory {shown(folder)}")
    if begun is None:
        raise config_error("run_root", f"{shown(folder)} exists: another sweep has just taken that name", "try again")
    record = {
        "name": name,
        "timestamp": stamp,
        **begun,
        "recipe": str(recipe.path.absolute()),
        "flags": [masked(flag) for flag in spec.flags],
        "axes": {key: list(values) for key, values in spec.axes.items()},
        "fingerprint": fingerprint(trials),
        "jobs": [],
        "cells": [{"name": trial.name, "values": dict(trial.values)} for trial in trials],
    }
    sweep = Sweep(folder, record)
    try:
        for trial in trials:
            freeze_trial(sweep, trial, spec, resources, environment)
        write_json(folder / RECORD, record)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sweep


def freeze_trial(
    sweep: Sweep, trial: Trial, spec: SweepSpec, resources: Resources, environment: Mapping[str, str]
) -> None:
    """Make a trial's run directory; its W&B run belongs to the sweep's group unless the user names another."""
    recipe = trial.recipe
    if not recipe.given("wandb_run_group"):
        recipe = recipe.with_value("wandb_run_group", Value(sweep.folder.name, "grpo sweep"))
    name = f"{sweep.record['name']}-{trial.name}"
    names = Names(sweep.trial_dir(trial.index), name, name, sweep.record["timestamp"])
    assets = find_assets(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, assets)
    freeze(recipe, plan, assets, names, resources, environment)


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep directory; another folder, or a damaged record, is a ``ConfigError``."""
    record = read_json(folder / RECORD)
    if not record:
        fix = f"name a folder under run_root/{FOLDER}"
        raise config_error(shown(folder), f"is not a sweep directory (no {RECORD})", fix)
    return Sweep(folder.absolute(), record)


def find_sweep(root: Path, which: str) -> Sweep:
    """Return the sweep that a person means by a path, or by ``last``: the newest in ``root``."""
    if which != "last":
        return read_sweep(Path(which))
    if sweeps := _sweeps_in(root):
        return sweeps[-1]
    raise config_error("last", f"there is no sweep in {shown(root)}", "name the sweep directory, or set RUN_ROOT")


def is_sweep(folder: Path) -> bool:
    """Return whether this is the directory of a sweep."""
    return os.path.isfile(folder / RECORD)  # False too for a name that is too long


def unfinished(root: Path, trials: Sequence[Trial]) -> Sweep | None:
    """Return the newest sweep of the same trials that has gaps, or None."""
    mark = fingerprint(trials)
    same = [sweep for sweep in _sweeps_in(root) if sweep.record["fingerprint"] == mark and sweep.gaps()]
    return same[-1] if same else None


def _sweeps_in(root: Path) -> list[Sweep]:
    """Return the sweeps of a folder, the newest last."""
    records = sorted(root.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    return [read_sweep(path.parent) for path in records]
