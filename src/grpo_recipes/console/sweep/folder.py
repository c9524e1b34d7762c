"""The directory of a sweep: ``sweep.json``, a run directory per trial, and the comparison (page and table).

``create_sweep`` makes it, ``Sweep.read`` reads it, and ``write_sweep_page`` writes the comparison. ``sweep.json`` only
has names and values of the trials; their status and results are always read from the run directories.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from grpo_recipes.console.report.comparison import (
    compare_groups,
    find_differing_facts,
    is_ranked,
    link_reports,
    make_comparison_headline,
    make_group,
)
from grpo_recipes.console.report.page import NOTHING, SMOKE_BADGE, format_mean, format_number, render
from grpo_recipes.console.report.pages import UNFINISHED
from grpo_recipes.console.report.read import Group, RunRecord, read_run
from grpo_recipes.console.sweep.heat_map import make_heat_maps
from grpo_recipes.console.sweep.spec import SEED, SweepSpec, Trial
from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import find_assets
from grpo_recipes.launch.submission import Submission, freeze_run
from grpo_recipes.paths import display_path, shell_path
from grpo_recipes.plan.devices import Resources
from grpo_recipes.plan.plan import make_plan
from grpo_recipes.plan.types import Names
from grpo_recipes.process.reports import align_columns
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.document import Value
from grpo_recipes.runs.benchmark import compute_numbers
from grpo_recipes.runs.checkpoints import find_newest_complete
from grpo_recipes.runs.groups import COMPLETED, GONE, RunGroup
from grpo_recipes.runs.health import drop_missing, finite_number
from grpo_recipes.runs.rundir import (
    CELLS,
    Run,
    create_recorded_folder,
    read_json,
    timestamp,
    write_atomically,
    write_json,
)
from grpo_recipes.secrets import mask_secrets

RECORD = "sweep.json"
FOLDER = "sweeps"  # under run_root
PAGE = "sweep.html"
REWARD = "reward"  # default metric of a search: the final reward, which also ranks a comparison
_LOCK_SECONDS = 60
_MEASURED_AXES = frozenset({"weight_sync", "vllm_mode"})  # keys swept to compare speed and memory
_MEASURES = ("update s", "sync s", "mem GB", "save MB")
_MEASURES_NOTE = "mem: peak of the first training process, without the server; save: newest checkpoint"
_RECORD_TYPES = dict.fromkeys(("name", "timestamp", "command", "fingerprint"), str) | {
    "axes": dict,
    "jobs": list,
    "cells": list,
}


@dataclass(frozen=True)
class Sweep(RunGroup):
    """A sweep directory; ``record`` is the content of its sweep.json."""

    kind: ClassVar[str] = "sweep"
    parent: ClassVar[str] = FOLDER
    record_file: ClassVar[str] = RECORD

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``sweep.json`` of a sweep directory; raise ConfigError if it is missing or damaged."""
        record = read_json(folder / RECORD)
        if not record:
            fix = f"use a folder under run_root/{FOLDER}"
            raise config_error(display_path(folder), f"not a sweep directory (no {RECORD})", fix)
        damaged = [key for key, expected in _RECORD_TYPES.items() if not isinstance(record.get(key), expected)]
        if damaged or not all(_is_trial(entry, record["axes"]) for entry in record["cells"]):
            message = f"damaged: '{(damaged or ['cells'])[0]}' has an unexpected value"
            raise config_error(display_path(folder / RECORD), message, "restore it, or move the folder away")
        return cls(folder.absolute(), record)

    @property
    def names(self) -> list[str]:
        """The names of the trials so far, in the order of their indices."""
        return [str(trial["name"]) for trial in self.record["cells"]]

    def trial_dir(self, index: int) -> Path:
        """Return the path of a trial's run directory; it need not exist."""
        return self.folder / CELLS / self.names[index]

    def find_unfinished_trials(self) -> list[int]:
        """Return the indices of trials that are not completed; in a search, of trials without a recorded result."""
        if "search" in self.record:
            return [index for index, trial in enumerate(self.record["cells"]) if "value" not in trial]
        return [index for index in range(len(self.names)) if self.status(index) != COMPLETED]

    @property
    def trial_count(self) -> int:
        """The number of trials at the end; a search adds them during its runs."""
        trials: int = self.record.get("search", {}).get("trials", 0)
        return max(len(self.names), trials)

    def is_over(self) -> bool:
        """Return whether no trial remains to run; without a search, failed trials remain, since they run again."""
        return not self.find_unfinished_trials() and len(self.names) == self.trial_count

    def resume_command(self) -> str:
        """Return the shell command that continues the sweep; for a search, the command that started it."""
        if "search" in self.record:
            return str(self.record["command"])
        return f"grpo sweep --resume {shell_path(self.folder)}"


def hash_sweep(spec: SweepSpec, trials: Sequence[Trial]) -> str:
    """Return a hash of the trials' names and the recipe keys that are set, to recognize the same sweep again.

    run_root does not count. The hash of a search also covers its metric and its ranges, but not the number of trials,
    which may be raised.
    """
    content: list[Any] = [[spec.search.metric, repr(spec.search.spans)]] if spec.search else []
    for trial in trials:
        keys = (key for key in trial.recipe.values if trial.recipe.is_set(key) and key != "run_root")
        content.append([trial.name, {key: trial.recipe[key] for key in keys}])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def get_sweep_root(recipe: Recipe) -> Path:
    """Return the folder of sweep directories: ``sweeps`` in the recipe's run_root."""
    return Path(os.path.expanduser(recipe.run.root)) / FOLDER


def create_sweep(
    spec: SweepSpec, trials: Sequence[Trial], resources: Resources, environment: Mapping[str, str]
) -> Sweep:
    """Create the directory of a sweep with ``sweep.json`` and a run directory per trial, and return the sweep.

    ``resources`` are the devices of a run. For a search, the run directories are created later. If anything fails, the
    sweep's directory is removed again. Raise ConfigError if it exists already.
    """
    recipe = trials[0].recipe
    stamp, name = timestamp(), recipe.run.name or recipe.path.stem.removeprefix("config_")
    folder = (get_sweep_root(recipe) / f"{name}-{stamp}").absolute()
    start_record = create_recorded_folder(folder, f"can't create the sweep directory {display_path(folder)}")
    if start_record is None:
        raise config_error(
            "run_root", f"{display_path(folder)} exists: another sweep has just used that name", "try again"
        )
    record = {
        "name": name,
        "timestamp": stamp,
        **start_record,
        "recipe": str(recipe.path.absolute()),
        "flags": [mask_secrets(flag) for flag in spec.flags],
        "axes": {key: list(values) for key, values in spec.axes.items()},
        "fingerprint": hash_sweep(spec, trials),
        "jobs": [],
        "cells": [{"name": trial.name, "values": dict(trial.values)} for trial in trials],
    }
    if spec.search:
        record |= {"cells": [], "search": {"trials": spec.search.trials, "metric": spec.search.metric}}
    sweep = Sweep(folder, record)
    try:
        for trial in [] if spec.search else trials:
            create_trial_directory(sweep, trial, resources, environment)
        write_json(folder / RECORD, record)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return sweep


def create_trial_directory(sweep: Sweep, trial: Trial, resources: Resources, environment: Mapping[str, str]) -> None:
    """Create a trial's run directory with copies of recipe, plan and code, from which the trial is launched later.

    The name of the sweep becomes the W&B group, unless the recipe sets wandb_run_group.
    """
    recipe = trial.recipe
    if not recipe.is_set("wandb_run_group"):
        recipe = recipe.with_value("wandb_run_group", Value(sweep.folder.name, "grpo sweep"))
    name = f"{sweep.record['name']}-{trial.name}"
    names = Names(sweep.trial_dir(trial.index), name, name, sweep.record["timestamp"])
    assets = find_assets(recipe, environment)
    plan = make_plan(recipe, resources, environment, names, assets)
    freeze_run(Submission(recipe, names, resources, assets, plan, environment))


def _is_trial(entry: Any, axes: Mapping[str, Any]) -> bool:
    """Return whether an entry of sweep.json is valid: it has a name, and a text as the value of every axis."""
    match entry:
        case {"name": str(), "values": dict(values)}:
            return values.keys() == axes.keys() and all(isinstance(text, str) for text in values.values())
    return False


def find_sweep(root: Path, name: str) -> Sweep:
    """Return the sweep in the folder ``name``, or the newest sweep in ``root`` if ``name`` is "last".

    Raise ConfigError if there is none.
    """
    if name != "last":
        return Sweep.read(Path(name))
    if sweeps := Sweep.list_all(root):
        return sweeps[0]
    raise config_error(
        "last", f"no sweeps found in {display_path(root)}", "use the path of a sweep directory, or set RUN_ROOT"
    )


def find_unfinished_sweep(spec: SweepSpec, trials: Sequence[Trial], elsewhere: Sequence[Path]) -> Sweep | None:
    """Return the newest unfinished sweep with the same hash (``hash_sweep``), or None if there is none.

    Search the sweeps in the recipe's run_root, then in the run_roots ``elsewhere``. The returned
    sweep of a search with Optuna has the number of trials in ``spec``; its file is not changed.
    """
    same, roots = hash_sweep(spec, trials), [get_sweep_root(trials[0].recipe), *(root / FOLDER for root in elsewhere)]
    for sweep in (sweep for root in roots for sweep in Sweep.list_all(root) if sweep.record["fingerprint"] == same):
        if spec.search:
            sweep.record["search"]["trials"] = spec.search.trials
        if not sweep.is_over():
            return sweep
    return None


# --- the results


@dataclass(frozen=True)
class Result:
    """A trial and the result of its run."""

    name: str
    values: dict[str, str]  # varied key -> value as the user wrote it
    status: str  # as in ``summary.json``, or ``GONE``
    run: RunRecord | None  # None if the directory is gone
    cause: str  # why it did not complete, or ""


def read_results(sweep: Sweep) -> list[Result]:
    """Read the results of all trials, in the order of their indices; raise ConfigError if a run's file is damaged."""
    results = []
    for index, trial in enumerate(sweep.record["cells"]):
        status = sweep.status(index)
        run = None if status == GONE else read_run(sweep.trial_dir(index))
        cause = "" if run is None or status == COMPLETED else str(run.summary.get("cause") or "")
        results.append(Result(trial["name"], trial["values"], status, run, cause))
    return results


def group_results(sweep: Sweep, results: Sequence[Result]) -> list[Group]:
    """Return groups of completed trials that differ only in their seed, one group per combination of other values."""
    by_label: dict[str, list[RunRecord]] = {}
    for result in results:
        if result.run is not None and result.status == COMPLETED:
            label = ", ".join(f"{key}={value}" for key, value in result.values.items() if key != SEED)
            by_label.setdefault(label or str(sweep.record["name"]), []).append(result.run)
    return [make_group(label, runs, number) for number, (label, runs) in enumerate(by_label.items())]


def format_table(sweep: Sweep, results: Sequence[Result]) -> str:
    """Return a text table with a row per trial: values, status, steps, first and last reward, and last evaluation.

    If the seed is varied, a second table has the means over seeds with 95 % intervals. If the weight sync method or the
    vLLM mode is varied, rows also have seconds, memory and checkpoint size. For a search, the last line has the best
    trial.
    """
    keys = list(sweep.record["axes"])
    measures = not _MEASURED_AXES.isdisjoint(keys)
    rows = [(*keys, "status", "steps", "reward", "evaluation", *(_MEASURES if measures else ()))]
    for result in results:
        steps = rewards = evaluation = NOTHING
        if result.run is not None:
            outcome, evaluation = result.run.outcome, format_number(result.run.evals.last("eval_reward"))
            rewards = (
                NOTHING if outcome.last is None else f"{format_number(outcome.first)} -> {format_number(outcome.last)}"
            )
            steps = f"{outcome.steps:,.0f}"
        cells = (*(result.values[key] for key in keys), result.status, steps, rewards, evaluation)
        rows.append((*cells, *(_read_measures(result.run) if measures else ())))
    lines = [*align_columns(rows), *([_MEASURES_NOTE] if measures else [])]
    if SEED in keys:
        groups = group_results(sweep, results)
        means = [
            (group.label, *(format_mean(values, limits=group.limits) for values in (group.finals, group.evaluations)))
            for group in groups
        ]
        lines += ["", *align_columns([("mean of", "reward", "evaluation"), *means])]
        lines += [make_comparison_headline(groups, ranked=is_ranked(find_differing_facts(groups)))] if groups else []
    if "search" in sweep.record:
        values = [(trial["value"], trial["name"]) for trial in sweep.record["cells"] if trial.get("value") is not None]
        if values:
            value, name = max(values, key=lambda pair: pair[0])
            best = f"highest {sweep.record['search']['metric']} of {len(values)} trials: {format_number(value)}"
            lines.append(f"{best} by {name} (a single seed; sweep its values over seed=1..5 to confirm)")
    return "\n".join(lines)


def _read_measures(run: RunRecord | None) -> list[str]:
    """Read the metrics and the newest checkpoint in a run's folder, and return four table cells.

    They are seconds per update, seconds per weight sync, memory in GB and checkpoint size in MB. An unknown value is a
    dash. If ``run`` is None or has no steps, nothing is read and all cells are dashes.
    """
    if run is None or not run.outcome.steps:
        return [NOTHING] * len(_MEASURES)
    numbers = compute_numbers(Run(run.folder))
    checkpoint = find_newest_complete(run.folder / "checkpoints")
    files = [path for path in checkpoint.rglob("*") if path.is_file()] if checkpoint else []
    size = sum(path.stat().st_size for path in files) / 1e6
    memory = numbers.get("peak_gpu_memory_gb", numbers.get("peak_process_memory_gb"))
    values = (numbers["avg_step_time_seconds"], numbers["avg_sync_time_seconds"], memory, size or None)
    return [NOTHING if value is None else format_number(value) for value in values]


def read_metric_value(folder: Path, metric: str) -> float | None:
    """Return the value of a search metric from a completed run's directory, or None if the run does not have it.

    The metric is the final reward, the last evaluation (``eval_...``), or a benchmark score (``math_500/pass@1``).
    """
    run = read_run(folder)
    benchmark, _, score = metric.partition("/")
    if metric == REWARD:
        return run.outcome.last
    if metric.startswith("eval_"):
        return run.evals.last(metric)
    return next(iter(drop_missing([finite_number(run.benchmarks.get(benchmark, {}).get(score))])), None)


def check_metric(recipe: Recipe, metric: str) -> None:
    """Raise ConfigError if the runs of a search can't have the metric.

    Valid are ``reward``, ``eval_NAME`` if the recipe evaluates, and ``BENCHMARK/SCORE`` for a benchmark of the recipe.
    NAME and SCORE are not checked.
    """
    benchmark, _, score = metric.partition("/")
    if metric == REWARD or (metric.startswith("eval_") and recipe.evaluation.strategy != "no"):
        return
    if metric.startswith("eval_"):
        fix = "add e.g. --eval_strategy steps --eval_steps 10"
        raise config_error(f"--metric {metric}", "the runs do not evaluate", fix)
    if not score or benchmark not in recipe.evaluation.benchmarks:
        fix = f"use {REWARD}, an evaluation metric such as eval_reward, or a benchmark of the recipe: math_500/pass@1"
        raise config_error(f"--metric {metric}", "these runs have no such metric", fix)


def write_sweep_page(sweep: Sweep, path: Path | None = None) -> tuple[Path, list[Result]]:
    """Write the HTML page of a sweep, by default ``sweep.html`` in its directory; return its path and all results.

    The sweep may be unfinished. A lock file prevents two processes from writing at the same time. Raise ConfigError if
    a file of a trial is damaged, and OSError if the page can't be written.
    """
    path = path or sweep.folder / PAGE
    # Trials of an array job may end at the same time: an older page must not replace the newest one.
    with (sweep.folder / "page.lock").open("w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            _lock_file(lock.fileno())
        results = read_results(sweep)
        groups, name = group_results(sweep, results), sweep.folder.name
        done = sum(result.status == COMPLETED for result in results)
        badges = [(f"{done} of {len(results)} completed", "completed" if done == len(results) else "running")]
        badges += [SMOKE_BADGE] if any(result.run and result.run.summary.get("smoke") for result in results) else []
        page_folder = path.absolute().parent
        reports = link_reports((result.run for result in results if result.run is not None), page_folder)
        values = compare_groups(groups, page_folder)
        values |= {"axes": list(sweep.record["axes"]), "results": results, "reports": reports}
        trials = [(result.values, result.run.outcome.last if result.run and result.status == COMPLETED else None)
                  for result in results]  # fmt: skip
        values["heat_maps"] = make_heat_maps(values["axes"], trials)
        values["live"] = any(result.status in (*UNFINISHED, "submitted") for result in results)
        values |= {} if groups else {"headline": "No trial has completed yet."}
        write_atomically(path, render("sweep.html.j2", title=f"Sweep {name}", name=name, badges=badges, **values))
    return path, results


def _lock_file(descriptor: int) -> None:
    """Wait for an exclusive lock of an open file; after a minute, return without the lock."""
    for _ in range(_LOCK_SECONDS):
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(1)
