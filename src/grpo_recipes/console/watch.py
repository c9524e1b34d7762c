"""The command `grpo watch`: show state, reward curve and time per phase of a run as text, until the run ends.

It only reads the files of the run directory and asks Slurm for the job. On a terminal, rich redraws the picture every
second. Otherwise, a line per step is printed.
"""

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
    is_silent,
    target_state,
    wait_for_run,
)
from grpo_recipes.cli.jobs import BareJob, SlurmPoll
from grpo_recipes.cli.status import group_lines
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import display_path
from grpo_recipes.process.terminal import columns, use_color
from grpo_recipes.runs.groups import RunGroup
from grpo_recipes.runs.health import drop_missing, find_notices, finite_number
from grpo_recipes.runs.progress import (
    PACE_ROWS,
    Progress,
    RowReader,
    find_current_activity,
    format_evaluation,
    format_position,
    format_seconds_since,
    format_unusual_shares,
    format_won_share,
)
from grpo_recipes.runs.rundir import Run

_HEIGHT, _MIN_WIDTH = 8, 20  # rows of the curve, minimum columns of the picture
_NO_LIMIT = 1 << 62  # bytes
_PHASES = ("sample", "score", "update", "sync", "save", "evaluate")
_BLOCKS = " ▁▂▃▄▅▆▇█"


class Picture:
    """A text picture of a run, drawn repeatedly; each row of the run's files is read only once."""

    def __init__(self, folder: Path):
        """Create the picture of the run in ``folder``; nothing is read yet."""
        self._folder = folder
        self._readers = [RowReader(folder / name, _NO_LIMIT) for name in ("metrics.jsonl", "eval.jsonl")]
        self._rows: list[list[dict[str, Any]]] = [[], []]
        self._notices: list[str] | None = None  # notices about the rows so far; None if they are outdated

    def draw_lines(self, width: int, state: str, over: bool) -> list[str]:
        """Read new rows of the run's files and return the lines of the picture, at most ``width`` characters each.

        A ``width`` below 20 counts as 20. ``state`` is the state of the run in words. If the run is ``over``, its
        activity and remaining time are omitted. Without steps, there are only one or two lines.
        """
        for reader, rows in zip(self._readers, self._rows, strict=True):
            if new := reader.read_new():  # a resumed run repeats the steps after its checkpoint
                rows[:] = [row for row in rows if row["step"] < new[0]["step"]] + new
                self._notices = None
        steps, evaluations = self._rows
        width = max(_MIN_WIDTH, width)
        doing, since = ("", 0.0) if over else find_current_activity(self._folder)
        head = [f"{display_path(self._folder)}  {state}", f"{doing} for {format_seconds_since(since)}" if doing else ""]
        if not steps:
            return [line[:width] for line in head if line]
        last = steps[-1]
        rewards = drop_missing(finite_number(row.get("reward")) for row in steps)
        step, reward, time_left = format_position(steps, over)
        labeled = (
            f"step {step}",
            time_left and f"left {time_left}",
            reward and f"reward {reward}",
            format_won_share(last),
        )
        facts = "  ".join(filter(None, labeled))
        body = [
            *draw_curve(rewards, steps[0]["step"], last["step"], width),
            "",
            *_draw_phase_bars(steps[-PACE_ROWS:], width),
        ]
        tail = [format_evaluation(evaluations[-1])] if evaluations else []
        tail += ["  ".join(format_unusual_shares(last))] if format_unusual_shares(last) else []
        if self._notices is None or over:
            self._notices = [f"note: {notice.text}" for notice in find_notices(steps, Run(self._folder).value, over)]
        tail += self._notices
        return [line[:width] for line in (*head, facts, "", *body, *tail)]


def draw_curve(values: Sequence[float], first: int, last: int, width: int, height: int = _HEIGHT) -> list[str]:
    """Return the lines of a text chart of values over the steps ``first`` to ``last``, or [] without values.

    The chart is ``height`` lines high, plus a line with the steps. ``width`` is the space for a whole line in
    characters. Each column is the mean of one or several steps, drawn with block characters, or with # and dots if
    stdout is not UTF-8.
    """
    if not values:
        return []
    columns = max(1, min(len(values), width - 9))
    ends = [round(index * len(values) / columns) for index in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    levels = [1 + round((mean - low) / ((high - low) or 1) * (height * 8 - 1)) for mean in means]
    blocks = _BLOCKS if (sys.stdout.encoding or "").lower().startswith("utf") else " .......#"
    rows = []
    for row in reversed(range(height)):
        label = f"{high:7.3f}" if row == height - 1 else f"{low:7.3f}" if row == 0 else " " * 7
        rows.append(f"{label} |" + "".join(blocks[min(8, max(0, level - 8 * row))] for level in levels))
    start, end = str(first), str(last)
    rows.append(f"{'step':>7}  {start}{end:>{max(len(end) + 1, columns - len(start))}}")
    return rows


def _draw_phase_bars(rows: Sequence[dict[str, Any]], width: int) -> list[str]:
    """Return a line for each phase that took time in ``rows``: name, % of the time, seconds per step, and a bar.

    ``width`` is the space for a whole line in characters. A line has at least 26, also if ``width`` is less.
    """
    seconds = {name: sum(drop_missing(finite_number(row.get(f"seconds/{name}")) for row in rows)) for name in _PHASES}
    total, room = sum(seconds.values()) or 1.0, max(1, width - 27)
    mark = "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    bars = []
    for name, phase_seconds in seconds.items():
        if phase_seconds > 0:
            bar = mark * max(1, round(phase_seconds / total * room))
            bars.append(f"{name:<8} {phase_seconds / total:4.0%} {phase_seconds / len(rows):7.2f} s  {bar}")
    return bars


def choose_line_style(line: str) -> str:
    """Return the color of a line: "yellow" for notes, "cyan" for curves and bars, otherwise or without colors ""."""
    if not use_color():
        return ""
    return "yellow" if line.startswith("note:") else "cyan" if set(line) & {*_BLOCKS[1:], "#"} else ""


@command(
    "Show the reward curve and the phases of a running run",
    option("which", metavar="RUN", help=GROUP_HELP),
)
def watch(options: argparse.Namespace) -> int:
    """Draw a run or a sweep until it ends; return 0, or 130 after Ctrl-C.

    Wait first for a run that has not started yet. Without a terminal, draw the picture at the start and the end, and
    print a line per step in between. Raise ConfigError if there is no such run.
    """
    try:
        run = wait_for_run(find_target(options.which))
        if isinstance(run, BareJob):
            return 0
        slurm = SlurmPoll(lambda: find_jobs(run))

        def read_state() -> tuple[str, bool]:
            """Return the state in words, from the files and from Slurm, and whether the run is over."""
            state, over = target_state(run, slurm.answer())
            slurm.need_answer(display_path(run.folder), not over and is_silent(run, slurm.answer()))
            return state, over

        if isinstance(run, RunGroup):
            _redraw_until_over(lambda width: group_lines(run, slurm.answer()), read_state, lambda: [])
        else:
            picture, steps = Picture(run.folder), Progress(run.folder)
            _redraw_until_over(
                lambda width: picture.draw_lines(width, *read_state()),
                read_state,
                lambda: [*map(steps.line, steps.rows.read_new())],
            )
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _redraw_until_over(
    draw: Callable[[int], list[str]], read_state: Callable[[], tuple[str, bool]], lines: Callable[[], list[str]]
) -> None:
    """Redraw the picture on the terminal every second until the run is over; without a terminal, only print lines.

    ``draw`` returns the lines of a picture for a width, and ``read_state`` the state and whether the run is over.
    Without a terminal, print the picture at the start and the end, and every second the new lines that ``lines``
    returns. SIGTERM ends the process with code 143.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    def make_frame() -> Group:
        """Return the picture for rich, with styles."""
        texts = (Text(line, choose_line_style(line), no_wrap=True, overflow="ellipsis") for line in draw(columns()))
        return Group(*texts)

    if not sys.stdout.isatty():
        print(*draw(columns()), sep="\n", flush=True)
        while not read_state()[1]:
            print("".join(f"{line}\n" for line in lines()), end="", flush=True)
            time.sleep(follow.POLL_SECONDS)
        print(*draw(columns()), sep="\n")
        return
    console = Console(width=columns(), highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        stack.callback(console.show_cursor)  # rich does not show it after a signal during the first picture
        live = stack.enter_context(Live(make_frame(), console=console, auto_refresh=False))
        while not read_state()[1]:
            time.sleep(follow.POLL_SECONDS)
            live.update(make_frame(), refresh=True)
        live.update(make_frame(), refresh=True)
