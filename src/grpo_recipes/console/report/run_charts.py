"""Select the metrics of a run, or of compared runs, and build a ``Chart`` of each metric from its values.

``METRICS`` has the metrics in the order of the page, with titles, notes and units.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_recipes.console.report.chart import (
    Chart,
    Curve,
    choose_window,
    make_band,
    make_curve,
    smooth_values,
    split_rows,
)
from grpo_recipes.console.report.page import format_number
from grpo_recipes.console.report.read import AFTER_STEP, Group, RunRecord, Table
from grpo_recipes.process.reports import plural
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.runs.health import drop_missing
from grpo_recipes.runs.metric import Metric

# Phase of a step -> its meaning, in the order of the colours.
PHASES = {
    "sample": "waiting for completions",
    "score": "rewards",
    "update": "forward, backward, optimizer",
    "sync": "weights to the server",
    "save": "checkpoints",
    "evaluate": "evaluations",
}
_REWARDS = (0.0, 1.0)  # range of the reward axis if all rewards are inside
_MOST_CURVES = 7  # in a chart
# Keys of metrics.jsonl that need no curve or are already in other charts.
_NO_CURVES = frozenset({"step", "max_steps", "epoch", "num_tokens", "step_time", "reward", "reward_std"})


_ENVIRONMENT_METRIC = Metric("", "number from the environment, mean over episodes")
# In the order of the page.
_CORE_METRICS = {
    "kl": Metric("KL divergence", "from the reference", unit="nats per token"),
    "teacher_kl": Metric("KL divergence from the teacher", "reverse, on sampled tokens", unit="nats per token"),
    "beta": Metric("KL coefficient", "beta of the loss, adjusted to reach kl_target", smooth=False),
    "entropy": Metric("Entropy", "of the policy on its completions", unit="nats per token"),
    "completions/mean_length":
        Metric("Completion length", "mean tokens",
               band=("completions/min_length", "completions/max_length", "shortest to longest"), unit="tokens"),
    "completions/clipped_ratio": Metric("Clipped completions", "share cut off at max_completion_length", shares=True),
    "frac_reward_zero_std":
        Metric("Groups without a signal", "share in which all completions have the same reward", shares=True),
    "maxent/incorrect_mass":
        Metric("MaxEnt weight on wrong answers", "share of a group's weight, mean over groups", shares=True),
    "maxent/target_ratio":
        Metric("MaxEnt weight, right over wrong", "mean weight of right answers over mean weight of wrong ones",
               infinite="no weight on wrong answers"),
    "maxent/eff_rollouts":
        Metric("Effective completions", "per group, from the entropy of its MaxEnt weights", unit="completions"),
    "maxent/weight_entropy":
        Metric("MaxEnt weight entropy", "nats, mean over groups",
               band=("maxent/weight_entropy_min", "maxent/weight_entropy_max", "lowest to highest"), unit="nats"),
    "maxent/tau": Metric("MaxEnt temperature", "tau of the weights", smooth=False, infinite="all weights equal"),
    "maxent/beta": Metric("MaxEnt pull to the reference", "beta of the target", smooth=False),
    "loss": Metric("Loss", "clipped objective; it does not measure progress", compared=False),
    "grad_norm": Metric("Gradient norm"),
    "learning_rate": Metric("Learning rate", smooth=False, compared=False),
    "sampling/sampling_logp_difference/mean":
        Metric("Server against trainer", "mean log-prob difference of sampled tokens", compared=False, unit="nats"),
    "tokens_per_second": Metric("Speed", unit="tokens per second"),
}  # fmt: skip
METRICS = {**{name: metric for metrics in parts("metrics") for name, metric in metrics.items()}, **_CORE_METRICS}


def make_metric_chart(
    groups: Sequence[Group], name: str, metric: Metric | None = None, *, evals: bool = False, large: bool = False,
    window: int | None = None,
) -> Chart | None:  # fmt: skip
    """Return a chart of a metric with a curve for each group that has it, or None if it is missing or 0 everywhere.

    For a single run (its group has no label), the single values are drawn faintly behind the line, or the range of a
    step if ``metric.band`` exists. Steps with an infinite value leave a gap, and the note counts them. ``metric`` is by
    default the entry in ``METRICS``. With ``evals``, the values come from the evaluations. A ``large`` chart is twice
    as high and as wide as the page. ``window`` is the number of averaged steps, by default chosen by the length of each
    curve.
    """
    metric = metric or METRICS[name]
    tables = [[run.evals if evals else run.metrics for run in group.runs] for group in groups]
    values = (value for group_tables in tables for table in group_tables for value in table.known(name))
    if metric.shares and any(not 0 <= value <= 1 for value in values):
        metric = replace(_ENVIRONMENT_METRIC, title=metric.title)  # an environment's number with the name of a share
    single_run, window = not groups[0].label, window if metric.smooth else 1
    curves = [
        make_curve(
            group_tables, name, group.label or metric.title, group.colour, group.kind, window=window,
            behind=single_run, limits=_find_limits(group, name, metric, group_tables), clock=clock,
        )
        for clock, (group, group_tables) in enumerate(zip(groups, tables, strict=True))
    ]  # fmt: skip
    curves = [curve for curve in curves if drop_missing(curve.line)]
    if not any(value for curve in curves for value in drop_missing(curve.line)):
        return None
    notes, metrics = [metric.note], tables[0][0]
    if single_run and metric.band and metrics.known(metric.band[0]):
        low, high, label = metric.band
        parts = split_rows(len(metrics.steps))
        band = (smooth_values(metrics.column(low), parts), smooth_values(metrics.column(high), parts))
        curves = [replace(curves[0], faint=(), band=band, band_label=label)]
        notes.append(f"shaded: {label} of a step")
    counts = [table.nonfinite.get(name, Counter()) for group_tables in tables for table in group_tables]
    steps = sum(count["inf"] for count in counts)
    if steps and metric.infinite:
        notes.append(f"infinite in {plural(steps, 'step')}, not drawn: {metric.infinite}")
    bounds = _REWARDS if name.endswith("reward") else None
    return Chart(
        metric.title, curves, "; ".join(filter(None, notes)), bounds, metric.shares, large=large, y_name=metric.unit,
        smooth=metric.smooth,
    )  # fmt: skip


def _find_limits(group: Group, name: str, metric: Metric, tables: Sequence[Table]) -> tuple[float | None, float | None]:
    """Return the lowest and the highest possible mean of a metric, to cut off intervals over seeds.

    A limit is None if it is unknown. Rewards have the lowest and highest reward of a completion, metrics without
    negative values have 0, and fractions have 1.
    """
    if name.endswith("reward"):
        return group.limits
    low = 0.0 if all(value >= 0 for table in tables for value in table.known(name)) else None
    return low, 1.0 if metric.shares else None


def make_reward_chart(run: RunRecord) -> Chart | None:
    """Return the chart of the mean reward with evaluations as points, or None for a run without any reward.

    The band around the mean is the standard deviation, or the standard error if all rewards are 0 or 1.
    """
    metrics, curves = run.metrics, []
    window = choose_window(len(metrics.steps))
    rewards_of_steps = [row.rewards for row in run.scored if row.rewards]
    zero_or_one = bool(rewards_of_steps) and all({*rewards} <= {0.0, 1.0} for rewards in rewards_of_steps)
    if metrics.known("reward"):
        curve = make_curve([metrics], "reward", "training")
        if metrics.known("reward_std"):
            halves = metrics.column("reward_std")
            if zero_or_one:  # the mean determines the standard deviation, so the standard error is more useful
                count = sum(map(len, rewards_of_steps)) / len(rewards_of_steps)
                halves = [None if half is None else half / math.sqrt(count) for half in halves]
            parts = split_rows(len(halves))
            band = make_band(curve.line, smooth_values(halves, parts, window))
            raw_band = make_band(curve.values, smooth_values(halves, parts))
            curve = replace(curve, band=band, raw_band=raw_band, band_label="± SE" if zero_or_one else "± std")
        curves.append(curve)
    if run.evals.known("eval_reward"):
        curves.append(Curve("evaluation", run.evals.steps, run.evals.column("eval_reward"), 2, "dots"))
    shaded = "± one standard error of a step's mean" if zero_or_one else "± one standard deviation"
    note = f"Mean over the completions of a step; shaded: {shaded}"
    return Chart("Reward", curves, note, _REWARDS, large=True, y_name="mean reward") if curves else None


def make_curve_charts(run: RunRecord) -> list[Chart]:
    """Return a run's charts: single rewards, metrics of environments, ``METRICS``, and unscored completions.

    Metrics without values, and metrics that never change, have no chart. Evaluations of a metric are points in its
    chart.
    """
    metrics, rewards, unscored = run.metrics, find_reward_names(run.metrics), _find_unscored_names(run.metrics)
    charts = []
    for name, metric in (_find_environment_metrics(metrics) | METRICS).items():
        chart = None if is_constant(metrics, name) else make_metric_chart([Group("", [run])], name, metric)
        if chart and (points := _make_points(run.evals, {name: "evaluation"}, 2)):
            chart = replace(chart, curves=[replace(chart.curves[0], label="training"), *points])
        charts += [chart] if chart else []
    if _differ_from_total(metrics, rewards):
        chart = _make_shared_chart("Single rewards", metrics, rewards, "means before weighting")
        points = _make_points(run.evals, {name: f"{label}, evaluation" for name, label in rewards.items()})
        charts.insert(0, replace(chart, curves=[*chart.curves, *points]))
    if unscored:
        index = len(charts) - any(metrics.known("tokens_per_second"))
        shares = all(value <= 1 for name in unscored for value in metrics.known(name))
        charts.insert(index, _make_shared_chart("Unscored", metrics, unscored, "completions without a score", shares))
    return charts


def _differ_from_total(metrics: Table, rewards: Mapping[str, str]) -> bool:
    """Return whether the rewards need their own chart: there are several, or the only one differs from the total."""
    return len(rewards) > 1 or any(metrics.column(name) != metrics.column("reward") for name in rewards)


def is_constant(metrics: Table, name: str) -> bool:
    """Return whether a metric has one value in all of at least three rows: a line of text says more than a chart."""
    values = metrics.known(name)
    return len(values) >= 3 and len(set(values)) == 1 and name not in metrics.nonfinite


def find_common_constants(tables: Sequence[Table], names: Sequence[str]) -> dict[str, str]:
    """Return the metrics that have the same single value in all runs, each with its value as text."""
    constant = [name for name in names if all(is_constant(table, name) for table in tables)]
    values = {name: {table.known(name)[0] for table in tables} for name in constant}
    return {name: format_number(single.pop()) for name, single in values.items() if len(single) == 1}


def _make_points(evals: Table, labels: Mapping[str, str], first_colour: int = 1) -> list[Curve]:
    """Return the evaluations (``eval_NAME``) of the training metrics NAME in ``labels`` as points.

    Only the first seven metrics count, and metrics without evaluations are left out. Their colours have the
    numbers ``first_colour``, ``first_colour + 1`` and so on.
    """
    return [
        Curve(label, evals.steps, evals.column(f"eval_{name}"), colour, "dots")
        for colour, (name, label) in enumerate([*labels.items()][:_MOST_CURVES], start=first_colour)
        if evals.known(f"eval_{name}")
    ]


def _make_shared_chart(title: str, metrics: Table, labels: dict[str, str], note: str, shares: bool = False) -> Chart:
    """Return one chart with a curve for each of the first seven columns in ``labels``, which maps columns to labels.

    With ``shares``, the values are fractions. ``note`` is the chart's text.
    """
    first = enumerate(list(labels.items())[:_MOST_CURVES], start=1)
    curves = [make_curve([metrics], name, label, colour, behind=False) for colour, (name, label) in first]
    return Chart(title, curves, note, shares=shares, y_name="" if shares else "mean")


def find_reward_names(metrics: Table) -> dict[str, str]:
    """Return a mapping from each column ``rewards/NAME/mean`` to NAME."""
    names = [name for name in metrics.columns if name.startswith("rewards/") and name.endswith("/mean")]
    return {name: name.split("/", 1)[1].removesuffix("/mean") for name in names}


def _find_environment_metrics(metrics: Table) -> dict[str, Metric]:
    """Return the metrics of environments (columns ``episodes/NAME``) that are not in ``METRICS`` and not constant."""
    names = [name for name in metrics.columns if name.startswith("episodes/") and name not in METRICS]
    changing = [name for name in names if len(set(metrics.known(name))) > 1]
    return {name: replace(_ENVIRONMENT_METRIC, title=name.removeprefix("episodes/")) for name in changing}


def _find_unscored_names(metrics: Table) -> dict[str, str]:
    """Return a mapping from columns of unscored completions to names of rewards, without columns of only zeros."""
    names = [name for name in metrics.columns if "no_verdict" in name and any(metrics.known(name))]
    labels = {name: name.removeprefix("rewards/").removesuffix("/no_verdict") for name in names}
    return labels | ({"rewards/no_verdict": "any reward"} if "rewards/no_verdict" in labels else {})


def make_phase_chart(metrics: Table, last_seconds: Mapping[str, float]) -> Chart | None:
    """Return the chart of seconds per step as stacked areas of the phases, or None if no phase was timed.

    The first phase is at the bottom. The axis ends below a few very long steps. Saves and evaluations run after a step,
    and the next row has their seconds: the chart shows them at the step that they follow. ``last_seconds`` has the
    seconds after the last step, by phase, if they are known.
    """
    columns = {name: metrics.column(f"seconds/{name}") for name in AFTER_STEP}
    following = {f"seconds/{name}": [*column[1:], last_seconds.get(name)] for name, column in columns.items()}
    metrics = replace(metrics, columns=metrics.columns | following)
    curves: list[Curve] = []
    above: list[float] = []
    for colour, phase in enumerate(PHASES, start=1):
        if metrics.known(f"seconds/{phase}"):
            curve = make_curve([metrics], f"seconds/{phase}", phase, colour, "layer", window=1, behind=False)
            seconds = [value or 0.0 for value in curve.line]
            below = above or [0.0] * len(seconds)
            above = [low + height for low, height in zip(below, seconds, strict=True)]
            curves.append(replace(curve, line=[*seconds], band=([*below], [*above])))
    # A rare slow step (a checkpoint) may exceed the frame, since it would flatten all other steps.
    top = max([*sorted(above)[: -(len(above) // 50) or None], 1e-9])
    return Chart("Seconds per step", curves, bounds=(0.0, top), unit="s", smooth=False) if curves else None


def make_other_charts(run: RunRecord) -> tuple[list[Chart], dict[str, str]]:
    """Return charts of the metrics that no other chart of the page shows, and the values of those that never change.

    Metrics that never change in training get no chart. Metrics of evaluations get one, except if the page draws the
    same metric in training.
    """
    metrics, evals = run.metrics, run.evals
    drawn = [name for name in METRICS if any(metrics.known(name)) and not is_constant(metrics, name)]
    in_charts = {
        *_NO_CURVES,
        *drawn,
        *_find_environment_metrics(metrics),
        *find_reward_names(metrics),
        *_find_unscored_names(metrics),
        *[f"seconds/{phase}" for phase in PHASES],
    }
    in_charts |= {end for name in drawn for end in METRICS[name].band or ()}
    names = sorted(name for name in metrics.columns if name not in in_charts)
    same = {name: format_number(metrics.last(name)) for name in names
            if len(set(metrics.known(name))) == 1 and name not in metrics.nonfinite}  # fmt: skip
    charts = [Chart(name, [make_curve([metrics], name, name)]) for name in names if name not in same]
    # Also metrics that are always inf, always -inf or always nan, such as a temperature of inf.
    same |= {
        name: next(iter(counts))
        for name, counts in metrics.nonfinite.items()
        if not metrics.known(name) and len(counts) == 1
    }
    rewards = find_reward_names(metrics)
    shown = ["reward", *drawn, *_find_environment_metrics(metrics)]
    shown += [*rewards][:_MOST_CURVES] if _differ_from_total(metrics, rewards) else []
    for name in sorted(evals.columns.keys() - {"step", *(f"eval_{name}" for name in shown)}):
        title = name if name.startswith("eval_") else f"evaluation: {name}"
        charts.append(Chart(title, [Curve(name, evals.steps, evals.column(name), kind="dots")]))
    return charts, dict(sorted(same.items()))
