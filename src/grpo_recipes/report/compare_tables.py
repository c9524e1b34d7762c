"""What the comparison of runs tells in tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_recipes.report.curves import known
from grpo_recipes.report.groups import Group, differing_keys, half_interval, recipe_value, seed_of, spread
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.outcome import numbers
from grpo_recipes.report.read import RunRecord, number
from grpo_recipes.report.tables import BASELINES, baselines_of, score_bounds, score_text, table, value
from grpo_recipes.report.units import NOTHING, duration, percent, short
from grpo_recipes.stats import score_names


def run_table(groups: Sequence[Group]) -> Html:
    """A row a run, and one for each group of several."""
    head = ("", "run", "reward", "evaluation", "best", "steps", "time", "tokens/s", "seed", "status")
    rows: list[Sequence[object]] = []
    for group in groups:
        rows += [_run_row(group, run) for run in group.runs]
        if len(group.runs) > 1:
            rows.append(_together_row(group))
    return table(head, rows, "runs")


def _run_row(group: Group, run: RunRecord) -> Sequence[object]:
    count = numbers(run)
    best = f"{short(count.best[0])} at {count.best[1]:,.0f}" if count.best else NOTHING
    return (
        _swatch(group), run.name, f"{short(count.first)} → {short(count.last)}",
        short(run.evals.last("eval_reward")), best, f"{count.steps:,.0f}", duration(count.seconds),
        short(count.tokens_per_second), seed_of(run), run.status,
    )  # fmt: skip


def _together_row(group: Group) -> Sequence[object]:
    """The group's mean of final rewards and evaluations, with the interval."""
    finals = known([numbers(run).last for run in group.runs])
    evaluations = known([run.evals.last("eval_reward") for run in group.runs])
    return (_swatch(group), element("b", group.label), _mean_cell(finals), _mean_cell(evaluations), *[""] * 6)


def _mean_cell(values: Sequence[float]) -> Html | None:
    return element("b", spread(values)) if len(values) > 1 else None


def _swatch(group: Group) -> Html:
    return element("ul", element("li", class_=f"k{group.colour} {'dash' if group.dashed else 'box'}"), class_="legend")


def benchmark_rows(groups: Sequence[Group]) -> Html | None:
    """A row a run, a column a benchmark and score; at the end rows of what ModeBench is held against."""
    results = [run.benchmarks for group in groups for run in group.runs]
    columns = list(dict.fromkeys(column for result in results for column in _scores(result)))
    if not columns:
        return None
    rows: list[Sequence[object]] = []
    for group in groups:
        for run in group.runs:
            rows.append(
                (_swatch(group), run.name, *[_score(run.benchmarks.get(name, {}), key) for name, key in columns])
            )
        if len(group.runs) > 1:
            means = [_mean_score(group, name, key) for name, key in columns]
            rows.append((_swatch(group), element("b", group.label), *means))
    rows += _baseline_rows(results, columns)
    return table(("", "run", *[f"{name} {key}" for name, key in columns]), rows, "runs")


def _baseline_rows(results: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]]) -> list[Sequence[object]]:
    """A row for each baseline, as the first run has it."""
    rows: list[Sequence[object]] = []
    for baseline, title in BASELINES.items():
        scores: dict[str, dict[str, Any]] = {}
        for result in reversed(results):
            scores |= {
                name: baselines_of(one)[baseline] for name, one in result.items() if baseline in baselines_of(one)
            }
        if scores:
            rows.append(("", title, *[_score(scores.get(name, {}), key) for name, key in columns]))
    return rows


def _mean_score(group: Group, name: str, key: str) -> Html | None:
    """Mean over the seeds, with the interval."""
    scores = [run.benchmarks.get(name, {}).get(key) for run in group.runs]
    found = [known for score in scores if (known := number(score)) is not None]
    half = half_interval(found)
    if half is None:
        return None
    mean = sum(found) / len(found)
    if key.startswith("distinct@"):
        return element("b", f"{short(mean)} ± {short(half)}")
    return element("b", f"{short(100 * mean)} ± {percent(half)}")


def _scores(result: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (name, key)
        for name, scores in result.items()
        for key in scores
        if key in score_names(scores) and number(scores[key]) is not None
    ]


def _score(scores: dict[str, Any], key: str) -> str:
    if number(scores.get(key)) is None:
        return NOTHING
    bounds = score_bounds(scores, key)
    scale = 1 if key.startswith("distinct@") else 100
    ends = f" ({short(scale * bounds[0])} to {short(scale * bounds[1])})" if bounds else ""
    return score_text(key, scores[key]) + ends


def difference_table(groups: Sequence[Group]) -> Html:
    """What is not the same in recipes and code; the seeds stand in the table of runs."""
    rows: list[Sequence[object]] = [
        (element("code", key), *[value(recipe_value(group.runs[0], key)) for group in groups])
        for key in differing_keys(groups)
    ]
    rows += [row for row in (_fact(groups, name, read) for name, read in _FACTS.items()) if row]
    if not rows:
        return element("p", "Recipes, trainer, code and devices are the same.")
    return table(("", *[group.label for group in groups]), rows, "keys")


_FACTS = {
    "trainer": lambda run: run.plan.get("task"),
    "commit": lambda run: str(run.identity.get("code", {}).get("commit"))[:10],
    "uncommitted changes": lambda run: "yes" if run.identity.get("code", {}).get("dirty") else "no",
    "training processes": lambda run: run.plan.get("batch", {}).get("world_size"),
    "devices": lambda run: run.plan.get("flavour"),
}


def _fact(groups: Sequence[Group], name: str, read: Any) -> Sequence[object] | None:
    found = [", ".join(dict.fromkeys(str(read(run)) for run in group.runs)) for group in groups]
    return (name, *found) if len(set(found)) > 1 else None
