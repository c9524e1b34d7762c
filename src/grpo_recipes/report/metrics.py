"""The metrics that have a chart of their own, in the order of the page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_recipes.report.read import Table


@dataclass(frozen=True)
class Metric:
    """How a column of ``metrics.jsonl`` is drawn.

    Attributes:
        title: of its chart.
        note: a few words on what it is.
        shares: values are shares, marked in per cent.
        band: columns of the least and the greatest of a step, drawn around it on the page of one run.
        band_label: what these are.
        smooth: whether its line is a moving mean; without, it has no noise.
        compared: whether the page that compares runs draws it too.
        infinite: what it means where it is infinite; empty where that is a fault.
    """

    title: str
    note: str = ""
    shares: bool = False
    band: tuple[str, str] | None = None
    band_label: str = ""
    smooth: bool = True
    compared: bool = True
    infinite: str = ""


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


def gaps(tables: Iterable[Table], name: str) -> str:
    """What to say of the steps in which a metric was infinite, which leave a gap in its line."""
    steps = sum(table.odd[name]["inf"] for table in tables if name in table.odd)
    meaning = METRICS[name].infinite
    return f"infinite in {steps:,} step{'s' * (steps > 1)}, not drawn: {meaning}" if steps and meaning else ""
