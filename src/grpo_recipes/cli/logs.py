"""`grpo logs`: what a run's processes wrote, and with ``-f`` what they go on writing until the run ends."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

from grpo_recipes.cli.runs import RUN_HELP, how_it_stands, is_over, job_of, named_run
from grpo_recipes.errors import config_error
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED
from grpo_recipes.paths import shown
from grpo_recipes.runs.find import RunFiles
from grpo_recipes.secrets import masked

HELP = "print the logs of a run; -f follows them until it ends"
TAKES_RECIPE = False
_KINDS = {"slurm": ("slurm.out", "slurm.err"), "server": ("server",), "trainer": ("trainer",)}
_SECONDS = 1.0  # between two looks at the files
_SLURM_SECONDS = 15.0  # between two questions to Slurm, which others ask, too
_MOST_BYTES = 1 << 20  # of one file at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, which logs, how much of them, and -f."""
    parser.add_argument("which", metavar="RUN", help=RUN_HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    parser.add_argument("-n", "--lines", type=int, default=50, help="lines of each log to begin with (50)")
    parser.add_argument("--slurm", action="store_true", help="the job's output: the launcher's own lines (default)")
    parser.add_argument("--server", action="store_true", help="the log of the vLLM server")
    parser.add_argument("--trainer", action="store_true", help="the log of the trainers (default without Slurm)")


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Print logs, and follow them with ``-f``.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        ConfigError: there is no such run, or it has no such log.
    """
    if options.lines < 0:
        raise config_error("--lines", f"is {options.lines}", "write 0 or more")
    found = named_run(options.which)
    asked = [kind for kind in _KINDS if getattr(options, kind)] or ["slurm" if found.job_id else "trainer"]
    follower = Follower(asked, options.lines)
    try:
        if options.follow:
            _follow(found.folder, follower)
        elif not follower.look(found):
            what = f"{shown(found.folder)} has no log of {' or '.join(asked)} yet"
            raise config_error(options.which, what, "grpo status says how it stands; -f waits for it")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


class Follower:
    """Prints what is new in the logs of a run; a new attempt's logs are taken up as they appear.

    Args:
        kinds: keys of ``_KINDS``.
        lines: how many lines of each log to begin with.
    """

    def __init__(self, kinds: Iterable[str], lines: int):
        self._roles = [role for kind in kinds for role in _KINDS[kind]]
        self._lines = lines
        self._offsets: dict[Path, int] = {}
        self._shown: Path | None = None

    def look(self, run: RunFiles) -> bool:
        """Print what is new; whether there is any log at all."""
        paths = [path for role, path in run.logs.items() if role in self._roles]
        for path in paths:
            text = self._new_text(path)
            if text:
                if path != self._shown:
                    print(f"==> {shown(path)} <==")
                print(masked(text), end="", flush=True)
                self._shown = path
        return bool(paths)

    def _new_text(self, path: Path) -> str:
        size = path.stat().st_size
        begun = path in self._offsets
        start = min(self._offsets.get(path, max(0, size - _MOST_BYTES)), size)
        with path.open("rb") as file:
            file.seek(start)
            content = file.read(_MOST_BYTES)
        # Whole lines alone: what is cut in two would be masked by halves. One that is too long is shown all the same.
        whole = content.rfind(b"\n") + 1
        content = content[:whole] if whole or len(content) < _MOST_BYTES else content
        self._offsets[path] = start + len(content)
        text = content.decode(errors="replace")
        if begun:
            return text
        return "".join(text.splitlines(keepends=True)[-self._lines :] if self._lines else [])


def _follow(folder: Path, follower: Follower) -> None:
    """Until the run is over; what was written last is printed, too."""
    said, asked_at, job = "", -_SLURM_SECONDS, None
    while True:
        run = RunFiles(folder)
        if time.monotonic() - asked_at >= _SLURM_SECONDS:
            asked_at, job = time.monotonic(), job_of(run)
            state = how_it_stands(run, job)
            if state != said and "waiting" in state:
                print(f"grpo: {state}", flush=True)
            said = state
            if is_over(run, job):
                follower.look(RunFiles(folder))
                print(f"grpo: {shown(folder)} is over: {state}")
                return
        follower.look(run)
        time.sleep(_SECONDS)
