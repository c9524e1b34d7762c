"""`grpo dashboard`: serve a live list of runs and their reports to a browser on this machine."""

import argparse
import contextlib
import getpass
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

from grpo_recipes.cli import command, option
from grpo_recipes.cli.follow import find_run
from grpo_recipes.console.dashboard.pages import ListPage, LivePage, RunPage, hash_folder
from grpo_recipes.console.dashboard.server import HOST, Dashboard
from grpo_recipes.errors import config_error
from grpo_recipes.paths import display_path
from grpo_recipes.recipe.keys import run_root

_HELP = "Folder of runs, run directory, name of a run in RUN_ROOT, or last (default: RUN_ROOT, or runs/)"


class Pages:
    """The pages by their path: the list and the report of each listed run, or only the report of one run."""

    def __init__(self, folder: Path, copies: Path):
        """Serve the run in ``folder``, or the list of runs below it; ``copies`` is the folder for shortened copies."""
        self._copies, self._reports = copies, dict[Path, RunPage]()
        self._list = None if (folder / "run.json").is_file() else ListPage(folder)
        self._first: LivePage = self._list or RunPage(folder, copies / hash_folder(folder))

    def find(self, path: str) -> LivePage | None:
        """Return the page at a path: the first page at "", a listed run's report at ``run/<hash>/``, or else None."""
        if path == "":
            return self._first
        for folder in self._list.list_folders() if self._list else []:
            if path == f"run/{hash_folder(folder)}/":
                return self._reports.setdefault(folder, RunPage(folder, self._copies / hash_folder(folder)))
        return None


@command(
    "Show runs in your browser, live",
    option("which", nargs="?", metavar="RUN|FOLDER", help=_HELP),
    option("--port", type=int, default=0, metavar="N", help="Port on 127.0.0.1 (default: a free port)"),
)
def dashboard(options: argparse.Namespace) -> int:
    """Serve the pages until Ctrl-C, and return 0. Raise ConfigError if the run is missing, or the port is in use."""
    folder = find_folder(options.which)
    if not 0 <= options.port < 65536:
        raise config_error("--port", f"expected a port from 0 to 65535, got {options.port}", "remove --port")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with (
        tempfile.TemporaryDirectory(prefix="grpo-dashboard-", ignore_cleanup_errors=True) as copies,
        Dashboard(Pages(folder, Path(copies)).find, options.port) as server,
        contextlib.suppress(KeyboardInterrupt),
    ):
        port = server.server_port
        print(f"grpo: {display_path(folder)} is shown on {server.url}")
        print(f"grpo: from another machine: ssh -L {port}:{HOST}:{port} {getpass.getuser()}@{socket.gethostname()}")
        print("grpo: then open the same URL there; Ctrl-C ends the dashboard", flush=True)
        server.serve_forever(poll_interval=0.2)
    return 0


def find_folder(name: str | None) -> Path:
    """Return the folder of runs or the run directory that the user named, as an absolute path; None means the run root.

    Raise ConfigError if the run root or the run does not exist.
    """
    if name is None:
        folder = run_root(os.environ)
        if not folder.is_dir():
            raise config_error(
                "dashboard", f"no runs found in {display_path(folder)}", "start one with: grpo launch RECIPE"
            )
        return folder.absolute()
    if name != "last" and os.path.isdir(name):
        return Path(name).absolute()
    return find_run(name).folder
