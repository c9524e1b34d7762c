"""How the rewards of single completions are spread, over the steps and first against last."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grpo_recipes.report.blocks import Rows, bar_pairs, heat_map
from grpo_recipes.report.curves import buckets
from grpo_recipes.report.markup import Html
from grpo_recipes.report.read import Scored
from grpo_recipes.report.units import axis, short

_COLUMNS = 60
_FEW = 8  # distinct values up to which each has a row of its own


def reward_spread(scored: Sequence[Scored]) -> list[Html]:
    """A heat map over the steps, and the first tenth of the steps against the last."""
    scored = [row for row in scored if row.rewards]
    if not scored:
        return []
    bins = Bins(scored)
    parts = buckets(len(scored), _COLUMNS)
    columns = [bins.shares(scored[part]) for part in parts]
    steps = [scored[part.stop - 1 if part.start else 0].step for part in parts]
    charts = []
    if len(parts) > 2:
        charts.append(
            heat_map(
                "Reward of completions", "stronger colour: more of the completions of a step", steps, bins.rows, columns
            )
        )
        tenth = max(1, len(scored) // 10)
        first, last = bins.shares(scored[:tenth]), bins.shares(scored[-tenth:])
        names = (_steps_named(scored[:tenth]), _steps_named(scored[-tenth:]))
        pairs = list(zip(first, last, strict=True))
        charts.append(bar_pairs("First against last", "share of completions by reward", bins.rows, names, pairs))
    return charts


class Bins:
    """Rows of a histogram: each value of its own where there are few, else ranges of equal width."""

    def __init__(self, scored: Sequence[Scored]):
        counts: Counter[float] = Counter()
        for row in scored:
            counts.update(row.rewards)
        self._values = sorted(counts) if len(counts) <= _FEW else []
        low, high = min(counts), max(counts)
        self._edges = axis(low, high, 16)
        self._count = max(1, len(self._edges.ticks) - 1)
        self.rows = Rows([short(value) for value in self._values or self._edges.ticks[: self._count]], not self._values)

    def shares(self, rows: Sequence[Scored]) -> list[float]:
        """The share of the rows' completions in each bin, the lowest first."""
        counts = [0] * len(self.rows.names)
        for row in rows:
            for reward in row.rewards:
                counts[self._bin(reward)] += 1
        total = sum(counts) or 1
        return [count / total for count in counts]

    def _bin(self, reward: float) -> int:
        if self._values:
            return self._values.index(reward)
        return min(self._count - 1, int(self._edges.share(reward) * self._count))


def _steps_named(rows: Sequence[Scored]) -> str:
    first, last = rows[0].step, rows[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"
