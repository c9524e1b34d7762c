"""The page that compares runs. Runs that differ only in their seed form a group with an interval over the seeds."""

import functools
import itertools
import json
import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from grpo_recipes.console.report import run_charts
from grpo_recipes.console.report.chart import Chart, choose_window, make_clock, make_curve
from grpo_recipes.console.report.page import BASELINES, ENOUGH_SEEDS, format_mean, render
from grpo_recipes.console.report.read import Group, RunRecord, read_run
from grpo_recipes.paths import display_path
from grpo_recipes.runs.health import AVERAGED_STEPS, finite_number
from grpo_recipes.runs.metric import Metric
from grpo_recipes.runs.rundir import write_atomically
from grpo_recipes.stats import score_names, t_interval_half_width

_COLOURS = 7
# Keys that do not change the training, for example names, folders and ports.
BOOKKEEPING_KEYS = frozenset(
    {"run_name", "run_root", "report_to", "vllm_server_port", "vllm_group_port", "main_process_port", "save_steps",
     "save_total_limit", "report_samples", "show_completion_steps", "wandb_project", "wandb_entity", "wandb_run_group"}
)  # fmt: skip


def _describe_rewards(run: RunRecord) -> str:
    """Return the names of a run's rewards and, if the recipe sets reward_weights, the weights, as text."""
    names = run_charts.find_reward_names(run.metrics).values() or run.value("reward_funcs") or ()
    weights = run.value("reward_weights")
    return ", ".join(map(str, names)) + (f" weighted {weights}" if weights else "")


# Facts that are not in the recipe and may differ between runs.
_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.plan.get("batch", {}).get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
    "rewards": _describe_rewards,
    "completions per step": lambda run: run.plan.get("batch", {}).get("completions"),
    "finished steps": lambda run: f"{run.outcome.steps:,.0f}",
}
# Facts that make runs hard to compare if they differ.
_WARNINGS = {
    "rewards": "The runs have different rewards, so their totals can't be compared.",
    "finished steps": "The runs have different numbers of steps, so final rewards are not ranked.",
    "completions per step": "The runs have different numbers of completions per step: compare by time.",
}
# End of a sentence about runs -> whether it applies to a run.
_CAVEATS: dict[str, Callable[[RunRecord], Any]] = {
    "are smoke tests, not experiments": lambda run: run.summary.get("smoke"),
    "used code with uncommitted changes": lambda run: run.identity.get("code", {}).get("dirty"),
}


_UNRANKED = ("rewards", "finished steps")  # facts that must not differ for a ranking
_SEPARATOR = re.compile(r"(?<!\de)(?<!\d{8})-|[/ ,]|_(?![^-/ ,]*=)")  # not in 1e-6, in a timestamp, or in a_key=VALUE
_TIMESTAMP = re.compile(r"-\d{8}-\d{6}$")


def is_ranked(facts: Mapping[str, Any]) -> bool:
    """Return whether final rewards may be ranked, given the facts that differ."""
    return not any(name in facts for name in _UNRANKED)


def shorten_names(names: Sequence[str]) -> list[str]:
    """Remove timestamps and the words that all names begin with, if the names stay different."""
    if len(set(names)) < 2:
        return [*names]
    untimed = [_TIMESTAMP.sub("", name) for name in names]
    texts = untimed if len(set(untimed)) == len(set(names)) else names
    ends = [match.end() for match in _SEPARATOR.finditer(texts[0])]
    common = max((end for end in ends if all(text[:end] == texts[0][:end] and text[end:] for text in texts)), default=0)
    return [text[common:] for text in texts]


def make_group(label: str, runs: Sequence[RunRecord], number: int) -> Group:
    """Return a group of runs with a color and a line style that depend on ``number``, its index in the comparison.

    If there are several runs, their number is added to the label: "LABEL (3 seeds)".
    """
    seeds = f" ({len(runs)} seeds)" if len(runs) > 1 else ""
    return Group(label + seeds, runs, number % _COLOURS + 1, "line" if number < _COLOURS else "line dashed")


def group_runs(runs: Sequence[RunRecord]) -> list[Group]:
    """Return groups of runs that differ only in their seed. If two of them have the same seed, each run is a group.

    Recipe keys that do not change the training (``BOOKKEEPING_KEYS``) are ignored. The label of a group is the name of
    its first run, its folder's name or its path: the first of these that is unique for all groups, without the words
    that all of them share.
    """
    by_recipe: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.recipe.items() if key != "seed" and key not in BOOKKEEPING_KEYS}
        signature = json.dumps([run.plan.get("task"), settings], sort_keys=True, default=str)
        by_recipe.setdefault(signature, []).append(run)
    sets = []
    for members in by_recipe.values():
        distinct = len({str(run.value("seed")) for run in members}) == len(members)
        sets.extend([members] if distinct else [[run] for run in members])
    firsts = [members[0] for members in sets]
    # Use the names of the runs, or of their folders, or the folders, whichever is unique first.
    names = [run.name for run in firsts], [run.folder.name for run in firsts]
    folders = [display_path(run.folder) for run in firsts]
    labels = shorten_names(next((texts for texts in names if len(set(texts)) == len(texts)), folders))
    return [
        make_group(label, members, number) for number, (members, label) in enumerate(zip(sets, labels, strict=True))
    ]


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the HTML page that compares the runs in ``folders`` to ``path``, and return ``path``.

    A repeated folder counts once. Raise ConfigError if a folder is not a run directory, and OSError if the page can't
    be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_atomically(path, render_comparison_page([read_run(folder) for folder in unique], path.absolute().parent))
    return path


def render_comparison_page(runs: Sequence[RunRecord], folder: Path) -> str:
    """Return the page that compares runs as HTML, for a file in ``folder``.

    Runs that differ only in their seed form a group.
    """
    title = f"{len(runs)} runs"
    values = compare_groups(group_runs(runs), folder)
    return render("compare.html.j2", title=f"{title} compared", badges=[(title, "running")], name="", **values)


def link_reports(runs: Iterable[RunRecord], folder: Path) -> dict[Path, str]:
    """Return the link from a page in ``folder`` to the report of each run that has one, by the run's folder."""
    reports = {run.folder: run.folder / "report.html" for run in runs}
    return {run: quote(os.path.relpath(report, folder)) for run, report in reports.items() if report.is_file()}


def compare_groups(groups: Sequence[Group], folder: Path) -> dict[str, Any]:
    """Return the variables of the template ``compare.html.j2``: headline, charts, benchmark scores, differences.

    The page's links to the runs' reports are relative to ``folder``.
    """
    runs = [run for group in groups for run in group.runs]
    columns = [(name, key) for run in runs for name, scores in run.benchmarks.items()
               for key in score_names(scores) if finite_number(scores[key]) is not None]  # fmt: skip
    baselines: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in BASELINES}
    for run in reversed(runs):  # so that the scores of the first run remain
        for benchmark, result in run.benchmarks.items():
            for name in baselines.keys() & (result.get("baselines") or {}):
                baselines[name][benchmark] = result["baselines"][name]
    most = max((len(group.runs) for group in groups), default=0)
    spread = "shaded: 95 % interval of the mean over seeds" if most >= ENOUGH_SEEDS else "faint: single seeds"
    note = "Mean over the completions of a step" + f"; {spread}" * (most > 1)
    window = max((choose_window(len(run.metrics.steps)) for run in runs), default=1)
    facts, charts, same = find_differing_facts(groups), [], dict[str, str]()
    if groups:
        draw, metric = functools.partial(run_charts.make_metric_chart, window=window), Metric
        charts = [draw(groups, "reward", metric("Reward", note, unit="mean reward"), large=True)]
        charts += [
            draw(groups, "eval_reward", metric("Evaluation reward", unit="mean reward", smooth=False), evals=True),
            _make_time_chart(groups, window),
        ]
        names = [name for name, known_metric in run_charts.METRICS.items() if known_metric.compared]
        same = run_charts.find_common_constants([run.metrics for run in runs], names)
        charts += [draw(groups, name) for name in names if name not in same]
    return {
        "groups": groups, "window": window, "averaged_steps": AVERAGED_STEPS,
        "clocks": [make_clock([run.metrics for run in group.runs], window) for group in groups],
        "headline": make_comparison_headline(groups, ranked=is_ranked(facts)),
        "warnings": [(_WARNINGS[name], values) for name, values in facts.items() if name in _WARNINGS],
        "caveats": describe_caveats(groups),
        "drawn": [chart for chart in charts if chart], "same": same,
        "names": dict(zip((run.folder for run in runs), shorten_names([run.folder.name for run in runs]), strict=True)),
        "reports": link_reports(runs, folder), "columns": list(dict.fromkeys(columns)),
        "baselines": [(BASELINES[name], scores) for name, scores in baselines.items() if scores],
        "keys": find_differing_keys(groups),
        "facts": {name: values for name, values in facts.items() if name != "finished steps"},  # not a setting
    }  # fmt: skip


def describe_caveats(groups: Sequence[Group]) -> list[str]:
    """Return sentences on what limits the conclusions: smoke tests, uncommitted changes, a single seed per group."""
    sentences = []
    for text, applies in _CAVEATS.items():
        labels = [group.label for group in groups if any(applies(run) for run in group.runs)]
        if labels:
            is_all = all(applies(run) for group in groups for run in group.runs)
            sentences.append(f"All runs {text}." if is_all else f"Some runs {text}: {', '.join(labels)}.")
    if len(groups) > 1 and all(len(group.runs) == 1 for group in groups):
        sentences.append("Each setting has one seed, so differences may be chance.")
    return sentences


def make_comparison_headline(groups: Sequence[Group], ranked: bool) -> str:
    """Return a sentence: which group has the highest final reward, or that the two highest are not distinguishable.

    They are distinguishable if the 95 % intervals of their means over seeds do not overlap. Without ``ranked``, or with
    fewer than two groups that have a final reward, the sentence only lists the groups.
    """
    ended = [group for group in groups if group.finals]
    if len(ended) < 2 or not ranked:
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    first, second = sorted(ended, key=lambda group: -statistics.fmean(group.finals))[:2]
    reward, other = (format_mean(group.finals, limits=group.limits) for group in (first, second))
    halves = [t_interval_half_width(group.finals) for group in (first, second)]
    gap = statistics.fmean(first.finals) - statistics.fmean(second.finals)
    if None not in halves and sum(half or 0.0 for half in halves) < gap:
        return f"{first.label} ends highest, at reward {reward}; next is {second.label} at {other}."
    counts = " and ".join(map(str, dict.fromkeys(len(group.finals) for group in (first, second))))
    highest = "The highest are not" if len(ended) > 2 else "Not"
    seeds = f"{counts} seed{'s' * (counts != '1')}"
    return f"{highest} distinguishable with {seeds}: {first.label} ends at reward {reward}, {second.label} at {other}."


def _make_time_chart(groups: Sequence[Group], window: int) -> Chart | None:
    """Return a chart of the reward of every run over the minutes of training; None if no run has both metrics.

    Lines are means over ``window`` steps.
    """
    curves = []
    for group in groups:
        for metrics in (run.metrics for run in group.runs):
            if metrics.known("reward") and metrics.known("seconds/step"):
                seconds = (value or 0.0 for value in metrics.column("seconds/step"))
                timed = replace(metrics, steps=[total / 60 for total in itertools.accumulate(seconds)])
                style = (group.label, group.colour, group.kind)
                curves.append(make_curve([timed], "reward", *style, window=window, behind=False))
    return Chart("Reward by time", curves, x_name="min", y_name="mean reward") if curves else None


def find_differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return the recipe keys, except the seed, that have different values in the groups, sorted."""
    keys = sorted({key for group in groups for run in group.runs for key in run.recipe} - {"seed"})
    return [key for key in keys if len({str(group.runs[0].value(key)) for group in groups}) > 1]


def find_differing_facts(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return the facts, such as commit, trainer and devices, that differ between groups: name -> a text per group."""
    facts = {name: [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
             for name, read in _FACTS.items()}  # fmt: skip
    return {name: values for name, values in facts.items() if len(set(values)) > 1}
