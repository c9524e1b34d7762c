"""The process between the launcher and each thing it starts: nothing of a run outlives it, or the launcher.

It runs the command after ``--`` in a session of its own, adopts orphans, and when the command ends, or the launcher
dies, ends all that is left. When the launcher was killed nobody else can say so: the warden writes summary and
report, and removes the scratch folders.
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
from functools import partial
from pathlib import Path

from grpo_recipes.paths import shown
from grpo_recipes.process.scratch import Scratch, SegmentRecorder
from grpo_recipes.process.tree import (
    OWN_CHILDREN,
    become_subreaper,
    descendants,
    die_with_parent,
    end_descendants,
    reap,
)
from grpo_recipes.report.single import report_line
from grpo_recipes.runs.rundir import finish_summary, stop_file, sync_folder, write_json, write_last_json

_GRACE_SECONDS = 5.0
_SAVE_SECONDS = 25.0  # a little longer than the launcher waits after SIGTERM
_LAUNCHER_SECONDS = 1.0  # until it has asked


class _Stopped(BaseException):
    """SIGTERM came: from the launcher, or from the kernel because the launcher died."""


def main() -> int:
    """Run the command, and end everything with it."""
    options = _options()
    launcher = options.launcher
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        die_with_parent(launcher)
        become_subreaper()
        code = _run(options)
    except _Stopped:
        code = 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.role.startswith("trainer"):
        _let_ranks_save(options.run_dir, launcher)
    end_descendants(_GRACE_SECONDS)
    if os.getppid() != launcher:
        _launcher_died(options, launcher)
    return code


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--role", required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, nargs=2, required=True, metavar=("DISK", "MEMORY"))
    parser.add_argument("--launcher", type=int, required=True)
    parser.add_argument("--node", type=int, default=0, help="on another than the first, an agent is the launcher")
    parser.add_argument("--log", type=Path, required=True, help="where the command's output goes; ours stays")
    parser.add_argument("command", nargs="+")
    return parser.parse_args()


def _stop(*_: object) -> None:
    raise _Stopped


def _run(options: argparse.Namespace) -> int:
    segments = SegmentRecorder(options.scratch[1])
    with options.log.open("ab") as log:
        child = subprocess.Popen(
            options.command,
            stdout=log,
            stderr=log,
            preexec_fn=partial(_signals_of, options.role),
            start_new_session=True,
        )
    OWN_CHILDREN.add(child.pid)
    record = options.run_dir / "processes" / f"{options.role}.json"
    write_json(record, {"pid": child.pid, "warden": os.getpid()})
    while child.poll() is None:
        reap()
        segments.look()
        time.sleep(0.05)
    write_last_json(record, {"pid": child.pid, "warden": os.getpid(), "exit": child.returncode})
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _let_ranks_save(run_dir: Path, launcher: int) -> None:
    """Where SIGTERM came to every process of the job: the launcher, too, has asked the ranks to save then."""
    began = time.monotonic()
    while os.getppid() == launcher and descendants():
        asked = stop_file(run_dir).exists()
        if time.monotonic() - began > (_SAVE_SECONDS if asked else _LAUNCHER_SECONDS):
            return
        reap()
        time.sleep(0.05)


def _signals_of(role: str) -> None:
    """Signals of the command, which inherits what we ignore.

    accelerate must outlive the SIGTERM that comes to every process of a cancelled job: with it the kernel would end the
    rank that saves. Where it starts several ranks it has a handler of its own. Ranks set the default again.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN if role.startswith("trainer") else signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _launcher_died(options: argparse.Namespace, launcher: int) -> None:
    if options.node:  # the run is the launcher's to end, which lives
        Scratch(*options.scratch).remove()
        return
    cause = f"the launcher (pid {launcher}) died without ending the run; its warden ended every process"
    resume = shlex.join(["grpo", "launch", "--resume", shown(options.run_dir)])
    print(f"grpo: {cause}; continue with: {resume}", file=sys.stderr, flush=True)
    finish_summary(options.run_dir, status="failed", exit_code=128 + signal.SIGKILL, failed_rank=None, cause=cause)
    Scratch(*options.scratch).remove()
    shutil.rmtree(sync_folder(options.run_dir), ignore_errors=True)
    report_line(options.run_dir)


if __name__ == "__main__":
    raise SystemExit(main())
