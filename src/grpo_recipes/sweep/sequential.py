"""The sequential runner: one trial as a child process, or several one after the other."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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


class SignalForwarder:
    """Pass the signals of a sweep on to the launch that runs, which saves and ends.

    A launch is a session of its own, so that a Ctrl-C reaches it once, through us. All but USR1 are passed on as
    SIGINT: ``scancel`` sends SIGTERM to the launch as well, for which a second one would mean to end without saving.
    """

    def __init__(self) -> None:
        self.seen: int | None = None  # the first signal that came
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
        """Run a launch to its end; return its exit code, 128+n for a signal.

        Its output is added to the file ``log``, or goes where ours goes.
        """
        with ExitStack() as stack:
            file = stack.enter_context(log.open("ab")) if log else None
            stack.callback(setattr, self, "_child", None)
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
        return code if code >= 0 else 128 - code


def run_trial(
    sweep: Sweep, index: int, forwarder: SignalForwarder, environment: Mapping[str, str], log: Path | None
) -> int:
    """Run or continue a trial by the code that was frozen with it; return the exit code of its launch."""
    folder = sweep.trial_dir(index)
    argv = [sys.executable, "-m", "grpo_recipes", "launch", "--resume", str(folder)]
    code = forwarder.run(argv, {**environment, **frozen_environment(folder, environment)}, log)
    summary = read_json(folder / "summary.json")
    if code and summary and summary["status"] == SUBMITTED:  # it ended before its attempt began, and recorded nothing
        cause = _last_line(folder / LOG) or "refused before it began; the job's output says why"
        write_json(folder / "summary.json", {**summary, "status": "failed", "exit_code": code, "cause": cause})
    return code


def run_sequentially(sweep: Sweep, indices: Sequence[int], environment: Mapping[str, str]) -> int:
    """Run trials one after the other; one that fails is named and the others go on.

    Returns:
        0, or the code of the first trial that did not complete; 75 where a signal left trials over.
    """
    forwarder = SignalForwarder()
    first = 0
    for place, index in enumerate(indices, 1):
        if forwarder.seen is not None:
            break
        folder = sweep.trial_dir(index)
        trial = f"trial {place} of {len(indices)}: {sweep.names[index]}"
        say(f"{trial}; output in {shown(folder / LOG)}")
        code = run_trial(sweep, index, forwarder, environment, folder / LOG)
        first = first or code
        say(f"{trial} {_outcome(folder, code)}")
    if forwarder.seen is not None:
        say(f"{signal.Signals(forwarder.seen).name}: the sweep ends here")
        return first or EXIT_STOPPED
    return first


def _outcome(folder: Path, code: int) -> str:
    """Return how a trial ended, in a few words."""
    summary = read_json(folder / "summary.json")
    if code == 0:
        return f"completed: reward {summary.get('initial_reward')} -> {summary.get('final_reward')}"
    end = f"stopped after step {summary.get('steps', 0)}" if code == EXIT_STOPPED else f"failed with exit code {code}"
    cause = summary.get("cause") if summary.get("exit_code") == code else _last_line(folder / LOG)
    return f"{end}: {cause or 'its log says why'}"


def _last_line(log: Path) -> str:
    """Return the last line that a launch itself wrote, without its prefix."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return next((line.removeprefix("grpo: ") for line in reversed(lines) if line.startswith("grpo: ")), "")
