"""The charts of one run: which metrics are drawn, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from grpo_recipes.report.chart import (
    Chart,
    Curve,
    Layer,
    Rows,
    around,
    axis,
    bar_pairs,
    buckets,
    draw,
    heat_map,
    means,
    smooth,
    stack,
    thinned,
    thinned_steps,
    window_of,
)
from grpo_recipes.report.page import fragment, short
from grpo_recipes.report.read import RunRecord, Scored, Table
from grpo_recipes.runs.health import known

# Phase of a step -> what it is, in the order of their colours.
PHASES = {
    "sample": "waiting for completions",
    "score": "rewards",
    "update": "forward, backward, optimizer",
    "sync": "weights to the server",
    "save": "checkpoints",
    "evaluate": "evaluations",
}
# Keys of metrics.jsonl that are no curve, and those other charts show already.
_NO_CURVES = frozenset({"step", "max_steps", "epoch", "num_tokens", "step_time", "reward", "reward_std"})
_HISTOGRAM_COLUMNS = 60
_FEW_VALUES = 8  # distinct rewards up to which each has a row of its own


@dataclass(frozen=True)
class Metric:
    """How a column of ``metrics.jsonl`` is drawn."""

    title: str
    note: str = ""  # a few words on what it is
    shares: bool = False  # values are shares, marked in per cent
    band: tuple[str, str] | None = None  # columns of the least and the greatest of a step, drawn on a run's own page
    band_label: str = ""  # what these are
    smooth: bool = True  # its line is a moving mean; without, it has no noise
    compared: bool = True  # the page that compares runs draws it too
    infinite: str = ""  # what it means where it is infinite; empty where that is a fault


# In the order of the page.
METRICS = {
    "kl": Metric("KL divergence", "from the reference"),
    "beta": Metric("KL coefficient", "beta of the loss, moved to hold kl_target", smooth=False),
    "entropy": Metric("Entropy", "of the policy on its completions"),
    "completions/mean_length": Metric(
        "Completion length",
        "mean tokens",
        band=("completions/min_length", "completions/max_length"),
        band_label="shortest to longest",
    ),
    "completions/clipped_ratio": Metric("Clipped completions", "share that reached max_completion_length", shares=True),
    "frac_reward_zero_std": Metric(
        "Groups without a signal", "share whose completions all got one reward", shares=True
    ),
    "maxent/incorrect_mass": Metric(
        "MaxEnt weight on wrong answers", "share of a group's weight, mean over groups", shares=True
    ),
    "maxent/target_ratio": Metric(
        "MaxEnt weight, right over wrong",
        "mean weight of right answers by that of wrong ones",
        infinite="no weight on wrong answers",
    ),
    "maxent/eff_rollouts": Metric("Effective completions", "of a group, by the entropy of its MaxEnt weights"),
    "maxent/weight_entropy": Metric(
        "MaxEnt weight entropy",
        "nats, mean over groups",
        band=("maxent/weight_entropy_min", "maxent/weight_entropy_max"),
        band_label="least to greatest",
    ),
    "maxent/tau": Metric("MaxEnt temperature", "tau of the weights", smooth=False, infinite="all weights alike"),
    "maxent/beta": Metric("MaxEnt pull to the reference", "beta of the target", smooth=False),
    "loss": Metric("Loss", "of the clipped objective: no measure of progress", compared=False),
    "grad_norm": Metric("Gradient norm"),
    "learning_rate": Metric("Learning rate", smooth=False, compared=False),
    "sampling/sampling_logp_difference/mean": Metric(
        "Server against trainer", "mean difference of log-probs of sampled tokens", compared=False
    ),
    "tokens_per_second": Metric("Speed", "tokens per second"),
}


def note_of(tables: Iterable[Table], name: str, *more: str) -> str:
    """Return the note of a metric, and a word on the steps in which it was infinite, which leave a gap in its line."""
    steps = sum(table.odd[name]["inf"] for table in tables if name in table.odd)
    meaning = METRICS[name].infinite
    gaps = f"infinite in {steps:,} step{'s' * (steps > 1)}, not drawn: {meaning}" if steps and meaning else ""
    return "; ".join(filter(None, (METRICS[name].note, *more, gaps)))


def reward_chart(run: RunRecord) -> Markup | None:
    """Return the mean reward with its spread, and evaluations as points."""
    metrics, curves = run.metrics, []
    window = window_of(len(metrics.steps))
    if metrics.has("reward"):
        curve = thinned(metrics, "reward", "training")
        if metrics.has("reward_std"):
            spread = smooth(metrics.column("reward_std"), buckets(len(metrics.steps)), window)
            curve = replace(curve, band=around(curve.line, spread), band_label="± std")
        curves.append(curve)
    if run.evals.has("eval_reward"):
        curves.append(Curve("evaluation", run.evals.steps, run.evals.column("eval_reward"), 2, dots=True))
    if not curves:
        return None
    smoothing = f", averaged over {window} steps" if window > 1 else ""
    note = f"Mean over the completions of a step{smoothing}; shaded: ± one standard deviation"
    bounds = (0.0, 1.0) if all(0 <= value <= 1 for curve in curves for value in known(curve.line)) else None
    return draw(Chart("Reward", curves, note, bounds, large=True))


def curve_charts(run: RunRecord) -> list[Markup]:
    """Return the charts of the field's usual metrics that have something to show."""
    metrics = run.metrics
    charts = [_reward_parts(metrics), *[_single(metrics, name) for name in METRICS]]
    charts.insert(-1, _unscored(metrics))
    return [draw(chart) for chart in charts if chart is not None]


def how_to_read(run: RunRecord) -> str:
    """Return what lines and shades of the small charts are."""
    rows = len(run.metrics.steps)
    window, points = window_of(rows), len(buckets(rows))
    if window == 1:
        return ""
    behind = "single steps" if points == rows else f"the range of every {rows // points} steps"
    return f"Lines are means over {window} steps; faint behind them: {behind}."


def _single(metrics: Table, name: str) -> Chart | None:
    if not _worth_drawing(metrics, name):
        return None
    metric, more = METRICS[name], ""
    curve = thinned(metrics, name, metric.title, window=None if metric.smooth else 1)
    if metric.band and metrics.has(metric.band[0]):
        parts = buckets(len(metrics.steps))
        low, high = (means(metrics.column(end), parts) for end in metric.band)
        curve = replace(curve, faint=None, band=(low, high), band_label=metric.band_label)
        more = f"shaded: {metric.band_label} of a step"
    return Chart(metric.title, [curve], note_of([metrics], name, more), shares=metric.shares)


def _worth_drawing(table: Table, name: str) -> bool:
    return any(value != 0 for value in known(table.column(name)))


def reward_names(metrics: Table) -> dict[str, str]:
    """Return the columns that hold the mean of one reward, each with the reward's name."""
    return {
        name: name.split("/", 1)[1].removesuffix("/mean")
        for name in metrics.columns
        if name.startswith("rewards/") and name.endswith("/mean")
    }


def _several(title: str, metrics: Table, named: dict[str, str], note: str, shares: bool = False) -> Chart:
    """Return the first seven of some columns in one chart; ``named``: column -> label."""
    curves = [replace(thinned(metrics, name, label, colour), band=None, faint=None)
              for colour, (name, label) in enumerate(list(named.items())[:7], start=1)]  # fmt: skip
    return Chart(title, curves, note, shares=shares)


def _reward_parts(metrics: Table) -> Chart | None:
    """Return each reward before weighting; a single one only where it is not the total itself."""
    named = reward_names(metrics)
    if not named or (len(named) == 1 and metrics.column(next(iter(named))) == metrics.column("reward")):
        return None
    return _several("Rewards one by one", metrics, named, "means before weighting")


def _unscored_names(metrics: Table) -> dict[str, str]:
    found = [name for name in metrics.columns if "no_verdict" in name and _worth_drawing(metrics, name)]
    labels = {name: name.removeprefix("rewards/").removesuffix("/no_verdict") for name in found}
    return labels | ({"rewards/no_verdict": "any reward"} if "rewards/no_verdict" in labels else {})


def _unscored(metrics: Table) -> Chart | None:
    named = _unscored_names(metrics)
    shares = all(value <= 1 for name in named for value in known(metrics.column(name)))
    return _several("Unscored", metrics, named, "completions without a score", shares) if named else None


def phase_chart(run: RunRecord) -> Markup | None:
    """Return seconds of each step, phase on phase."""
    metrics, parts = run.metrics, buckets(len(run.metrics.steps))
    layers = [
        Layer(phase, [value or 0.0 for value in means(metrics.column(f"seconds/{phase}"), parts)], colour)
        for colour, phase in enumerate(PHASES, start=1)
        if metrics.has(f"seconds/{phase}")
    ]
    return stack("Seconds of a step", "", thinned_steps(metrics), layers) if layers else None


def other_metrics(run: RunRecord) -> Markup | None:
    """Return every number that no other chart shows, so that nothing is hidden."""
    metrics, evals = run.metrics, run.evals
    drawn = [name for name in METRICS if _worth_drawing(metrics, name)]
    shown = {*_NO_CURVES, *drawn, *reward_names(metrics), *_unscored_names(metrics), *[f"seconds/{x}" for x in PHASES]}
    shown |= {end for name in drawn for end in METRICS[name].band or ()}
    names = sorted(name for name in metrics.columns if name not in shown and not name.startswith("eval_"))
    still = [name for name in names if len(set(known(metrics.column(name)))) == 1 and name not in metrics.odd]
    same = {name: short(metrics.last(name)) for name in still}
    # One and the same of inf, -inf and nan throughout, such as a temperature of inf.
    same |= {name: next(iter(seen)) for name, seen in metrics.odd.items() if not metrics.has(name) and len(seen) == 1}
    charts = [Chart(name, [thinned(metrics, name, name)]) for name in names if name not in still]
    for name in sorted(evals.columns):
        if name not in ("step", "eval_reward"):
            title = name if name.startswith("eval_") else f"evaluation: {name}"
            charts.append(Chart(title, [Curve(name, evals.steps, evals.column(name), dots=True)]))
    if not charts and not same:
        return None
    return fragment("run.html.j2", "other_metrics", [draw(chart) for chart in charts], sorted(same.items()))


def reward_spread(scored: Sequence[Scored]) -> list[Markup]:
    """Return how rewards of single completions are spread: a heat map over the steps, and first against last steps."""
    scored = [row for row in scored if row.rewards]
    parts = buckets(len(scored), _HISTOGRAM_COLUMNS)
    if len(parts) <= 2:
        return []
    bins = Bins(scored)
    columns = [bins.shares(scored[part]) for part in parts]
    steps = [scored[part.stop - 1 if part.start else 0].step for part in parts]
    note = "stronger colour: more of the completions of a step"
    heat = heat_map("Reward of completions", note, steps, bins.rows, columns)
    tenth = max(1, len(scored) // 10)
    first, last = scored[:tenth], scored[-tenth:]
    pairs = list(zip(bins.shares(first), bins.shares(last), strict=True))
    note = "share of completions by reward"
    return [heat, bar_pairs("First against last", note, bins.rows, (_steps_named(first), _steps_named(last)), pairs)]


class Bins:
    """Rows of a histogram: each value of its own where there are few, else ranges of equal width."""

    def __init__(self, scored: Sequence[Scored]):
        counts: Counter[float] = Counter()
        for row in scored:
            counts.update(row.rewards)
        self._values = sorted(counts) if len(counts) <= _FEW_VALUES else []
        self._edges = axis(min(counts), max(counts), 16)
        self._count = max(1, len(self._edges.ticks) - 1)
        self.rows = Rows([short(value) for value in self._values or self._edges.ticks[: self._count]], not self._values)

    def shares(self, rows: Sequence[Scored]) -> list[float]:
        """Return the share of the rows' completions in each bin, the lowest first."""
        counts = Counter(self._bin(reward) for row in rows for reward in row.rewards)
        return [counts[index] / (counts.total() or 1) for index in range(len(self.rows.names))]

    def _bin(self, reward: float) -> int:
        if self._values:
            return self._values.index(reward)
        return min(self._count - 1, int(self._edges.share(reward) * self._count))


def _steps_named(rows: Sequence[Scored]) -> str:
    first, last = rows[0].step, rows[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
