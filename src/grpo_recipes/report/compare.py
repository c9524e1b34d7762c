"""The page that compares runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from grpo_recipes.report.chart import Chart, Curve, draw
from grpo_recipes.report.compare_tables import benchmark_rows, difference_table, run_table
from grpo_recipes.report.curves import known, smooth, window_of
from grpo_recipes.report.groups import Group, group_curve, grouped, recipe_value, spread
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.metrics import METRICS, gaps
from grpo_recipes.report.outcome import numbers
from grpo_recipes.report.page import chart_grid, page, stacked, write_page
from grpo_recipes.report.read import RunRecord, read_run


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page that compares runs.

    Args:
        folders: run directories; one named twice counts once.
        path: where to.

    Returns:
        The page's path.

    Raises:
        ConfigError: a folder is no run directory.
        OSError: the page cannot be written.
    """
    unique = list(dict.fromkeys(folder.resolve() for folder in folders))
    write_page(path, comparison_page([read_run(folder) for folder in unique]))
    return path


def comparison_page(runs: Sequence[RunRecord]) -> str:
    """The page as text."""
    groups = grouped(runs)
    return page(
        f"{len(runs)} runs compared",
        _heading(groups, runs),
        comparison_sections(groups),
    )


def comparison_sections(groups: Sequence[Group]) -> list[tuple[str, Html | None]]:
    """Names and contents of what compares the groups."""
    return [
        ("Runs", run_table(groups)),
        ("Curves", _curves(groups)),
        ("Benchmarks", benchmark_rows(groups)),
        ("Differences", difference_table(groups)),
    ]


def _heading(groups: Sequence[Group], runs: Sequence[RunRecord]) -> Html:
    return element(
        "header",
        element("p", element("span", f"{len(runs)} runs", class_="badge running"), class_="eyebrow"),
        element("h1", sentence(groups)),
        *comparison_warnings(groups),
    )


def comparison_warnings(groups: Sequence[Group]) -> list[Html]:
    """What makes the groups hard to compare, a box each."""
    warnings = [text for text in (_unlike_rewards(groups), _unlike_steps(groups)) if text]
    return [element("div", element("p", text), class_="trouble stopped") for text in warnings]


def sentence(groups: Sequence[Group]) -> str:
    """Who ends highest, unless the rewards are not the same."""
    finals = {group.label: found for group in groups if (found := _finals(group))}
    ends = sorted(((sum(found) / len(found), label, spread(found)) for label, found in finals.items()), reverse=True)
    if len(ends) < 2 or _unlike_rewards(groups):
        return " against ".join(group.label for group in groups[:3]) + (" and others" if len(groups) > 3 else "")
    (_, first, reward), (_, second, other) = ends[:2]
    return f"{first} ends highest, at reward {reward}; next is {second} at {other}."


def _finals(group: Group) -> list[float]:
    """The final reward of each run."""
    return known([numbers(run).last for run in group.runs])


def _unlike_rewards(groups: Sequence[Group]) -> str:
    rewards = {group.label: _rewards(group.runs[0]) for group in groups}
    if len(set(rewards.values())) < 2:
        return ""
    listed = "; ".join(f"{label}: {names}" for label, names in rewards.items())
    return f"The rewards are not the same, so their totals cannot be compared. {listed}."


def _rewards(run: RunRecord) -> str:
    """Names and weights of a run's rewards."""
    logged = [name for name in run.metrics.columns if name.startswith("rewards/") and name.endswith("/mean")]
    names = [name.split("/", 1)[1].removesuffix("/mean") for name in logged] or recipe_value(run, "reward_funcs") or []
    weights = recipe_value(run, "reward_weights")
    return ", ".join(map(str, names)) + (f" weighted {weights}" if weights else "")


def _unlike_steps(groups: Sequence[Group]) -> str:
    sizes = {group.label: group.runs[0].plan.get("batch", {}).get("completions") for group in groups}
    if len(set(sizes.values())) < 2:
        return ""
    listed = "; ".join(f"{label}: {size}" for label, size in sizes.items())
    return f"A step is not the same number of completions: compare by time. {listed}."


def _curves(groups: Sequence[Group]) -> Html | None:
    several = any(len(group.runs) > 1 for group in groups)
    note = "Mean over the completions of a step, smoothed"
    band = "; shaded: 95 % interval of the mean over seeds" if several else ""
    reward = _chart(groups, "reward", "Reward", note + band, large=True)
    evaluation = _chart(groups, "eval_reward", "Evaluation reward", "", table="evals")
    small = [evaluation, _by_time(groups)]
    small += [_metric(groups, name) for name, metric in METRICS.items() if metric.compared]
    return stacked(reward, chart_grid(small))


def _metric(groups: Sequence[Group], name: str) -> Html | None:
    metric = METRICS[name]
    infinite = gaps([run.metrics for group in groups for run in group.runs], name)
    return _chart(groups, name, metric.title, "; ".join(filter(None, (metric.note, infinite))), metric.shares)


def _chart(
    groups: Sequence[Group], name: str, title: str, note: str, shares: bool = False, *, large: bool = False,
    table: str = "metrics",
) -> Html | None:  # fmt: skip
    curves = [curve for curve in (group_curve(group, name, table) for group in groups) if curve is not None]
    if not any(value for curve in curves for value in known(curve.line)):
        return None
    inside = all(0 <= value <= 1 for curve in curves for value in known(curve.line))
    bounds = (0.0, 1.0) if "reward" in name and inside and not shares else None
    return draw(Chart(title, curves, note, bounds, shares, large=large))


def _by_time(groups: Sequence[Group]) -> Html | None:
    """The reward of every run over its minutes in steps."""
    curves = [curve for group in groups for run in group.runs if (curve := _time_curve(group, run)) is not None]
    return draw(Chart("Reward by time", curves, "minutes in steps", x_name="min")) if curves else None


def _time_curve(group: Group, run: RunRecord) -> Curve | None:
    metrics = run.metrics
    if not metrics.has("reward") or not metrics.has("seconds/step"):
        return None
    count = len(metrics.steps)
    size = -(-count // 120)
    parts = [slice(start, min(start + size, count)) for start in range(0, count, size)]
    minutes = list(accumulate((seconds or 0.0) / 60 for seconds in metrics.column("seconds/step")))
    line = smooth(metrics.column("reward"), parts, window_of(count))
    xs = [minutes[part.stop - 1] for part in parts]
    return Curve(group.label, xs, line, group.colour, dashed=group.dashed)
