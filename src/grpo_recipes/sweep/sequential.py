"""Running cells: one as a child process, or several in turn."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.attempt import SUBMITTED
from grpo_recipes.launch.submission import frozen_environment
from grpo_recipes.paths import shown
from grpo_recipes.process.reports import say
from grpo_recipes.process.tree import die_with_parent
from grpo_recipes.runs.rundir import read_json, write_json
from grpo_recipes.sweep.folder import Sweep

LOG = "launch.log"


class Relay:
    """Passes the signals of a sweep on to the launch that runs, which saves and ends.

    A launch is a session of its own, so that a Ctrl-C reaches it once, through us. All but USR1 are passed on as
    SIGINT: ``scancel`` sends SIGTERM to the launch as well, for which a second one would mean to end without saving.

    Attributes:
        seen: the first signal that came, or None.
    """

    def __init__(self) -> None:
        self.seen: int | None = None
        self._passed_on = False
        self._child: subprocess.Popen[bytes] | None = None
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            # nohup, or a shell's background job, has a signal ignored on purpose; a batch script has USR1 for us.
            if signum == signal.SIGUSR1 or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, _: object) -> None:
        self.seen = self.seen or signum
        if self._child is not None and self._child.poll() is None:
            self._passed_on = True
            self._child.send_signal(signum if signum == signal.SIGUSR1 else signal.SIGINT)

    def run(self, argv: Sequence[str], environment: Mapping[str, str], log: Path | None) -> int:
        """Run a launch to its end.

        Args:
            argv: its command.
            environment: all of its variables.
            log: file its output is added to; None: ours.

        Returns:
            Its exit code, 128+n for a signal.
        """
        file = log.open("ab") if log else None
        try:
            self._child = subprocess.Popen(
                argv,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
            if self.seen is not None and not self._passed_on:  # it came while the child was made
                self._handle(self.seen, None)
            code = self._child.wait()
        finally:
            self._child = None
            if file:
                file.close()
        return code if code >= 0 else 128 - code


def run_cell(sweep: Sweep, index: int, relay: Relay, environment: Mapping[str, str], log: Path | None) -> int:
    """Run or continue a cell, by the code that was frozen with it; returns the exit code of its launch."""
    folder = sweep.cell(index)
    argv = [sys.executable, "-m", "grpo_recipes", "launch", "--resume", str(folder)]
    code = relay.run(argv, {**environment, **frozen_environment(folder, environment)}, log)
    _record_refusal(folder, code)
    return code


def _record_refusal(folder: Path, code: int) -> None:
    """A launch that ended before its attempt began leaves no word of it in the run directory."""
    summary = read_json(folder / "summary.json")
    if code and summary and summary["status"] == SUBMITTED:
        cause = _last_line(folder / LOG) or "refused before it began; the job's output says why"
        write_json(folder / "summary.json", {**summary, "status": "failed", "exit_code": code, "cause": cause})


def run_in_turn(sweep: Sweep, indices: Sequence[int], environment: Mapping[str, str]) -> int:
    """Run cells one after the other; one that fails is named and the others go on.

    Returns:
        0, or the code of the first cell that did not complete; 75 where a signal left cells over.
    """
    relay = Relay()
    first = 0
    for place, index in enumerate(indices, 1):
        if relay.seen is not None:
            break
        folder = sweep.cell(index)
        say(f"cell {place} of {len(indices)}: {sweep.names[index]}; output in {shown(folder / LOG)}")
        code = run_cell(sweep, index, relay, environment, folder / LOG)
        first = first or code
        say(f"cell {place} of {len(indices)}: {sweep.names[index]} {_outcome(folder, code)}")
    if relay.seen is not None:
        say(f"{signal.Signals(relay.seen).name}: the sweep ends here")
        return first or EXIT_STOPPED
    return first


def _outcome(folder: Path, code: int) -> str:
    """How a cell ended, in a few words."""
    summary = read_json(folder / "summary.json") or {}
    if code == 0:
        return f"completed: reward {summary.get('initial_reward')} -> {summary.get('final_reward')}"
    told = f"stopped after step {summary.get('steps', 0)}" if code == EXIT_STOPPED else f"failed with exit code {code}"
    cause = summary.get("cause") if summary.get("exit_code") == code else _last_line(folder / LOG)
    return f"{told}: {cause or 'its log says why'}"


def _last_line(log: Path) -> str:
    """The last that a launch said."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return next((line.removeprefix("grpo: ") for line in reversed(lines) if line.startswith("grpo: ")), "")
