"""The page that compares runs; those that differ in their seed alone are one group, with an interval over the seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_recipes.paths import shown
from grpo_recipes.report.chart import MOST_POINTS, Chart, Curve, around, draw, smooth, window_of
from grpo_recipes.report.page import NOTHING, Section, chart_grid, duration, fragment, page, short, stacked, table
from grpo_recipes.report.read import RunRecord, Table, baselines_of, read_run
from grpo_recipes.report.run_charts import METRICS, note_of, reward_names
from grpo_recipes.report.single import BASELINES, Trouble, is_count, score_bounds, score_text, value_cell
from grpo_recipes.runs.health import known, mean, number, percent
from grpo_recipes.runs.rundir import write_whole
from grpo_recipes.stats import score_names

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
Row = Sequence[object]


@dataclass(frozen=True)
class Group:
    """Runs of one recipe with different seeds, or a single run."""

    label: str  # unlike that of any other group
    runs: Sequence[RunRecord]  # at least one
    number: int  # 0, 1, ... in the order of the command line

    @property
    def colour(self) -> int:
        """1 to 7; groups beyond the seventh are dashed."""
        return self.number % COLOURS + 1

    @property
    def dashed(self) -> bool:
        """Whether its colour is already another group's."""
        return self.number >= COLOURS

    @property
    def finals(self) -> list[float]:
        """The final reward of each run that has one."""
        return known(run.outcome.last for run in self.runs)

    @property
    def evaluations(self) -> list[float]:
        """The last evaluation of each run that has one."""
        return known(run.evals.last("eval_reward") for run in self.runs)


def group_of(label: str, runs: Sequence[RunRecord], number: int) -> Group:
    """Return a group whose label says how many seeds it has."""
    return Group(f"{label} ({len(runs)} seeds)" if len(runs) > 1 else label, runs, number)


def grouped(runs: Sequence[RunRecord]) -> list[Group]:
    """Return runs by what they are beside their seed; runs that share recipe and seed stand alone."""
    alike: dict[str, list[RunRecord]] = {}
    for run in runs:
        alike.setdefault(_signature(run), []).append(run)
    sets = []
    for same in alike.values():
        distinct = len({str(run.value("seed")) for run in same}) == len(same)
        sets.extend([same] if distinct else [[run] for run in same])
    labels = _labels([members[0] for members in sets])
    return [group_of(label, members, place) for place, (members, label) in enumerate(zip(sets, labels, strict=True))]


def _labels(runs: Sequence[RunRecord]) -> list[str]:
    """Return run names; where two are the same, the folders' names; where these are too, the folders."""
    for name in (lambda run: str(run.identity.get("run_name") or run.name), lambda run: run.name):
        labels = [name(run) for run in runs]
        if len(set(labels)) == len(labels):
            return labels
    return [shown(run.folder) for run in runs]


def _signature(run: RunRecord) -> str:
    experiment = {one.key: one.value for one in run.settings if one.key != "seed" and one.key not in NO_EXPERIMENT}
    return json.dumps([run.plan.get("task"), experiment], sort_keys=True, default=str)


def differing_keys(groups: Sequence[Group]) -> list[str]:
    """Return recipe keys beside the seed whose values are not the same in all groups."""
    keys = sorted({one.key for group in groups for run in group.runs for one in run.settings if one.key != "seed"})
    return [key for key in keys if len({str(group.runs[0].value(key)) for group in groups}) > 1]


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of the mean, by Student's t; None of fewer than two values."""
    count = len(values)
    if count < 2:
        return None
    centre = sum(values) / count
    deviation = math.sqrt(sum((value - centre) ** 2 for value in values) / (count - 1))
    factor = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 1.96
    return factor * deviation / math.sqrt(count)


def spread(values: Sequence[float]) -> str:
    """Return the mean of values with half of its 95 % interval; of a single one the value alone."""
    half = half_interval(values)
    return short(mean(values)) + ("" if half is None else f" ± {short(half)}")


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page that compares runs, and return its path; a folder named twice counts once.

    Raises:
        ConfigError: a folder is not a run directory.
        OSError: the page cannot be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_whole(path, comparison_page([read_run(folder) for folder in unique]))
    return path


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """Return the page as text."""
    groups, title = grouped(runs), f"{len(runs)} runs"
    heading = fragment("parts.html.j2", "header", [(title, "running")], "", sentence(groups), warnings(groups))
    return page(f"{title} compared", heading, comparison_sections(groups))


def comparison_sections(groups: Sequence[Group]) -> list[Section]:
    """Return names and contents of what compares the groups."""
    return [
        ("Runs", _run_table(groups)),
        ("Curves", _curves(groups)),
        ("Benchmarks", _benchmark_table(groups)),
        ("Differences", _difference_table(groups)),
    ]


def warnings(groups: Sequence[Group]) -> list[Trouble]:
    """Return what makes the groups hard to compare."""
    texts = (_unlike_rewards(groups), _unlike_steps(groups))
    return [("stopped", [("", text, "")]) for text in texts if text]


def sentence(groups: Sequence[Group]) -> str:
    """Return who ends highest, unless the rewards are not the same."""
    finals = {group.label: group.finals for group in groups if group.finals}
    ends = sorted(((sum(found) / len(found), label, spread(found)) for label, found in finals.items()), reverse=True)
    if len(ends) < 2 or _unlike_rewards(groups):
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    (_, first, reward), (_, second, other) = ends[:2]
    return f"{first} ends highest, at reward {reward}; next is {second} at {other}."


def _unlike_rewards(groups: Sequence[Group]) -> str:
    rewards = {group.label: _rewards(group.runs[0]) for group in groups}
    if len(set(rewards.values())) < 2:
        return ""
    listed = "; ".join(f"{label}: {names}" for label, names in rewards.items())
    return f"The rewards are not the same, so their totals cannot be compared. {listed}."


def _rewards(run: RunRecord) -> str:
    """Return names and weights of a run's rewards."""
    names = [*reward_names(run.metrics).values()] or run.value("reward_funcs") or []
    weights = run.value("reward_weights")
    return ", ".join(map(str, names)) + (f" weighted {weights}" if weights else "")


def _unlike_steps(groups: Sequence[Group]) -> str:
    sizes = {group.label: group.runs[0].batch.get("completions") for group in groups}
    if len(set(sizes.values())) < 2:
        return ""
    listed = "; ".join(f"{label}: {size}" for label, size in sizes.items())
    return f"A step is not the same number of completions: compare by time. {listed}."


def _curves(groups: Sequence[Group]) -> Markup | None:
    several = any(len(group.runs) > 1 for group in groups)
    note = "Mean over the completions of a step, smoothed"
    band = "; shaded: 95 % interval of the mean over seeds" if several else ""
    reward = _chart(groups, "reward", "Reward", note + band, large=True)
    small = [_chart(groups, "eval_reward", "Evaluation reward", "", table="evals"), _by_time(groups)]
    tables = [run.metrics for group in groups for run in group.runs]
    small += [_chart(groups, name, metric.title, note_of(tables, name), metric.shares)
              for name, metric in METRICS.items() if metric.compared]  # fmt: skip
    return stacked(reward, chart_grid(small))


def _chart(
    groups: Sequence[Group], name: str, title: str, note: str, shares: bool = False, *, large: bool = False,
    table: str = "metrics",
) -> Markup | None:  # fmt: skip
    curves = [curve for curve in (group_curve(group, name, table) for group in groups) if curve is not None]
    if not any(value for curve in curves for value in known(curve.line)):
        return None
    inside = all(0 <= value <= 1 for curve in curves for value in known(curve.line))
    bounds = (0.0, 1.0) if "reward" in name and inside and not shares else None
    return draw(Chart(title, curves, note, bounds, shares, large=large))


def group_curve(group: Group, name: str, table: str = "metrics") -> Curve | None:
    """Return a metric of a group: a run's line through its noise, or the mean of the runs' lines with its interval."""
    tables: list[Table] = [getattr(run, table) for run in group.runs]
    longest = max(tables, key=lambda one: len(one.steps))
    parts, window = _parts(len(longest.steps), MOST_POINTS), window_of(len(longest.steps))
    size = parts[0].stop if parts else 1
    lines = [smooth(one.column(name), _parts(len(one.steps), size=size), window) for one in tables]
    columns = [known(line[at] for line in lines if at < len(line)) for at in range(len(parts))]
    middles = [mean(column) for column in columns]
    if not known(middles):
        return None
    xs = [longest.steps[part.stop - 1] for part in parts]
    curve = Curve(group.label, xs, middles, group.colour, dashed=group.dashed)
    if len(group.runs) == 1:
        return curve
    return replace(curve, band=around(middles, [half_interval(column) for column in columns]), band_label="95 %")


def _parts(count: int, most: int = 1, size: int = 0) -> list[slice]:
    """Return rows in slices of one size: that given, or the least that makes at most ``most``."""
    size = size or -(-count // most) or 1
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _by_time(groups: Sequence[Group]) -> Markup | None:
    """Return the reward of every run over its minutes in steps."""
    curves = [curve for group in groups for run in group.runs if (curve := _time_curve(group, run)) is not None]
    return draw(Chart("Reward by time", curves, "minutes in steps", x_name="min")) if curves else None


def _time_curve(group: Group, run: RunRecord) -> Curve | None:
    metrics, count = run.metrics, len(run.metrics.steps)
    if not metrics.has("reward") or not metrics.has("seconds/step"):
        return None
    parts = _parts(count, 120)
    minutes = list(accumulate((seconds or 0.0) / 60 for seconds in metrics.column("seconds/step")))
    line = smooth(metrics.column("reward"), parts, window_of(count))
    return Curve(group.label, [minutes[part.stop - 1] for part in parts], line, group.colour, dashed=group.dashed)


def _bold(text: str) -> Markup:
    return fragment("parts.html.j2", "bold", text)


def _swatch(group: Group) -> Markup:
    return fragment("charts.html.j2", "legend_of", [(group.colour, "", "dash" if group.dashed else "box")])


def _run_table(groups: Sequence[Group]) -> Markup:
    """Return a row a run, and one with the means of each group of several."""
    head = ("", "run", "reward", "evaluation", "best", "steps", "time", "tokens/s", "seed", "status")
    rows: list[Row] = []
    for group in groups:
        rows += [_run_row(group, run) for run in group.runs]
        if len(group.runs) > 1:
            means = [_bold(spread(values)) if len(values) > 1 else "" for values in (group.finals, group.evaluations)]
            rows.append((_swatch(group), _bold(group.label), *means, *[""] * 6))
    return table(head, rows, "runs")


def _run_row(group: Group, run: RunRecord) -> Row:
    count = run.outcome
    best = f"{short(count.best[0])} at {count.best[1]:,.0f}" if count.best else NOTHING
    return (
        _swatch(group), run.name, f"{short(count.first)} → {short(count.last)}",
        short(run.evals.last("eval_reward")), best, f"{count.steps:,.0f}", duration(count.seconds),
        short(count.tokens_per_second), run.value("seed"), run.status,
    )  # fmt: skip


def _benchmark_table(groups: Sequence[Group]) -> Markup | None:
    """Return a row a run, a column a benchmark and score; at the end rows of what ModeBench is held against."""
    results = [run.benchmarks for group in groups for run in group.runs]
    columns = list(dict.fromkeys(
        (name, key) for result in results for name, scores in result.items() for key in scores
        if key in score_names(scores) and number(scores[key]) is not None
    ))  # fmt: skip
    if not columns:
        return None
    rows: list[Row] = []
    for group in groups:
        for run in group.runs:
            rows.append((_swatch(group), run.name, *_score_cells(run.benchmarks, columns)))
        if len(group.runs) > 1:
            means = [_mean_score(group, name, key) for name, key in columns]
            rows.append((_swatch(group), _bold(group.label), *means))
    for baseline, title in BASELINES.items():
        scores: dict[str, dict[str, Any]] = {}
        for result in reversed(results):  # as the first run has it
            held = {name: baselines_of(one) for name, one in result.items()}
            scores |= {name: found[baseline] for name, found in held.items() if baseline in found}
        if scores:
            rows.append(("", title, *_score_cells(scores, columns)))
    return table(("", "run", *[f"{name} {key}" for name, key in columns]), rows, "runs")


def _score_cells(scores: dict[str, dict[str, Any]], columns: Sequence[tuple[str, str]]) -> list[str]:
    cells = []
    for name, key in columns:
        result = scores.get(name, {})
        bounds, scale = score_bounds(result, key), 1 if is_count(key) else 100
        ends = f" ({short(scale * bounds[0])} to {short(scale * bounds[1])})" if bounds else ""
        cells.append(NOTHING if number(result.get(key)) is None else score_text(key, result[key]) + ends)
    return cells


def _mean_score(group: Group, name: str, key: str) -> Markup | None:
    """Return the mean over the seeds, with the interval."""
    found = known(number(run.benchmarks.get(name, {}).get(key)) for run in group.runs)
    half = half_interval(found)
    if half is None:
        return None
    return _bold(spread(found) if is_count(key) else f"{short(100 * sum(found) / len(found))} ± {percent(half)}")


_FACTS: dict[str, Callable[[RunRecord], Any]] = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.batch.get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
}


def _difference_table(groups: Sequence[Group]) -> Markup:
    """Return what is not the same in recipes and code; the seeds stand in the table of runs."""
    rows: list[Row] = [
        (fragment("parts.html.j2", "code", key), *[value_cell(group.runs[0].value(key)) for group in groups])
        for key in differing_keys(groups)
    ]
    for name, read in _FACTS.items():
        found = [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
        if len(set(found)) > 1:
            rows.append((name, *found))
    if not rows:
        return fragment("parts.html.j2", "paragraph", "Recipes, trainer, code and devices are the same.")
    return table(("", *[group.label for group in groups]), rows, "keys")
