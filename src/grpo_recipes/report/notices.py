"""What a person who knows GRPO would point at."""

from __future__ import annotations

from grpo_recipes.objectives import OBJECTIVES
from grpo_recipes.report.curves import known, mean
from grpo_recipes.report.groups import recipe_value
from grpo_recipes.report.markup import Html, element, together
from grpo_recipes.report.metrics import METRICS
from grpo_recipes.report.read import RunRecord
from grpo_recipes.report.units import percent, short


def notices(run: RunRecord) -> list[str]:
    """What a person who knows GRPO would point at."""
    metrics = run.metrics
    found = []
    for name, limit, text in (
        (
            "completions/clipped_ratio",
            0.25,
            "of completions reach max_completion_length: raise it, or ask for less text",
        ),
        (
            "frac_reward_zero_std",
            0.8,
            "of groups get one reward for all completions: they teach nothing; change the data",
        ),
    ):
        recent = mean(known(metrics.column(name))[-10:])
        if recent is not None and recent > limit:
            found.append(f"{percent(recent)} {text}.")
    entropy = known(metrics.column("entropy"))
    if len(entropy) >= 20 and 0 < (mean(entropy[:5]) or 0) * 0.05 > (mean(entropy[-5:]) or 0):
        found.append(
            f"Entropy fell from {short(mean(entropy[:5]))} to {short(mean(entropy[-5:]))}: little is explored."
        )
    found += _wrong_answers(run)
    for name, seen in metrics.odd.items():
        meant = seen["inf"] if name in METRICS and METRICS[name].infinite else 0
        if times := seen.total() - meant:
            found.append(f"{name} was inf or nan in {times} step{'s' * (times > 1)}.")
    if metrics.unreadable:
        found.append(f"{metrics.unreadable} line{'s' * (metrics.unreadable > 1)} of metrics.jsonl could not be read.")
    return found


def _wrong_answers(run: RunRecord) -> list[str]:
    """Where the policy is moved towards the weights, most of the weight must not be on wrong answers."""
    objective = recipe_value(run, "maxent_objective")
    masses = known(run.metrics.column("maxent/incorrect_mass"))
    if objective not in OBJECTIVES or not OBJECTIVES[objective].targets_q or not masses:
        return []
    steps = sum(mass > 0.5 for mass in masses)
    if steps <= 0.5 * len(masses):
        return []
    return [
        f"More than half of the MaxEnt weight was on wrong answers in {percent(steps / len(masses))} of the steps, and "
        f"{objective} moves the policy towards the weights: lower maxent_q_temperature, maxent_tau or maxent_beta."
    ]


def notice_list(run: RunRecord) -> Html | None:
    """The notices as a list."""
    texts = notices(run)
    if not texts:
        return None
    return element(
        "aside", element("h2", "Worth a look"), element("ul", together(element("li", text) for text in texts))
    )
