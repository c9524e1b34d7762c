"""`grpo report`: write the page of a run, a comparison of runs, or the page of a sweep."""

import argparse
import os
from pathlib import Path

from grpo_recipes.cli import command, option
from grpo_recipes.cli.follow import find_run
from grpo_recipes.console.report.comparison import write_comparison
from grpo_recipes.console.report.pages import write_report
from grpo_recipes.console.sweep.folder import RECORD, Sweep, format_table, write_sweep_page
from grpo_recipes.errors import config_error, translate_errors
from grpo_recipes.paths import display_path
from grpo_recipes.runs.trace import try_write_trace


@command(
    "Write report.html of a run, or compare several runs or a sweep",
    option("runs", nargs="+", metavar="RUN", help="Directory of a run or a sweep, or last for the newest run"),
    option("--out", type=Path, metavar="FILE", help="Output file (default: report.html in the run, or in this folder)"),
)
def report(options: argparse.Namespace) -> int:
    """Write the page of a run, a comparison of several runs, or the page of a sweep; print its path and return 0.

    For one run, also write its trace.json. For a sweep, also print its table. Raise ConfigError if a folder is not a
    run or a sweep, or if the page can't be written.
    """
    folders = [find_run(name).folder if name == "last" else Path(name) for name in options.runs]
    fix = "use a file that you may write"
    with translate_errors(
        OSError, lambda error: config_error("--out", f"can't write the page ({error.strerror})", fix)
    ):
        if len(folders) == 1 and os.path.isfile(folders[0] / RECORD):
            sweep = Sweep.read(folders[0])
            page, results = write_sweep_page(sweep, options.out)
            print(format_table(sweep, results))
        elif len(folders) == 1:
            if note := try_write_trace(folders[0]):
                print(f"grpo: {note}")
            page = write_report(folders[0], options.out)
        else:
            page = write_comparison(folders, options.out or Path("report.html"))
    print(f"grpo: {display_path(page)}")
    return 0
