"""`grpo report`: write a run's page, one that compares several, or that of a sweep."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.paths import shown
from grpo_recipes.recipe.keys import catalogue
from grpo_recipes.report.compare import write_comparison
from grpo_recipes.report.single import write_report
from grpo_recipes.runs.rundir import find_run
from grpo_recipes.sweep.folder import is_sweep, read_sweep
from grpo_recipes.sweep.page import write_sweep
from grpo_recipes.sweep.results import text_table

HELP = "write report.html of a run, or a page that compares several or a sweep"
TAKES_RECIPE = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The runs and --out."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run or sweep directory, or last for RUN_ROOT's newest run"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page; by default report.html in the run, or here")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Write the page of a run, of several compared, or of a sweep.

    Returns:
        0.

    Raises:
        ConfigError: one is no run directory, or the page cannot be written.
    """
    folders = [_folder(which) for which in options.runs]
    try:
        if len(folders) == 1 and is_sweep(folders[0]):
            sweep = read_sweep(folders[0])
            page, results = write_sweep(sweep, options.out)
            print(text_table(sweep, results))
        elif len(folders) == 1:
            page = write_report(folders[0], options.out)
        else:
            page = write_comparison(folders, options.out or Path("report.html"))
    except OSError as error:
        raise config_error("--out", f"cannot write the page ({error.strerror})", "name a file you may write") from None
    print(f"grpo: {shown(page)}")
    return 0


def _folder(which: str) -> Path:
    if which != "last":
        return Path(which)
    root = os.environ.get("RUN_ROOT") or catalogue()["run_root"]["default"]
    return find_run(Path(os.path.expanduser(root)), which, "last").folder
