"""``sweep.html``: the completed trials compared, and a list of the others."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from grpo_recipes.report.compare import comparison
from grpo_recipes.report.page import SMOKE_BADGE, render
from grpo_recipes.runs.rundir import write_whole
from grpo_recipes.sweep.folder import COMPLETED, Sweep
from grpo_recipes.sweep.results import Result, read_results, settings

PAGE = "sweep.html"
_LOCK_SECONDS = 60


def write_sweep(sweep: Sweep, path: Path | None = None) -> tuple[Path, list[Result]]:
    """Write the page of a sweep, ended or not, by default in its directory; return its path and the results it shows.

    Raises:
        ConfigError: a file of a trial is damaged.
        OSError: the page cannot be written.
    """
    path = path or sweep.folder / PAGE
    # Trials of an array job end at the same time: the page of the last must not be replaced by an older one.
    with (sweep.folder / "page.lock").open("w") as lock:
        _wait_for(lock.fileno())
        results = read_results(sweep)
        write_whole(path, sweep_page(sweep, results, path))
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
    """Return the page as text; ``path`` is where it will stand, for its links."""
    groups, title = settings(sweep, results), sweep.folder.name
    done = sum(result.status == COMPLETED for result in results)
    badges = [(f"{done} of {len(results)} completed", "completed" if done == len(results) else "running")]
    badges += [SMOKE_BADGE] if any(one.run is not None and one.run.summary.get("smoke") for one in results) else []
    links = {one.name: target for one in results if (target := _link(one, path))}
    values = {**comparison(groups), "axes": list(sweep.record["axes"]), "results": results, "links": links}
    values |= {} if groups else {"headline": "No trial has completed yet."}
    return render("sweep.html.j2", title=f"Sweep {title}", name=title, badges=badges, **values)


def _link(result: Result, path: Path) -> str:
    """Return where the report of a trial is, seen from the page, or an empty text."""
    if result.run is None or not (result.run.folder / "report.html").is_file():
        return ""
    return quote(os.path.relpath(result.run.folder / "report.html", path.absolute().parent))
