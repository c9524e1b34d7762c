"""`grpo report`: write the page of a run, of several runs compared, or of a sweep."""

import argparse
import os
from pathlib import Path

from grpo_recipes.cli import command, option
from grpo_recipes.cli.follow import find_run
from grpo_recipes.console.report.pages import write_comparison, write_report
from grpo_recipes.console.sweep.folder import RECORD, Sweep, text_table, write_sweep
from grpo_recipes.errors import config_error, translate
from grpo_recipes.paths import display_path


@command(
    "write report.html of a run, or a page that compares several runs or a sweep",
    option("runs", nargs="+", metavar="RUN", help="directory of a run or a sweep, or last, the newest run"),
    option("--out", type=Path, metavar="FILE", help="the page; by default report.html in the run, or here"),
)
def report(options: argparse.Namespace) -> int:
    """Write the page of a run, of several compared, or of a sweep."""
    folders = [find_run(which).folder if which == "last" else Path(which) for which in options.runs]
    fix = "name a file you may write"
    with translate(OSError, lambda error: config_error("--out", f"cannot write the page ({error.strerror})", fix)):
        if len(folders) == 1 and os.path.isfile(folders[0] / RECORD):
            swept = Sweep.read(folders[0])
            page, results = write_sweep(swept, options.out)
            print(text_table(swept, results))
        elif len(folders) == 1:
            page = write_report(folders[0], options.out)
        else:
            page = write_comparison(folders, options.out or Path("report.html"))
    print(f"grpo: {display_path(page)}")
    return 0
