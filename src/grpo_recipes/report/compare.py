"""The page that compares runs; those that differ in their seed alone are one group, with an interval over the seeds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.paths import shown
from grpo_recipes.report.chart import Chart, curve_of
from grpo_recipes.report.page import render, spread
from grpo_recipes.report.read import RunRecord, read_run
from grpo_recipes.report.run_charts import METRICS, note_of, reward_bounds, reward_names
from grpo_recipes.report.single import BASELINES
from grpo_recipes.runs.health import known, number
from grpo_recipes.runs.rundir import write_whole
from grpo_recipes.stats import score_names

COLOURS = 7
# Keys that name a run or a place, and change nothing in what is learned.
NO_EXPERIMENT = frozenset(
    {"run_name", "run_root", "report_to", "vllm_server_port", "vllm_group_port", "main_process_port", "save_steps",
     "save_total_limit", "report_samples", "wandb_project", "wandb_entity", "wandb_run_group"}
)  # fmt: skip
# Facts beside the recipe that may differ.
_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.batch.get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
}


@dataclass(frozen=True)
class Group:
    """Runs of one recipe with different seeds, or a single run."""

    label: str  # unlike that of any other group
    runs: Sequence[RunRecord]  # at least one
    colour: int  # 1 to 7
    kind: str  # of its curves: dashed where their colour is already another group's

    @property
    def finals(self) -> list[float]:
        """The final reward of each run that has one."""
        return known(run.outcome.last for run in self.runs)

    @property
    def evaluations(self) -> list[float]:
        """The last evaluation of each run that has one."""
        return known(run.evals.last("eval_reward") for run in self.runs)

    def scores(self, benchmark: str, key: str) -> list[float]:
        """Return a benchmark's score of each run that has it."""
        return known(number(run.benchmarks.get(benchmark, {}).get(key)) for run in self.runs)


def group_of(label: str, runs: Sequence[RunRecord], number: int) -> Group:
    """Return the group of this number, from 0 on; its label has its number of seeds."""
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return Group(label + seeds, runs, number % COLOURS + 1, "line" if number < COLOURS else "line dashed")


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Return runs by all but their seed; runs that share recipe and seed are groups of their own."""
    alike: dict[str, list[RunRecord]] = {}
    for run in runs:
        given = {key: one.value for key, one in run.settings.items() if key != "seed" and key not in NO_EXPERIMENT}
        signature = json.dumps([run.plan.get("task"), given], sort_keys=True, default=str)
        alike.setdefault(signature, []).append(run)
    sets = []
    for same in alike.values():
        distinct = len({str(run.value("seed")) for run in same}) == len(same)
        sets.extend([same] if distinct else [[run] for run in same])
    firsts = [members[0] for members in sets]
    # The folders' names where two run names are the same, and the folders where these are too.
    names = [str(run.identity.get("run_name") or run.name) for run in firsts], [run.name for run in firsts]
    labels = next((found for found in names if len(set(found)) == len(found)), [shown(run.folder) for run in firsts])
    return [group_of(label, members, place) for place, (members, label) in enumerate(zip(sets, labels, strict=True))]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page that compares runs, and return its path; a folder named twice counts once.

    Raise ConfigError where a folder is not a run directory, OSError where the page cannot be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_whole(path, comparison_page([read_run(folder) for folder in unique]))
    return path


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as text."""
    title = f"{len(runs)} runs"
    values = comparison(grouped(runs))
    return render("compare.html.j2", title=f"{title} compared", badges=[(title, "running")], name="", **values)


def comparison(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the values that ``compare.html.j2`` shows of the groups."""
    runs = [run for group in groups for run in group.runs]
    columns = [(name, key) for run in runs for name, scores in run.benchmarks.items()
               for key in score_names(scores) if number(scores[key]) is not None]  # fmt: skip
    baselines: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in BASELINES}
    for run in reversed(runs):  # the scores of the first run that has them
        for benchmark, result in run.benchmarks.items():
            for name in baselines.keys() & (result.get("baselines") or {}):
                baselines[name][benchmark] = result["baselines"][name]
    reward = _chart(groups, "reward", "Reward", "Mean over the completions of a step, smoothed", large=True)
    if reward and any(len(group.runs) > 1 for group in groups):
        reward = replace(reward, note=f"{reward.note}; shaded: 95 % interval of the mean over seeds")
    return {
        "groups": groups, "headline": sentence(groups), "reward": reward,
        "warnings": [text for text in (_unlike(groups, *question) for question in _QUESTIONS) if text],
        "small_charts": _charts(groups), "columns": list(dict.fromkeys(columns)),
        "baselines": [(BASELINES[name], scores) for name, scores in baselines.items() if scores],
        "keys": differing_keys(groups), "facts": _differing_facts(groups),
    }  # fmt: skip


def sentence(groups: Sequence[Group]) -> str:
    """Return which group ends highest, unless the rewards are not the same."""
    finals = {group.label: group.finals for group in groups if group.finals}
    ends = sorted(((sum(found) / len(found), label, spread(found)) for label, found in finals.items()), reverse=True)
    if len(ends) < 2 or _unlike(groups, *_QUESTIONS[0]):
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    (_, first, reward), (_, second, other) = ends[:2]
    return f"{first} ends highest, at reward {reward}; next is {second} at {other}."


def _rewards(run: RunRecord) -> str:
    """Return names and weights of a run's rewards."""
    names, weights = [*reward_names(run.metrics).values()] or run.value("reward_funcs"), run.value("reward_weights")
    return ", ".join(map(str, names or ())) + (f" weighted {weights}" if weights else "")


# What makes runs hard to compare where it differs.
_QUESTIONS: tuple[tuple[str, Callable[[RunRecord], Any]], ...] = (
    ("The rewards are not the same, so their totals cannot be compared.", _rewards),
    ("A step is not the same number of completions: compare by time.", lambda run: run.batch.get("completions")),
)


def _unlike(groups: Sequence[Group], warning: str, read: Callable[[RunRecord], Any]) -> str:
    found = {group.label: read(group.runs[0]) for group in groups}
    listed = "; ".join(f"{label}: {value}" for label, value in found.items())
    return f"{warning} {listed}." if len(set(found.values())) > 1 else ""


def _charts(groups: Sequence[Group]) -> list[Chart]:
    tables = [run.metrics for group in groups for run in group.runs]
    charts = [_chart(groups, "eval_reward", "Evaluation reward", table="evals"), _by_time(groups)]
    for name, metric in METRICS.items():
        if metric.compared:
            charts.append(_chart(groups, name, metric.title, note_of(tables, name), metric.shares))
    return [chart for chart in charts if chart]


def _chart(
    groups: Sequence[Group], name: str, title: str, note: str = "", shares: bool = False, *, large: bool = False,
    table: str = "metrics",
) -> Chart | None:  # fmt: skip
    """Return a metric of every group that has it; None where it is 0 everywhere."""
    curves = []
    for group in groups:
        tables = [getattr(run, table) for run in group.runs]
        curve = curve_of(tables, name, group.label, group.colour, group.kind, behind=False)
        if known(curve.line):
            curves.append(curve)
    if not any(value for curve in curves for value in known(curve.line)):
        return None
    bounds = reward_bounds(curves) if name in ("reward", "eval_reward") else None
    return Chart(title, curves, note, bounds, shares, large=large)


def _by_time(groups: Sequence[Group]) -> Chart | None:
    """Return the reward of every run over its minutes in steps."""
    curves = []
    for group in groups:
        for metrics in (run.metrics for run in group.runs):
            if metrics.known("reward") and metrics.known("seconds/step"):
                seconds = (value or 0.0 for value in metrics.column("seconds/step"))
                timed = replace(metrics, steps=[total / 60 for total in itertools.accumulate(seconds)])
                curves.append(curve_of([timed], "reward", group.label, group.colour, group.kind, behind=False))
    return Chart("Reward by time", curves, "minutes in steps", x_name="min") if curves else None


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return recipe keys beside the seed whose values are not the same in all groups."""
    keys = sorted({key for group in groups for run in group.runs for key in run.settings} - {"seed"})
    return [key for key in keys if len({str(group.runs[0].value(key)) for group in groups}) > 1]


def _differing_facts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return facts that are not the same in all groups: one text for each."""
    facts = {name: [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
             for name, read in _FACTS.items()}  # fmt: skip
    return {name: found for name, found in facts.items() if len(set(found)) > 1}
