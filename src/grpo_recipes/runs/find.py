"""What a run left behind: its files, its logs, and the keys it was started with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from grpo_recipes.paths import home
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.runs.health import LAST_STEPS, known, mean, number
from grpo_recipes.runs.rundir import JOB_FILE, is_claimed, read_mapping, read_metrics

_HEAD_BYTES, _TAIL_BYTES = 200_000, 400_000


@dataclass(frozen=True)
class RunFiles:
    """A run directory, each of its files read once."""

    folder: Path

    @functools.cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``."""
        return read_mapping(self.folder / "summary.json")

    @functools.cached_property
    def plan(self) -> dict[str, Any]:
        """``plan.json``."""
        return read_mapping(self.folder / "plan.json")

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """``run.json``."""
        return read_mapping(self.folder / "run.json")

    @functools.cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``metrics.jsonl``."""
        return read_metrics(self.folder)

    @functools.cached_property
    def recipe(self) -> dict[str, Any]:
        """The keys given in ``recipe.yaml``."""
        path = self.folder / "recipe.yaml"
        return (yaml.safe_load(path.read_text()) if path.is_file() else None) or {}

    def value(self, key: str) -> Any:
        """Return a key's value in this run: as planned, as given, or its default."""
        if (
            key == "per_device_train_batch_size"
            and (planned := self.plan.get("batch", {}).get("per_device")) is not None
        ):
            return planned
        return self.recipe.get(key, catalogue()[key]["default"])

    @functools.cached_property
    def job(self) -> dict[str, Any]:
        """``job.json``: the last Slurm job of the run, empty where there was none."""
        return read_mapping(self.folder / JOB_FILE)

    @property
    def job_id(self) -> str:
        """Id of its last Slurm job, ``<job>_<task>`` of an array, or an empty text."""
        return str(self.job.get("job") or self.identity.get("job") or "").rpartition("-")[2]

    @property
    def cause(self) -> str:
        """The cause that the launcher noted, or an empty text."""
        return str(self.summary.get("cause") or "")

    @functools.cached_property
    def logs(self) -> dict[str, Path]:
        """The logs of the last attempt that are still there: ``server``, ``trainer``, ``slurm.out``, ``slurm.err``."""
        named = {process["role"]: process["log"] for process in self.plan.get("processes", [])}
        if job := self.job_id:
            named |= {f"slurm.{end}": f"logs/slurm_{job}.{end}" for end in ("out", "err")}
        found = {role: self._log(name) for role, name in named.items()}
        return {role: path for role, path in found.items() if path is not None}

    def _log(self, name: str) -> Path | None:
        """Return a log by its name in the plan, which is relative to where the launch was started."""
        folders = [Path(self.job.get("working_folder", "")), Path(), home(), *self.folder.absolute().parents]
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    @functools.cached_property
    def texts(self) -> dict[str, str]:
        """Beginning and end of each log."""
        return {role: _ends(path) for role, path in self.logs.items()}

    def planned(self, role: str) -> bool:
        """Return whether the plan had a process of that role."""
        return any(process["role"] == role for process in self.plan.get("processes", []))

    def is_running(self) -> bool:
        """Return whether a launch still holds the run directory."""
        return is_claimed(self.folder)

    def numbers(self, key: str, last: int | None = None) -> list[float]:
        """Return the values of a metric that are numbers, in all rows or the last ones."""
        return known(number(row.get(key)) for row in (self.rows[-last:] if last else self.rows))

    def recent(self, key: str) -> float | None:
        """Return the mean of a metric over the last rows, None where they do not have it."""
        return mean(self.numbers(key, LAST_STEPS))

    def keys(self, matches: Callable[[str], bool]) -> list[str]:
        """Return metrics of the last row whose name matches."""
        return sorted(key for key in (self.rows[-1] if self.rows else {}) if matches(key))


def _ends(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        file.seek(max(len(head), size - _TAIL_BYTES))
        return (head + file.read()).decode(errors="replace")
