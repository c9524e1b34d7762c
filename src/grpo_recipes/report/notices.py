"""What a person who knows GRPO would point at."""

from __future__ import annotations

from grpo_recipes.report.curves import known, mean
from grpo_recipes.report.markup import Html, element, together
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
    for name, times in metrics.odd.items():
        found.append(f"{name} was inf or nan in {times} step{'s' * (times > 1)}.")
    if metrics.unreadable:
        found.append(f"{metrics.unreadable} line{'s' * (metrics.unreadable > 1)} of metrics.jsonl could not be read.")
    return found


def notice_list(run: RunRecord) -> Html | None:
    """The notices as a list."""
    texts = notices(run)
    if not texts:
        return None
    return element(
        "aside", element("h2", "Worth a look"), element("ul", together(element("li", text) for text in texts))
    )
