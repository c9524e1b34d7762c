"""Which metrics of a run are drawn, and how."""

from __future__ import annotations

from dataclasses import replace

from grpo_recipes.report.blocks import Layer, stack
from grpo_recipes.report.chart import Chart, Curve, draw, thinned, thinned_means, thinned_steps
from grpo_recipes.report.curves import buckets, known, smooth, window_of
from grpo_recipes.report.markup import Html, element, together
from grpo_recipes.report.metrics import METRICS, gaps
from grpo_recipes.report.read import Column, RunRecord, Table
from grpo_recipes.report.units import short

PHASES = ("sample", "score", "update", "sync", "save", "evaluate")
# Keys of metrics.jsonl that are no curve, and those other charts show already.
_NO_CURVES = frozenset({"step", "max_steps", "epoch", "num_tokens", "step_time", "reward", "reward_std"})


def reward_chart(run: RunRecord) -> Html | None:
    """The mean reward with its spread, and evaluations as points."""
    metrics, curves = run.metrics, []
    if metrics.has("reward"):
        curves.append(_spread(metrics, thinned(metrics, "reward", "training")))
    if run.evals.has("eval_reward"):
        curves.append(Curve("evaluation", run.evals.steps, run.evals.column("eval_reward"), 2, dots=True))
    if not curves:
        return None
    note = f"Mean over the completions of a step{_smoothing(metrics)}; shaded: ± one standard deviation"
    bounds = (0.0, 1.0) if all(0 <= value <= 1 for curve in curves for value in known(curve.line)) else None
    return draw(Chart("Reward", curves, note, bounds, large=True))


def _spread(metrics: Table, curve: Curve) -> Curve:
    if not metrics.has("reward_std"):
        return curve
    spread = smooth(metrics.column("reward_std"), buckets(len(metrics.steps)), window_of(len(metrics.steps)))
    pairs = list(zip(curve.line, spread, strict=True))
    low: Column = [None if mean is None or std is None else mean - std for mean, std in pairs]
    high: Column = [None if mean is None or std is None else mean + std for mean, std in pairs]
    return replace(curve, band=(low, high), band_label="± std")


def _smoothing(table: Table) -> str:
    window = window_of(len(table.steps))
    return f", averaged over {window} steps" if window > 1 else ""


def curve_charts(run: RunRecord) -> list[Html]:
    """The charts of the field's usual metrics that have something to show."""
    metrics = run.metrics
    charts = [_reward_parts(metrics), *[_single(metrics, name) for name in METRICS]]
    charts.insert(-1, _no_verdict(metrics))
    return [draw(chart) for chart in charts if chart is not None]


def how_to_read(run: RunRecord) -> Html | None:
    """What lines and shades of the small charts are."""
    rows = len(run.metrics.steps)
    window, points = window_of(rows), len(buckets(rows))
    if window == 1:
        return None
    behind = "single steps" if points == rows else f"the range of every {rows // points} steps"
    return element("p", f"Lines are means over {window} steps; faint behind them: {behind}.", class_="note")


def _single(metrics: Table, name: str) -> Chart | None:
    metric = METRICS[name]
    if not _worth_drawing(metrics, name):
        return None
    curve, notes = thinned(metrics, name, metric.title, window=None if metric.smooth else 1), [metric.note]
    if metric.band and metrics.has(metric.band[0]):
        low, high = (thinned_means(metrics, end) for end in metric.band)
        curve = replace(curve, faint=None, band=(low, high), band_label=metric.band_label)
        notes.append(f"shaded: {metric.band_label} of a step")
    notes.append(gaps([metrics], name))
    return Chart(metric.title, [curve], "; ".join(filter(None, notes)), shares=metric.shares)


def _worth_drawing(table: Table, name: str) -> bool:
    return any(value != 0 for value in known(table.column(name)))


def _reward_names(metrics: Table) -> list[str]:
    return [name for name in metrics.columns if name.startswith("rewards/") and name.endswith("/mean")]


def _reward_parts(metrics: Table) -> Chart | None:
    """Each reward before weighting; of a single one only where it is not the total itself."""
    names = _reward_names(metrics)
    if not names or (len(names) == 1 and metrics.column(names[0]) == metrics.column("reward")):
        return None
    curves = [
        replace(thinned(metrics, name, name.split("/", 1)[1].removesuffix("/mean"), colour), band=None, faint=None)
        for colour, name in enumerate(names[:7], start=1)
    ]
    return Chart("Rewards one by one", curves, "means before weighting")


def _verdict_names(metrics: Table) -> list[str]:
    return [name for name in metrics.columns if "no_verdict" in name and _worth_drawing(metrics, name)]


def _no_verdict(metrics: Table) -> Chart | None:
    names = _verdict_names(metrics)
    if not names:
        return None
    curves = [replace(thinned(metrics, name, _verdict_label(name), colour), band=None, faint=None)
              for colour, name in enumerate(names[:7], start=1)]  # fmt: skip
    shares = all(value <= 1 for name in names for value in known(metrics.column(name)))
    return Chart("No verdict", curves, "completions a reward could not judge", shares=shares)


def _verdict_label(name: str) -> str:
    return "any reward" if name == "rewards/no_verdict" else name.removeprefix("rewards/").removesuffix("/no_verdict")


def phase_chart(run: RunRecord) -> Html | None:
    """Seconds of each step, phase on phase."""
    metrics = run.metrics
    layers = [
        Layer(phase, [value or 0.0 for value in thinned_means(metrics, f"seconds/{phase}")], colour)
        for colour, phase in enumerate(PHASES, start=1)
        if metrics.has(f"seconds/{phase}")
    ]
    return stack("Seconds of a step", "", thinned_steps(metrics), layers) if layers else None


def other_metrics(run: RunRecord) -> Html | None:
    """Every number that no other chart shows, so that nothing is hidden."""
    metrics = run.metrics
    drawn = [name for name in METRICS if _worth_drawing(metrics, name)]
    shown = {*_NO_CURVES, *drawn, *_reward_names(metrics), *_verdict_names(metrics), *[f"seconds/{x}" for x in PHASES]}
    shown |= {end for name in drawn for end in METRICS[name].band or ()}
    names = sorted(name for name in metrics.columns if name not in shown and not name.startswith("eval_"))
    still = [name for name in names if len(set(known(metrics.column(name)))) == 1 and name not in metrics.odd]
    same = {name: short(metrics.last(name)) for name in still} | _never_finite(metrics)
    moving = [draw(Chart(name, [thinned(metrics, name, name)])) for name in names if name not in still]
    moving += [_evaluated(run.evals, name) for name in sorted(run.evals.columns) if name not in ("step", "eval_reward")]
    if not moving and not same:
        return None
    return element(
        "details",
        element("summary", f"Other metrics ({len(moving) + len(same)})"),
        element("div", *moving, class_="grid-charts"),
        _constants(same),
        class_="more",
    )


def _evaluated(evals: Table, name: str) -> Html:
    title = name if name.startswith("eval_") else f"evaluation: {name}"
    return draw(Chart(title, [Curve(name, evals.steps, evals.column(name), dots=True)]))


def _never_finite(metrics: Table) -> dict[str, str]:
    """Metrics that were one and the same of inf, -inf and nan throughout, such as a temperature of inf."""
    alike = {name: seen for name, seen in metrics.odd.items() if not metrics.has(name) and len(seen) == 1}
    return {name: text for name, seen in alike.items() for text in seen}


def _constants(same: dict[str, str]) -> Html | None:
    if not same:
        return None
    parts = [together([element("code", name), f" {value}"]) for name, value in sorted(same.items())]
    listed = together(part if index == 0 else together([", ", part]) for index, part in enumerate(parts))
    return element("p", "The same in every step: ", listed, class_="note")
