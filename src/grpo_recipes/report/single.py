"""The page of one run."""

from __future__ import annotations

from pathlib import Path

from grpo_recipes.paths import shown
from grpo_recipes.report.facts import heading
from grpo_recipes.report.notices import notice_list
from grpo_recipes.report.page import chart_grid, page, stacked, write_page
from grpo_recipes.report.plots import curve_charts, how_to_read, other_metrics, phase_chart, reward_chart
from grpo_recipes.report.read import RunRecord, read_run
from grpo_recipes.report.rewards import reward_spread
from grpo_recipes.report.tables import (
    benchmark_table,
    file_list,
    phase_table,
    plan_section,
    recipe_tables,
    version_table,
)
from grpo_recipes.report.texts import sampled_completions


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of a run, running or ended.

    Args:
        folder: the run directory.
        path: where to; by default ``report.html`` in the run directory.

    Returns:
        The page's path.

    Raises:
        ConfigError: the folder is no run directory.
        OSError: the page cannot be written.
    """
    run = read_run(folder)
    path = path or run.folder / "report.html"
    write_page(path, run_page(run, path))
    return path


def report_line(folder: Path) -> str:
    """Write the report of a run that has just ended, and say where it is.

    Whatever goes wrong is said, not raised: the run's own end counts.
    """
    try:
        return f"report in {shown(write_report(folder))}"
    except Exception as error:
        return f"report not written ({type(error).__name__}: {error}); try again: grpo report {shown(folder)}"


def run_page(run: RunRecord, path: Path) -> str:
    """The page as text; ``path`` is where it will stand, for its links."""
    small = chart_grid(curve_charts(run))
    curves = stacked(
        notice_list(run), reward_chart(run), how_to_read(run) if small else None, small, other_metrics(run)
    )
    return page(
        f"{run.name}: {run.status}",
        heading(run),
        [
            ("Curves", curves),
            ("Rewards", chart_grid(reward_spread(run.scored), wide=True)),
            ("Benchmarks", benchmark_table(run)),
            ("Completions", sampled_completions(run)),
            ("Time", chart_grid([phase_chart(run), phase_table(run)], wide=True)),
            ("Recipe", recipe_tables(run)),
            ("Plan", plan_section(run)),
            ("Versions", version_table(run)),
            ("Files", file_list(run, path)),
        ],
    )
