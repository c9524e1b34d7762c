"""What a run came to: the numbers of the first screen, and one sentence on the reward."""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_recipes.report.curves import known, mean
from grpo_recipes.report.read import RunRecord
from grpo_recipes.report.units import short


@dataclass(frozen=True)
class Numbers:
    """What a run came to.

    Attributes:
        first: mean reward of the first 3 steps.
        last: mean reward of the last 5 steps.
        best: highest mean reward over 5 steps, and the last of them.
        steps: steps taken.
        of: steps wanted.
        seconds: of all steps together.
        tokens_per_second: over all steps.
    """

    first: float | None
    last: float | None
    best: tuple[float, float] | None
    steps: float
    of: float | None
    seconds: float
    tokens_per_second: float | None


def numbers(run: RunRecord) -> Numbers:
    """Count a run's rows, as ``summary.json`` does; a running run has no summary yet."""
    metrics = run.metrics
    rewards = known(metrics.column("reward"))
    seconds = metrics.column("seconds/step")
    pairs = zip(seconds, metrics.column("tokens_per_second"), strict=True)
    tokens = [(length, length * rate) for length, rate in pairs if length is not None and rate is not None]
    total = sum(length for length, _ in tokens)
    return Numbers(
        first=mean(rewards[:3]),
        last=mean(rewards[-5:]),
        best=_best(run),
        steps=metrics.steps[-1] if metrics.steps else 0,
        of=metrics.last("max_steps"),
        seconds=sum(known(seconds)),
        tokens_per_second=sum(count for _, count in tokens) / total if total else None,
    )


def _best(run: RunRecord) -> tuple[float, float] | None:
    rows = [(reward, step) for reward, step in zip(run.metrics.column("reward"), run.metrics.steps, strict=True)
            if reward is not None]  # fmt: skip
    size = min(5, len(rows))
    ends = range(size, len(rows) + 1) if rows else ()
    return max(((sum(reward for reward, _ in rows[end - size : end]) / size, rows[end - 1][1]) for end in ends),
               default=None)  # fmt: skip


def verdict(run: RunRecord, count: Numbers) -> str:
    """How it ended and what became of the reward, in a sentence or two.

    A change counts where it is more than two standard errors of the difference between the first and the last tenth of
    the steps (at least 3 each).
    """
    told = {"failed": "Failed. ", "stopped": "Stopped. ", "requeued": "Waiting to go on. ", "running": "Running. "}
    ended = told.get(run.status, "")
    if count.first is None or count.last is None:
        return ended + ("No step has a reward." if count.steps else "No step was finished.")
    over = f"over {count.steps:,.0f} step{'s' * (count.steps != 1)}"
    ends = f"from {short(count.first)} to {short(count.last)}"
    if not _changed(known(run.metrics.column("reward"))):
        return f"{ended}Reward changed little, {ends} {over}."
    return f"{ended}Reward {'rose' if count.last > count.first else 'fell'} {ends} {over}."


def _changed(rewards: list[float]) -> bool:
    size = max(3, len(rewards) // 10)
    if len(rewards) < 2 * size:
        return False
    before, after = rewards[:size], rewards[-size:]
    return abs(sum(after) - sum(before)) / size > 2 * math.sqrt((_variance(before) + _variance(after)) / size)


def _variance(values: list[float]) -> float:
    centre = sum(values) / len(values)
    return sum((value - centre) ** 2 for value in values) / (len(values) - 1)
