"""The pages of the dashboard: the list of runs, and the report of a run. Both are rendered again if files change.

Rows of ``metrics.jsonl`` are read once for the list. The report reads the run's files again, except a very long
``samples.jsonl``: it reads a bounded copy that the dashboard extends with new rows.
"""

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grpo_recipes.cli.follow import target_state
from grpo_recipes.console.dashboard.samples import BoundedCopy
from grpo_recipes.console.report.page import NOTHING, InlineFile, Polling, render
from grpo_recipes.console.report.pages import render_run_page
from grpo_recipes.console.report.read import read_run
from grpo_recipes.console.sweep.folder import Sweep
from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import display_path, is_locked, sort_newest_first
from grpo_recipes.process.reports import plural
from grpo_recipes.runs.health import drop_missing, finite_number
from grpo_recipes.runs.progress import RowReader, format_position
from grpo_recipes.runs.rundir import CELLS, Run
from grpo_recipes.secrets import mask_secrets

MOST_RUNS = 200  # on the list, the newest
_LIST_BYTES = 4_000_000  # read from the end of each metrics.jsonl for the list
_LIST_ROWS = 2000  # rows of each run that the list keeps
_IDLE_SHARE = 4.0  # a page is not rendered again for this multiple of the time that it took
_CURVE = (120, 28)  # width and height in pixels
_CURVE_POINTS = 60
_LIST_KEYS = ("step", "max_steps", "reward", "seconds/step")
_PATTERNS = ("*/run.json", f"{CELLS}/*/run.json", f"{Sweep.parent}/*/{CELLS}/*/run.json")  # also trials of sweeps
_WATCHED = (
    "run.json", "summary.json", "metrics.jsonl", "eval.jsonl", "samples.jsonl",
    "benchmarks.json", "prompts.jsonl", "tracked.json", "lock", "trace.json",
)  # fmt: skip
_SCRIPT = InlineFile((Path(__file__).parent / "live.js").read_text(encoding="utf-8"))


class LivePage(ABC):
    """A page that is rendered again when its files have changed, at most during a fifth of the time."""

    def __init__(self) -> None:
        """Create an empty page; the first ``read`` renders it."""
        self._lock = threading.Lock()
        self._state: object = None
        self._page, self._version = "", ""
        self._next_render = 0.0

    def read(self) -> tuple[str, str]:
        """Return the page as HTML, and its version; render it again if its files have changed.

        After a rendering, the old page is returned for four times as long as the rendering took.
        """
        with self._lock:
            if time.monotonic() >= self._next_render and (state := self.read_state()) != self._state:
                start = time.monotonic()
                version = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
                page = self.render(Polling(_SCRIPT, version))
                self._state, self._page, self._version = state, page, version
                now = time.monotonic()
                self._next_render = now + _IDLE_SHARE * (now - start)
            return self._page, self._version

    @abstractmethod
    def read_state(self) -> object:
        """Return a value that changes with the page, without reading long files."""

    @abstractmethod
    def render(self, polling: Polling) -> str:
        """Return the page as HTML, with the script in ``polling`` that keeps it current."""


class RunPage(LivePage):
    """The report of a run."""

    def __init__(self, folder: Path, copies: Path):
        super().__init__()
        self._folder, self._copy = folder, BoundedCopy(folder, copies)

    def read_state(self) -> object:
        """Return size and modification time of the files that the report shows, and whether the run is locked."""
        return _read_file_states(self._folder)

    def render(self, polling: Polling) -> str:
        """Return the report, or a page with the error if a file is damaged."""
        try:
            return render_run_page(read_run(self._copy.update()), None, self._folder, polling)
        except ConfigError as error:
            return render("page.html.j2", title=self._folder.name, badges=[], name=self._folder.name,
                          headline=str(error.problems[0]), sections=[], polling=polling)  # fmt: skip


class ListPage(LivePage):
    """The runs in some folders: name, state, step, reward and a small curve, the newest first."""

    def __init__(self, root: Path):
        """Create the list of the runs below the folder ``root``; nothing is read yet."""
        super().__init__()
        self._root = root
        self._rows: dict[Path, _RunRows] = {}

    def list_folders(self) -> list[Path]:
        """Return the run directories below the folder, at most 200, the newest first: runs, and trials of sweeps."""
        paths = [path for pattern in _PATTERNS for path in self._root.glob(pattern)]
        return [path.parent for path in sort_newest_first(paths)[:MOST_RUNS]]

    def read_state(self) -> object:
        """Return each run's folder with size and modification time of its files."""
        return [(folder, _read_file_states(folder)) for folder in self.list_folders()]

    def render(self, polling: Polling) -> str:
        """Return the list as HTML: a table with a row per run, the newest first, or "No runs yet"."""
        folders = self.list_folders()
        self._rows = {folder: self._rows.get(folder) or _RunRows(folder) for folder in folders}
        states = [_describe_state(folder) for folder in folders]
        table_rows = []  # with a link to the run, and a small curve of its rewards
        for folder, (state, has_ended) in zip(folders, states, strict=True):
            rows = self._rows[folder].read()
            texts = [mask_secrets(text) or NOTHING for text in (state, *format_position(rows, has_ended))]
            name = mask_secrets(folder.relative_to(self._root).as_posix())
            row = Markup('<tr><td><a href="run/{}/">{}</a></td>{}<td>{}</td></tr>').format(
                hash_folder(folder), name, Markup("").join(Markup("<td>{}</td>").format(text) for text in texts),
                draw_small_curve(drop_missing(finite_number(row.get("reward")) for row in rows)),
            )  # fmt: skip
            table_rows.append(row)
        head = Markup("").join(
            Markup("<th>{}</th>").format(name) for name in ("Run", "State", "Step", "Reward", "Left")
        )
        table = Markup("<div class='scroll'><table><thead><tr>{}<th></th></tr></thead><tbody>{}</tbody></table></div>")
        running = sum(not has_ended for _, has_ended in states)
        headline = f"{plural(len(folders), 'run')}, {running} unfinished" if folders else "No runs yet"
        return render(
            "page.html.j2", title=f"Runs in {display_path(self._root)}", badges=[], name=display_path(self._root),
            headline=headline, sections=[("Runs", table.format(head, Markup("").join(table_rows)))] if folders else [],
            polling=polling,
        )  # fmt: skip


class _RunRows:
    """The newest rows of a run's ``metrics.jsonl``, with the numbers of the list; each row is read once."""

    def __init__(self, folder: Path):
        self._reader = RowReader(folder / "metrics.jsonl", _LIST_BYTES)
        self._rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Read new rows of the file, and return the newest 2,000 rows so far; repeated steps replace earlier rows."""
        new = [{key: row[key] for key in _LIST_KEYS if key in row} for row in self._reader.read_new()]
        if new:  # a resumed run repeats the steps after its checkpoint
            self._rows = [row for row in self._rows if row["step"] < new[0]["step"]] + new
        self._rows = self._rows[-_LIST_ROWS:]
        return self._rows


def hash_folder(folder: Path) -> str:
    """Return the name of a run in URLs: 16 characters of a hash of its path."""
    return hashlib.sha256(str(folder).encode()).hexdigest()[:16]


def _describe_state(folder: Path) -> tuple[str, bool]:
    """Return the state of a run in words, from its files, and whether it has ended.

    If a file is damaged, return the problem and true.
    """
    try:
        return target_state(Run(folder), None)
    except ConfigError as error:
        return str(error.problems[0]), True


def _read_file_states(folder: Path) -> list[tuple[int, int] | None]:
    """Return size and modification time of each file that a run's page depends on; None for a missing file.

    A last entry tells whether the run's lock is held.
    """
    states: list[tuple[int, int] | None] = []
    for name in _WATCHED:
        try:
            state = (folder / name).stat()
            states.append((state.st_size, state.st_mtime_ns))
        except OSError:
            states.append(None)
    return [*states, (int(is_locked(folder / "lock")), 0)]


def draw_small_curve(values: Sequence[float]) -> Markup:
    """Return a line over rewards as SVG, with means of neighbors if there are many; empty below two values.

    The label for screen readers always says "reward".
    """
    if len(values) < 2:
        return Markup("")
    count, (width, height) = min(len(values), _CURVE_POINTS), _CURVE
    ends = [round(index * len(values) / count) for index in range(count + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(ends)]
    low, span = min(means), (max(means) - min(means)) or 1.0
    points = " ".join(
        f"{1 + index * (width - 2) / (count - 1):.1f},{height - 1 - (value - low) / span * (height - 2):.1f}"
        for index, value in enumerate(means)
    )
    return Markup(
        '<svg width="{0}" height="{1}" viewBox="0 0 {0} {1}" role="img" aria-label="reward from {2:.3g} to {3:.3g}">'
        '<polyline points="{4}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>'
    ).format(width, height, means[0], means[-1], points)
