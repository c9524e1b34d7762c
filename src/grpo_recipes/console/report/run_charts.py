"""Which metrics of a run, or of several side by side, are drawn, and how."""

import math
from collections.abc import Sequence
from dataclasses import replace

from grpo_recipes.console.report.chart import Chart, Curve, around, buckets, curve_of, smooth, window_of
from grpo_recipes.console.report.page import short
from grpo_recipes.console.report.read import Group, RunRecord, Table
from grpo_recipes.process.reports import plural
from grpo_recipes.recipe.extensions import parts
from grpo_recipes.runs.health import without_gaps
from grpo_recipes.runs.metric import Metric

# Phase of a step -> its meaning, in the order of their colours.
PHASES = {
    "sample": "waiting for completions",
    "score": "rewards",
    "update": "forward, backward, optimizer",
    "sync": "weights to the server",
    "save": "checkpoints",
    "evaluate": "evaluations",
}
_REWARDS = (0.0, 1.0)  # ends of their axis where they are between them
# Keys of metrics.jsonl that need no curve, and those that other charts already show.
_NO_CURVES = frozenset({"step", "max_steps", "epoch", "num_tokens", "step_time", "reward", "reward_std"})


_OWN = Metric("", "as the environment gives it, mean over episodes")
# In the order of the page.
_OF_ALL_RUNS = {
    "kl": Metric("KL divergence", "from the reference", unit="nats a token"),
    "beta": Metric("KL coefficient", "beta of the loss, moved to hold kl_target", smooth=False),
    "entropy": Metric("Entropy", "of the policy on its completions", unit="nats a token"),
    "completions/mean_length":
        Metric("Completion length", "mean tokens",
               band=("completions/min_length", "completions/max_length", "shortest to longest"), unit="tokens"),
    "completions/clipped_ratio": Metric("Clipped completions", "share that reached max_completion_length", shares=True),
    "frac_reward_zero_std":
        Metric("Groups without a signal", "share whose completions all got one reward", shares=True),
    "maxent/incorrect_mass":
        Metric("MaxEnt weight on wrong answers", "share of a group's weight, mean over groups", shares=True),
    "maxent/target_ratio":
        Metric("MaxEnt weight, right over wrong", "mean weight of right answers by that of wrong ones",
               infinite="no weight on wrong answers"),
    "maxent/eff_rollouts":
        Metric("Effective completions", "of a group, by the entropy of its MaxEnt weights", unit="completions"),
    "maxent/weight_entropy":
        Metric("MaxEnt weight entropy", "nats, mean over groups",
               band=("maxent/weight_entropy_min", "maxent/weight_entropy_max", "least to greatest"), unit="nats"),
    "maxent/tau": Metric("MaxEnt temperature", "tau of the weights", smooth=False, infinite="all weights alike"),
    "maxent/beta": Metric("MaxEnt pull to the reference", "beta of the target", smooth=False),
    "loss": Metric("Loss", "of the clipped objective: it does not measure progress", compared=False),
    "grad_norm": Metric("Gradient norm"),
    "learning_rate": Metric("Learning rate", smooth=False, compared=False),
    "sampling/sampling_logp_difference/mean":
        Metric("Server against trainer", "mean difference of log-probs of sampled tokens", compared=False, unit="nats"),
    "tokens_per_second": Metric("Speed", unit="tokens per second"),
}  # fmt: skip
METRICS = {**{name: metric for metrics in parts("metrics") for name, metric in metrics.items()}, **_OF_ALL_RUNS}


def metric_chart(
    groups: Sequence[Group], name: str, metric: Metric | None = None, *, evals: bool = False, large: bool = False
) -> Chart | None:
    """Return a metric of every group that has it, None where it is missing or 0 everywhere.

    On the page of a single run, whose group has no label, every value is faintly behind the line, or a step's least and
    greatest are. Steps in which the metric was infinite leave a gap in the line, and are counted in the note.
    """
    metric = metric or METRICS[name]
    tables = [[run.evals if evals else run.metrics for run in group.runs] for group in groups]
    if any(not 0 <= value <= 1 for found in tables for table in found for value in table.known(name)) and metric.shares:
        metric = replace(_OWN, title=metric.title)  # an environment may give what it likes by the name of a share
    alone, window = not groups[0].label, None if metric.smooth else 1
    curves = [curve_of(found, name, group.label or metric.title, group.colour, group.kind, window=window, behind=alone,
                       limits=_limits(group, name, metric, found))
              for group, found in zip(groups, tables, strict=True)]  # fmt: skip
    curves = [curve for curve in curves if without_gaps(curve.line)]
    if not any(value for curve in curves for value in without_gaps(curve.line)):
        return None
    notes, metrics = [metric.note], tables[0][0]
    if alone and metric.band and metrics.known(metric.band[0]):
        low, high, label = metric.band
        parts = buckets(len(metrics.steps))
        band = (smooth(metrics.column(low), parts), smooth(metrics.column(high), parts))
        curves = [replace(curves[0], faint=(), band=band, band_label=label)]
        notes.append(f"shaded: {label} of a step")
    steps = sum(table.odd[name]["inf"] for found in tables for table in found if name in table.odd)
    if steps and metric.infinite:
        notes.append(f"infinite in {plural(steps, 'step')}, not drawn: {metric.infinite}")
    bounds = _REWARDS if name.endswith("reward") else None
    return Chart(
        metric.title, curves, "; ".join(filter(None, notes)), bounds, metric.shares, large=large, y_name=metric.unit
    )


def _limits(group: Group, name: str, metric: Metric, tables: Sequence[Table]) -> tuple[float | None, float | None]:
    """Return what no mean of the metric is beyond: an interval over seeds ends there."""
    if name.endswith("reward"):
        return group.limits
    low = 0.0 if all(value >= 0 for table in tables for value in table.known(name)) else None
    return low, 1.0 if metric.shares else None


def reward_chart(run: RunRecord) -> Chart | None:
    """Return the mean reward with its spread, and evaluations as points."""
    metrics, curves = run.metrics, []
    window = window_of(len(metrics.steps))
    judged = [row.rewards for row in run.scored if row.rewards]
    right_or_wrong = bool(judged) and all({*rewards} <= {0.0, 1.0} for rewards in judged)
    if metrics.known("reward"):
        curve = curve_of([metrics], "reward", "training")
        if metrics.known("reward_std"):
            halves = smooth(metrics.column("reward_std"), buckets(len(metrics.steps)), window)
            if right_or_wrong:  # their standard deviation follows from their mean and says nothing more
                count = sum(map(len, judged)) / len(judged)
                halves = [None if half is None else half / math.sqrt(count) for half in halves]
            curve = replace(curve, band=around(curve.line, halves), band_label="± SE" if right_or_wrong else "± std")
        curves.append(curve)
    if run.evals.known("eval_reward"):
        curves.append(Curve("evaluation", run.evals.steps, run.evals.column("eval_reward"), 2, "dots"))
    smoothing = f", averaged over {window} steps" if window > 1 else ""
    shaded = "± one standard error of a step's mean" if right_or_wrong else "± one standard deviation"
    note = f"Mean over the completions of a step{smoothing}; shaded: {shaded}"
    return Chart("Reward", curves, note, _REWARDS, large=True, y_name="mean reward") if curves else None


def curve_charts(run: RunRecord) -> list[Chart]:
    """Return the charts of the field's usual metrics that have something to show."""
    metrics, rewards, unscored = run.metrics, reward_names(run.metrics), _unscored_names(run.metrics)
    named = _of_the_environment(metrics) | METRICS
    charts = [chart for name, one in named.items() if (chart := metric_chart([Group("", [run])], name, one))]
    # A single reward is drawn only where it is not the total itself.
    if len(rewards) > 1 or (rewards and metrics.column(next(iter(rewards))) != metrics.column("reward")):
        charts.insert(0, _several("Rewards one by one", metrics, rewards, "means before weighting"))
    if unscored:
        place = len(charts) - any(metrics.known("tokens_per_second"))
        shares = all(value <= 1 for name in unscored for value in metrics.known(name))
        charts.insert(place, _several("Unscored", metrics, unscored, "completions without a score", shares))
    return charts


def _several(title: str, metrics: Table, named: dict[str, str], note: str, shares: bool = False) -> Chart:
    """Return the first seven of some columns in one chart; ``named``: column -> label."""
    first = enumerate(list(named.items())[:7], start=1)
    curves = [curve_of([metrics], name, label, colour, behind=False) for colour, (name, label) in first]
    return Chart(title, curves, note, shares=shares, y_name="" if shares else "mean")


def reward_names(metrics: Table) -> dict[str, str]:
    """Return the columns that hold the mean of one reward, each with the reward's name."""
    names = [name for name in metrics.columns if name.startswith("rewards/") and name.endswith("/mean")]
    return {name: name.split("/", 1)[1].removesuffix("/mean") for name in names}


def _of_the_environment(metrics: Table) -> dict[str, Metric]:
    """Return the numbers that an environment gives by names of its own, where they change."""
    names = [name for name in metrics.columns if name.startswith("episodes/") and name not in METRICS]
    changing = [name for name in names if len(set(metrics.known(name))) > 1]
    return {name: replace(_OWN, title=name.removeprefix("episodes/")) for name in changing}


def _unscored_names(metrics: Table) -> dict[str, str]:
    found = [name for name in metrics.columns if "no_verdict" in name and any(metrics.known(name))]
    labels = {name: name.removeprefix("rewards/").removesuffix("/no_verdict") for name in found}
    return labels | ({"rewards/no_verdict": "any reward"} if "rewards/no_verdict" in labels else {})


def phase_chart(metrics: Table) -> Chart | None:
    """Return seconds of each step: areas, phase on phase, the first at the bottom."""
    curves: list[Curve] = []
    above: list[float] = []
    for colour, phase in enumerate(PHASES, start=1):
        if metrics.known(f"seconds/{phase}"):
            curve = curve_of([metrics], f"seconds/{phase}", phase, colour, "layer", window=1, behind=False)
            seconds = [value or 0.0 for value in curve.line]
            below = above or [0.0] * len(seconds)
            above = [low + height for low, height in zip(below, seconds, strict=True)]
            curves.append(replace(curve, line=[*seconds], band=([*below], [*above])))
    # A rare slow step (a checkpoint) may exceed the frame: it would flatten all others.
    top = max([*sorted(above)[: -(len(above) // 50) or None], 1e-9])
    return Chart("Seconds of a step", curves, bounds=(0.0, top), unit="s") if curves else None


def other_metrics(run: RunRecord) -> tuple[list[Chart], dict[str, str]]:
    """Return all that no other chart shows, so that nothing is hidden: charts, and metrics that never change."""
    metrics, evals = run.metrics, run.evals
    drawn = [name for name in METRICS if any(metrics.known(name))]
    shown = {
        *_NO_CURVES,
        *drawn,
        *_of_the_environment(metrics),
        *reward_names(metrics),
        *_unscored_names(metrics),
        *[f"seconds/{x}" for x in PHASES],
    }
    shown |= {end for name in drawn for end in METRICS[name].band or ()}
    names = sorted(name for name in metrics.columns if name not in shown)
    same = {name: short(metrics.last(name)) for name in names
            if len(set(metrics.known(name))) == 1 and name not in metrics.odd}  # fmt: skip
    charts = [Chart(name, [curve_of([metrics], name, name)]) for name in names if name not in same]
    # Always the same of inf, -inf and nan, such as a temperature of inf.
    same |= {name: next(iter(seen)) for name, seen in metrics.odd.items() if not metrics.known(name) and len(seen) == 1}
    for name in sorted(evals.columns.keys() - {"step", "eval_reward"}):
        title = name if name.startswith("eval_") else f"evaluation: {name}"
        charts.append(Chart(title, [Curve(name, evals.steps, evals.column(name), kind="dots")]))
    return charts, dict(sorted(same.items()))
