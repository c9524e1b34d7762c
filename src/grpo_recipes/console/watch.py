"""`grpo watch`: state, reward curve, and the share of each phase of a run, drawn in text until the run ends."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from grpo_recipes.cli import command, follow, option
from grpo_recipes.cli.follow import (
    GROUP_HELP,
    find_jobs,
    find_target,
    group_jobs,
    group_lines,
    is_silent,
    target_state,
    wait_for_run,
)
from grpo_recipes.cli.jobs import BareJob, SlurmPoll
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import display_path
from grpo_recipes.process.terminal import columns, use_color
from grpo_recipes.runs.groups import RunGroup
from grpo_recipes.runs.health import find_notices, finite_number, without_gaps
from grpo_recipes.runs.progress import (
    PACE_ROWS,
    Progress,
    RowReader,
    current_activity,
    evaluation_line,
    run_position,
    seconds_since,
    unusual_shares,
    won_text,
)
from grpo_recipes.runs.rundir import Run

_HEIGHT, _LEAST = 8, 20  # rows of the curve, columns of a picture
_EVERYTHING = 1 << 62  # bytes
_PHASES = ("sample", "score", "update", "sync", "save", "evaluate")
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Picture:
    """Draw a run again and again; each row of its files is read once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows = [RowReader(folder / name, _EVERYTHING) for name in ("metrics.jsonl", "eval.jsonl")]
        self._read: list[list[dict[str, Any]]] = [[], []]
        self._notices: list[str] | None = None  # on the rows that are read, once they were looked at

    def lines(self, width: int, state: str, over: bool) -> list[str]:
        """Return the picture, ``width`` columns wide at most."""
        for rows, read in zip(self._rows, self._read, strict=True):
            if new := rows.read_new():  # a step is there again where a resume goes on before it
                read[:] = [row for row in read if row["step"] < new[0]["step"]] + new
                self._notices = None
        steps, evaluations = self._read
        width = max(_LEAST, width)
        doing, since = ("", 0.0) if over else current_activity(self._folder)
        head = [f"{display_path(self._folder)}  {state}", f"{doing} for {seconds_since(since)}" if doing else ""]
        if not steps:
            return [line[:width] for line in head if line]
        last = steps[-1]
        rewards = without_gaps(finite_number(row.get("reward")) for row in steps)
        step, reward, left = run_position(steps, over)
        named = (f"step {step}", left and f"left {left}", reward and f"reward {reward}", won_text(last))
        facts = "  ".join(filter(None, named))
        body = [*curve(rewards, steps[0]["step"], last["step"], width), "", *_bars(steps[-PACE_ROWS:], width)]
        tail = [evaluation_line(evaluations[-1])] if evaluations else []
        tail += ["  ".join(unusual_shares(last))] if unusual_shares(last) else []
        if self._notices is None or over:
            self._notices = [f"note: {one.text}" for one in find_notices(steps, Run(self._folder).value, over)]
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
    seconds = {name: sum(without_gaps(finite_number(row.get(f"seconds/{name}")) for row in rows)) for name in _PHASES}
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
    if not use_color():
        return ""
    return "yellow" if line.startswith("note:") else "cyan" if set(line) & {*_BLOCKS[1:], "#"} else ""


@command(
    "show the reward curve and the phases of a run while it goes on",
    option("which", metavar="RUN", help=GROUP_HELP),
)
def watch(options: argparse.Namespace) -> int:
    """Draw a run until it ends; if stdout is not a terminal, draw once and print a line for each step."""
    try:
        watched = wait_for_run(find_target(options.which))
        if isinstance(watched, BareJob):
            return 0
        slurm = SlurmPoll(lambda: find_jobs(watched))

        def look() -> tuple[str, bool]:
            state, over = target_state(watched, slurm.answer())
            slurm.need_answer(display_path(watched.folder), not over and is_silent(watched, slurm.answer()))
            return state, over

        if isinstance(watched, RunGroup):
            _watch(lambda width: group_lines(watched, group_jobs(slurm.answer())), look, lambda: [])
        else:
            picture, steps = Picture(watched.folder), Progress(watched.folder)
            _watch(lambda width: picture.lines(width, *look()), look, lambda: [*map(steps.line, steps.rows.read_new())])
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _watch(
    draw: Callable[[int], list[str]], look: Callable[[], tuple[str, bool]], lines: Callable[[], list[str]]
) -> None:
    """Draw every second until the run is over; without a terminal only at the beginning and the end."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    def frame() -> Group:
        texts = (Text(line, coloured(line), no_wrap=True, overflow="ellipsis") for line in draw(columns()))
        return Group(*texts)

    if not sys.stdout.isatty():
        print(*draw(columns()), sep="\n", flush=True)
        while not look()[1]:
            print("".join(f"{line}\n" for line in lines()), end="", flush=True)
            time.sleep(follow.POLL_SECONDS)
        print(*draw(columns()), sep="\n")
        return
    console = Console(width=columns(), highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        stack.callback(console.show_cursor)  # rich does not where a signal comes while it draws the first picture
        live = stack.enter_context(Live(frame(), console=console, auto_refresh=False))
        while not look()[1]:
            time.sleep(follow.POLL_SECONDS)
            live.update(frame(), refresh=True)
        live.update(frame(), refresh=True)
