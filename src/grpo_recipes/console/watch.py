"""The picture of a run that `grpo watch` draws: state, reward curve, and the share of each phase, in text."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_recipes.paths import shown
from grpo_recipes.process.terminal import in_colour
from grpo_recipes.runs.health import known, notices_of, number
from grpo_recipes.runs.progress import PACE_ROWS, Rows, activity, evaluation_line, seconds_since, standing, unusual, won
from grpo_recipes.runs.rundir import Run

_HEIGHT, _LEAST = 8, 20  # rows of the curve, columns of a picture
_EVERYTHING = 1 << 62  # bytes
_PHASES = ("sample", "score", "update", "sync", "save", "evaluate")
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Picture:
    """Draw a run again and again; each row of its files is read once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows = [Rows(folder / name, _EVERYTHING) for name in ("metrics.jsonl", "eval.jsonl")]
        self._read: list[list[dict[str, Any]]] = [[], []]
        self._notices: list[str] | None = None  # on the rows that are read, once they were looked at

    def lines(self, width: int, state: str, over: bool) -> list[str]:
        """Return the picture, ``width`` columns wide at most."""
        for rows, read in zip(self._rows, self._read, strict=True):
            if new := rows.new():  # a step is there again where a resume goes on before it
                read[:] = [row for row in read if row["step"] < new[0]["step"]] + new
                self._notices = None
        steps, evaluations = self._read
        width = max(_LEAST, width)
        doing, since = ("", 0.0) if over else activity(self._folder)
        head = [f"{shown(self._folder)}  {state}", f"{doing} for {seconds_since(since)}" if doing else ""]
        if not steps:
            return [line[:width] for line in head if line]
        last = steps[-1]
        rewards = known(number(row.get("reward")) for row in steps)
        step, reward, left = standing(steps, over)
        named = (f"step {step}", left and f"left {left}", reward and f"reward {reward}", won(last))
        facts = "  ".join(filter(None, named))
        body = [*curve(rewards, steps[0]["step"], last["step"], width), "", *_bars(steps[-PACE_ROWS:], width)]
        tail = [evaluation_line(evaluations[-1])] if evaluations else []
        tail += ["  ".join(unusual(last))] if unusual(last) else []
        if self._notices is None or over:
            self._notices = [f"note: {one.text}" for one in notices_of(steps, Run(self._folder).value, over)]
        tail += self._notices
        plain = [*head, facts, "", *body, *tail]
        return [line[:width] for line in plain]


def curve(values: Sequence[float], first: int, last: int, width: int, height: int = _HEIGHT) -> list[str]:
    """Return a chart of values over the steps: columns of blocks, each the mean of its steps, and two axes."""
    if not values:
        return []
    columns = max(1, min(len(values), width - 9))
    ends = [round(place * len(values) / columns) for place in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    levels = [1 + round((one - low) / ((high - low) or 1) * (height * 8 - 1)) for one in means]
    blocks = _BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else " .......#"
    rows = []
    for row in reversed(range(height)):
        label = f"{high:7.3f}" if row == height - 1 else f"{low:7.3f}" if row == 0 else " " * 7
        rows.append(f"{label} |" + "".join(blocks[min(8, max(0, level - 8 * row))] for level in levels))
    start, end = str(first), str(last)
    rows.append(f"{'step':>7}  {start}{end:>{max(len(end) + 1, columns - len(start))}}")
    return rows


def _bars(rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    """Return a bar for each phase of the last steps: its share of their time."""
    seconds = {name: sum(known(number(row.get(f"seconds/{name}")) for row in rows)) for name in _PHASES}
    total, room = sum(seconds.values()) or 1.0, max(1, width - 27)
    mark = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    bars = []
    for name, spent in seconds.items():
        if spent > 0:
            bar = mark * max(1, round(spent / total * room))
            bars.append(f"{name:<8} {spent / total:4.0%} {spent / len(rows):7.2f} s  {bar}")
    return bars


def coloured(line: str) -> str:
    """Return the style of a line of the picture, as rich names it."""
    if not in_colour():
        return ""
    return "yellow" if line.startswith("note:") else "cyan" if set(line) & {*_BLOCKS[1:], "#"} else ""
