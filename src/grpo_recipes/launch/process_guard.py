"""The process guard, between the launcher and each process it starts: nothing of a run outlives it, or the launcher.

It runs the command after ``--`` in a session of its own, adopts orphans, and when the command ends, or the launcher
dies, ends all that is left. When the launcher was killed, it writes the summary and the report, and removes
the scratch folders.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from grpo_recipes.paths import shown
from grpo_recipes.process import tree
from grpo_recipes.process.scratch import Scratch, SegmentRecorder
from grpo_recipes.report.pages import report_line
from grpo_recipes.runs.rundir import SYNC_FOLDER, finish_summary, stop_file, write_json, write_last_json

_TICK_SECONDS = 0.05
_SAVE_SECONDS = 25.0  # a little longer than the launcher waits after SIGTERM
_LAUNCHER_SECONDS = 1.0  # until it has asked the ranks to save


class _Stopped(BaseException):
    """SIGTERM came: from the launcher, or from the kernel because the launcher died."""


def main() -> int:
    """Run the command, and end everything with it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--name", required=True, help="of the process in the plan")
    parser.add_argument("--saves", action="store_true", help="its ranks save when SIGTERM comes to the whole job")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, nargs=2, required=True, metavar=("DISK", "MEMORY"))
    parser.add_argument("--launcher", type=int, required=True, help="pid; of the node worker on another node")
    parser.add_argument("--node", type=int, default=0)
    parser.add_argument("--log", type=Path, required=True, help="file of the command's output, not of the guard's")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        tree.die_with_parent(options.launcher)
        tree.become_subreaper()
        code = _run(options)
    except _Stopped:
        code = 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.saves:
        _let_ranks_save(options.run_dir, options.launcher)
    tree.end_descendants()
    if os.getppid() != options.launcher:
        _report_dead_launcher(options)
    return code


def _stop(*_: object) -> None:
    raise _Stopped


def _run(options: argparse.Namespace) -> int:
    """Run the command to its end and return its exit code as a shell does, 128+n for signal n."""

    def set_signals() -> None:
        # The command inherits what we ignore. accelerate must outlive the SIGTERM that comes to every process of a
        # cancelled job: with it the kernel would end the rank that saves. Where it starts several ranks it has a
        # handler of its own. Ranks set the default again.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if options.saves else signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    segments = SegmentRecorder(options.scratch[1])
    with options.log.open("ab") as log:
        child = subprocess.Popen(
            options.command, stdout=log, stderr=log, preexec_fn=set_signals, start_new_session=True
        )
    tree.OWN_CHILDREN.add(child.pid)
    path, record = options.run_dir / "processes" / f"{options.name}.json", {"pid": child.pid, "guard": os.getpid()}
    write_json(path, record)
    while child.poll() is None:
        tree.reap()
        segments.look()
        time.sleep(_TICK_SECONDS)
    write_last_json(path, {**record, "exit": child.returncode})
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _let_ranks_save(run_dir: Path, launcher: int) -> None:
    """Wait while ranks save, where SIGTERM came to every process of the job and the launcher has asked them to."""
    began = time.monotonic()
    while os.getppid() == launcher and tree.descendants():
        if time.monotonic() - began > (_SAVE_SECONDS if stop_file(run_dir).exists() else _LAUNCHER_SECONDS):
            return
        tree.reap()
        time.sleep(_TICK_SECONDS)


def _report_dead_launcher(options: argparse.Namespace) -> None:
    """Do what the dead launcher cannot: write how the run ended, and remove the scratch folders."""
    scratch, run_dir = Scratch(*options.scratch), options.run_dir
    if options.node:  # here the node worker died, and the launcher ends the run
        scratch.remove()
        return
    cause = f"the launcher (pid {options.launcher}) died without ending the run; its process guard ended every process"
    resume = shlex.join(["grpo", "launch", "--resume", shown(run_dir)])
    print(f"grpo: {cause}; continue with: {resume}", file=sys.stderr, flush=True)
    finish_summary(run_dir, status="failed", exit_code=128 + signal.SIGKILL, failed_rank=None, cause=cause)
    scratch.remove()
    shutil.rmtree(run_dir / SYNC_FOLDER, ignore_errors=True)
    report_line(run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
