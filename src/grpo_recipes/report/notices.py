"""What a person who knows GRPO would point at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from grpo_recipes.report.groups import recipe_value
from grpo_recipes.report.markup import Html, element, together
from grpo_recipes.report.metrics import METRICS
from grpo_recipes.report.read import RunRecord, Table
from grpo_recipes.runs.health import notices_of

_COUNTED = ("not finite",)  # by metric, from what could not be read as a number


def notices(run: RunRecord) -> list[str]:
    """What a person who knows GRPO would point at."""
    metrics = run.metrics
    seen_in_rows = notices_of(_rows(metrics), partial(recipe_value, run), over=run.status != "running")
    found = [
        f"{notice.text[0].upper()}{notice.text[1:]}: {notice.fix}."
        for notice in seen_in_rows
        if notice.name not in _COUNTED
    ]
    for name, seen in metrics.odd.items():
        meant = seen["inf"] if name in METRICS and METRICS[name].infinite else 0
        if times := seen.total() - meant:
            found.append(f"{name} was inf or nan in {times} step{'s' * (times > 1)}.")
    if metrics.unreadable:
        found.append(f"{metrics.unreadable} line{'s' * (metrics.unreadable > 1)} of metrics.jsonl could not be read.")
    return found


def _rows(metrics: Table) -> Iterator[dict[str, Any]]:
    """The rows that the columns came from, without what is no number."""
    names = list(metrics.columns)
    columns = [metrics.columns[name] for name in names]
    for step, *values in zip(metrics.steps, *columns, strict=True):
        yield {"step": step, **dict(zip(names, values, strict=True))}


def notice_list(run: RunRecord) -> Html | None:
    """The notices as a list."""
    texts = notices(run)
    if not texts:
        return None
    return element(
        "aside", element("h2", "Worth a look"), element("ul", together(element("li", text) for text in texts))
    )
