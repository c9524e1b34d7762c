"""Runs that differ in their seed alone, and what they say together."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_recipes.paths import shown
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.report.chart import Curve
from grpo_recipes.report.curves import MOST_POINTS, known, mean, smooth, window_of
from grpo_recipes.report.read import Column, RunRecord, Table
from grpo_recipes.report.units import NOTHING, short

COLOURS = 7
# Keys that name a run or a place, and change nothing in what is learned.
NO_EXPERIMENT = frozenset(
    {"run_name", "run_root", "report_to", "vllm_server_port", "vllm_group_port", "main_process_port", "save_steps",
     "save_total_limit", "report_samples", "wandb_project", "wandb_entity", "wandb_run_group"}
)  # fmt: skip
# 97.5 % points of Student's t for 1 to 30 degrees of freedom.
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Runs of one recipe with different seeds, or a single run.

    Attributes:
        label: unlike that of any other group.
        runs: at least one.
        number: 0, 1, ... in the order of the command line.
    """

    label: str
    runs: Sequence[RunRecord]
    number: int

    @property
    def colour(self) -> int:
        """1 to 7; groups beyond the seventh are dashed."""
        return self.number % COLOURS + 1

    @property
    def dashed(self) -> bool:
        """Whether its colour is already another group's."""
        return self.number >= COLOURS


def seed_of(run: RunRecord) -> Any:
    """The run's seed; the catalogue's default where the recipe has none."""
    return recipe_value(run, "seed")


def recipe_value(run: RunRecord, key: str) -> Any:
    """A value of the recipe, or the catalogue's default."""
    given = next((setting for setting in run.settings if setting.key == key), None)
    return given.value if given else catalogue().get(key, {}).get("default")


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Runs by what they are beside their seed; runs that share recipe and seed stand alone."""
    alike: dict[str, list[RunRecord]] = {}
    for run in runs:
        alike.setdefault(_signature(run), []).append(run)
    sets = []
    for same in alike.values():
        distinct = len({str(seed_of(run)) for run in same}) == len(same)
        sets.extend([same] if distinct else [[run] for run in same])
    labels = _labels([members[0] for members in sets])
    return [
        Group(f"{label} ({len(members)} seeds)" if len(members) > 1 else label, members, number)
        for number, (members, label) in enumerate(zip(sets, labels, strict=True))
    ]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Run names; where two are the same, the folders' names; where these are too, the folders."""
    for name in (lambda run: str(run.identity.get("run_name") or run.name), lambda run: run.name):
        labels = [name(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [shown(run.folder) for run in runs]


def _signature(run: RunRecord) -> str:
    experiment = {one.key: one.value for one in run.settings if one.key != "seed" and one.key not in NO_EXPERIMENT}
    return json.dumps([run.plan.get("task"), experiment], sort_keys=True, default=str)


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Recipe keys beside the seed whose values are not the same in all groups."""
    keys = sorted({one.key for group in groups for run in group.runs for one in run.settings if one.key != "seed"})
    return [key for key in keys if len({str(recipe_value(group.runs[0], key)) for group in groups}) > 1]


def group_curve(group: Group, name: str, table: str = "metrics") -> Curve | None:
    """A metric of a group: a run's line through its noise, or the mean of the runs' lines with its 95 % interval."""
    tables = [getattr(run, table) for run in group.runs]
    longest = max(tables, key=lambda one: len(one.steps))
    size = -(-len(longest.steps) // MOST_POINTS) or 1
    window = window_of(len(longest.steps))
    lines = [_line(one, name, size, window) for one in tables]
    xs = [longest.steps[min(start + size, len(longest.steps)) - 1] for start in range(0, len(longest.steps), size)]
    columns = [[line[at] for line in lines if at < len(line) and line[at] is not None] for at in range(len(xs))]
    middles = [mean(known(column)) for column in columns]
    if not known(middles):
        return None
    curve = Curve(group.label, xs, middles, group.colour, dashed=group.dashed)
    if len(group.runs) == 1:
        return curve
    return Curve(
        group.label, xs, middles, group.colour, band=_interval_band(columns), band_label="95 %", dashed=group.dashed
    )


def _line(table: Table, name: str, size: int, window: int) -> Column:
    count = len(table.steps)
    return smooth(
        table.column(name), [slice(start, min(start + size, count)) for start in range(0, count, size)], window
    )


def _interval_band(columns: Sequence[Column]) -> tuple[Column, Column]:
    middles = [mean(known(column)) for column in columns]
    halves = [half_interval(known(column)) for column in columns]
    pairs = list(zip(middles, halves, strict=True))
    low: Column = [None if middle is None or half is None else middle - half for middle, half in pairs]
    high: Column = [None if middle is None or half is None else middle + half for middle, half in pairs]
    return low, high


def spread(values: Sequence[float]) -> str:
    """The mean of values with half of its 95 % interval; of a single one the value alone."""
    if not values:
        return NOTHING
    half = half_interval(values)
    return short(sum(values) / len(values)) + ("" if half is None else f" ± {short(half)}")


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean, by Student's t; None of fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    centre = sum(values) / count
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (count - 1))
    factor = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96
    return factor * deviation / math.sqrt(count)
