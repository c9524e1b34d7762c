"""``sweep.html``: the completed cells compared, and a list of the others."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from grpo_recipes.report.compare import comparison_sections, comparison_warnings, sentence
from grpo_recipes.report.groups import Group
from grpo_recipes.report.markup import Html, element
from grpo_recipes.report.page import page, write_page
from grpo_recipes.report.tables import table
from grpo_recipes.sweep.folder import COMPLETED, Sweep
from grpo_recipes.sweep.results import Result, read_results, settings

PAGE = "sweep.html"
_LOCK_SECONDS = 60


def write_sweep(sweep: Sweep, path: Path | None = None) -> tuple[Path, list[Result]]:
    """Write the page of a sweep, ended or not.

    Args:
        sweep: the sweep.
        path: where to; by default ``sweep.html`` in its directory.

    Returns:
        The page's path, and the results it shows.

    Raises:
        ConfigError: a file of a cell is damaged.
        OSError: the page cannot be written.
    """
    path = path or sweep.folder / PAGE
    # Cells of an array job end at the same time: the page of the last must not be replaced by an older one.
    with (sweep.folder / "page.lock").open("w") as lock:
        _wait_for(lock.fileno())
        results = read_results(sweep)
        write_page(path, sweep_page(sweep, results, path))
    return path, results


def _wait_for(descriptor: int) -> None:
    """Take the lock, a minute long: an old page is better than none, and some file systems have no locks."""
    for _ in range(_LOCK_SECONDS):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(1)
        except OSError:
            return None


def sweep_page(sweep: Sweep, results: Sequence[Result], path: Path) -> str:
    """The page as text; ``path`` is where it will stand, for its links."""
    groups = settings(sweep, results)
    return page(
        f"Sweep {sweep.folder.name}",
        _heading(sweep, results, groups),
        [*(comparison_sections(groups) if groups else []), ("Cells", _cell_table(sweep, results, path))],
    )


def _heading(sweep: Sweep, results: Sequence[Result], groups: Sequence[Group]) -> Html:
    done = sum(result.status == COMPLETED for result in results)
    badge = element("span", f"{done} of {len(results)} completed", class_=f"badge {_kind(done, len(results))}")
    smoke = any(result.run is not None and result.run.summary.get("smoke") for result in results)
    return element(
        "header",
        element(
            "p",
            badge,
            element("span", "smoke test, not an experiment", class_="badge smoke") if smoke else None,
            element("span", sweep.folder.name, class_="run-name"),
            class_="eyebrow",
        ),
        element("h1", sentence(groups) if groups else "No cell has completed yet."),
        *comparison_warnings(groups),
        _trouble(results),
    )


def _kind(done: int, cells: int) -> str:
    return "completed" if done == cells else "running"


def _trouble(results: Sequence[Result]) -> Html | None:
    failed = [result for result in results if result.status == "failed"]
    if not failed:
        return None
    lines = [element("p", element("b", f"{one.name} failed: "), one.cause or "no cause was recorded") for one in failed]
    return element("div", *lines, class_="trouble failed")


def _cell_table(sweep: Sweep, results: Sequence[Result], path: Path) -> Html:
    """Every cell with its values, how it ended, and its own report."""
    keys = list(sweep.record["axes"])
    rows = [(*(one.values[key] for key in keys), one.status, one.cause, _link(one, path)) for one in results]
    return table((*keys, "status", "cause", "report"), rows, "keys")


def _link(result: Result, path: Path) -> Html | str:
    if result.run is None or not (result.run.folder / "report.html").is_file():
        return ""
    target = os.path.relpath(result.run.folder / "report.html", path.absolute().parent)
    return element("a", "report", href=quote(target))
