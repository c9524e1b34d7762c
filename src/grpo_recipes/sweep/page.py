"""``sweep.html``: the completed trials compared, and a list of the others."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from grpo_recipes.report.compare import comparison_sections, sentence, warnings
from grpo_recipes.report.page import fragment, page, table
from grpo_recipes.report.single import SMOKE_BADGE
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
    troubles = warnings(groups)
    failed = [(f"{one.name} failed: ", one.cause or "no cause was recorded", "")
              for one in results if one.status == "failed"]  # fmt: skip
    troubles += [("failed", failed)] if failed else []
    headline = sentence(groups) if groups else "No trial has completed yet."
    heading = fragment("parts.html.j2", "header", badges, title, headline, troubles)
    keys = list(sweep.record["axes"])
    rows = [(*(one.values[key] for key in keys), one.status, one.cause, _link(one, path)) for one in results]
    trials = table((*keys, "status", "cause", "report"), rows, "keys")
    return page(f"Sweep {title}", heading, [*(comparison_sections(groups) if groups else []), ("Trials", trials)])


def _link(result: Result, path: Path) -> Markup | str:
    if result.run is None or not (result.run.folder / "report.html").is_file():
        return ""
    target = os.path.relpath(result.run.folder / "report.html", path.absolute().parent)
    return fragment("parts.html.j2", "link", "report", quote(target))
