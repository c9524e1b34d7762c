"""How fast earlier runs like this one were, and so how far a run comes in its time limit."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_recipes.paths import shown
from grpo_recipes.runs.progress import clock

if TYPE_CHECKING:
    from grpo_recipes.plan.types import Names, Plan

_MOST_RUNS = 200  # newest run directories looked at
_MOST_ALIKE = 5  # newest of those that are like this one
_TAIL_BYTES = 1 << 18  # of each metrics.jsonl: a few hundred steps
_WARM_UP_STEPS = 1  # the first step of a run compiles and fills caches


@dataclass(frozen=True)
class Speed:
    """What earlier runs tell.

    Attributes:
        seconds: median seconds of an optimizer step, None without an earlier run.
        runs: how many runs were counted.
        walltime: seconds of the time limit, None where none is known.
        root: where earlier runs were looked for.
    """

    seconds: float | None
    runs: int
    walltime: float | None
    root: str

    @property
    def steps(self) -> int | None:
        """Optimizer steps within the time limit, start and saves not counted."""
        if self.seconds is None or self.walltime is None:
            return None
        return int(self.walltime / self.seconds)

    def as_json(self) -> dict[str, Any]:
        """Plain data: seconds."""
        return {**asdict(self), "steps": self.steps}

    def __str__(self) -> str:
        if self.seconds is None:
            return f"no earlier run in {shown(self.root)} with this name, model, batch and number of trainers"
        runs = f"{self.runs} earlier run{'s' if self.runs > 1 else ''}"
        told = f"{self.seconds:.3g} s a step in {runs}"
        if self.steps is None or self.walltime is None:
            return f"{told}: {3600 / self.seconds:,.0f} steps an hour"
        return f"{told}: about {self.steps:,} steps in {clock(self.walltime)}"


def find_speed(plan: Plan, names: Names, walltime: float | None = None) -> Speed:
    """The speed of earlier runs of the same recipe on as many devices.

    Args:
        plan: the plan.
        names: of the run; earlier ones are looked for beside its directory, and have its name.
        walltime: seconds of the time limit, if there is one.
    """
    root = names.run_dir.parent
    alike = []
    for folder in _newest(root):
        if folder != names.run_dir and _like(_read(folder / "plan.json"), _read(folder / "run.json"), plan, names.run):
            seconds = _step_seconds(folder / "metrics.jsonl")
            if seconds:
                alike.append(statistics.median(seconds))
        if len(alike) == _MOST_ALIKE:
            break
    return Speed(statistics.median(alike) if alike else None, len(alike), walltime, str(root))


def _newest(root: Path) -> list[Path]:
    found = []
    for path in root.glob("*/run.json"):
        try:
            found.append((path.stat().st_mtime, path.parent))
        except OSError:  # removed meanwhile
            continue
    return [folder for _, folder in sorted(found, reverse=True)[:_MOST_RUNS]]


def _read(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none that can be read: run directories are the user's to edit."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _like(old: dict[str, Any], identity: dict[str, Any], plan: Plan, name: str) -> bool:
    batch = old.get("batch")
    if not isinstance(batch, dict):
        return False
    before = (identity.get("run_name"), *(old.get(key) for key in ("task", "model", "flavour", "mode")))
    now = (name, plan.task, plan.model, plan.flavour, plan.mode)
    same = ("completions", "world_size", "tokens")
    return before == now and all(batch.get(key) == getattr(plan.batch, key) for key in same)


def _step_seconds(path: Path) -> list[float]:
    """``seconds/step`` of the last rows; those that are no row are skipped."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    seconds = []
    for line in lines:
        try:
            row = json.loads(line)
            step, value = row["step"], float(row["seconds/step"])
        except (ValueError, KeyError, TypeError):
            continue
        if step > _WARM_UP_STEPS and value > 0:
            seconds.append(value)
    return seconds
