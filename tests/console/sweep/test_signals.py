"""Signals that a sweep forwards to the running launch, a small program that prints the signals it gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

# A fake launch: prints a line when it is ready and the signal that it gets. It exits with 75, as a launch does.
FAKE_LAUNCH = """
import os, signal, sys
def told(signum, frame):
    os.write(1, f"{signal.Signals(signum).name}\\n".encode())  # no stream's lock: a signal may come at any time
    sys.exit(75)
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(signum, told)
os.write(1, b"ready\\n")  # in one piece, where print under PYTHONUNBUFFERED writes its line in two
signal.pause()
"""
SWEEP = """
import os, sys
from grpo_recipes.console.sweep.run import SignalForwarder
from pathlib import Path
forwarder = SignalForwarder(Path(sys.argv[2]))
code = forwarder.run([sys.executable, "-c", sys.argv[1]], dict(os.environ), None)
print("code", code, forwarder.first_signal, flush=True)
"""


@pytest.fixture
def sweep(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP, FAKE_LAUNCH, str(tmp_path / "stop")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_as_a_terminal_leaves_them,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.wait(10)


def _as_a_terminal_leaves_them() -> None:
    for signum in (signal.SIGINT, signal.SIGHUP):  # a shell ignores them in background jobs
        signal.signal(signum, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("signum", "passed"),
    [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGINT"), (signal.SIGHUP, "SIGINT"), (signal.SIGUSR1, "SIGUSR1")],
)
def test_a_signal_reaches_the_launch_once_and_its_code_comes_back(sweep, signum, passed):
    os.killpg(sweep.pid, signum)  # like a terminal: the launch runs in its own session
    assert sweep.stdout.read().splitlines() == [passed, f"code 75 {signum:d}"]


def test_a_request_by_grpo_stop_reaches_the_launch_once(sweep, tmp_path):
    (tmp_path / "stop").touch()
    assert sweep.stdout.read().splitlines() == ["SIGINT", f"code 75 {signal.SIGINT:d}"]


def test_a_launch_ends_with_its_sweep(sweep):
    sweep.kill()
    sweep.wait(10)
    deadline = time.monotonic() + 10
    assert (
        sweep.stdout.read() == "SIGTERM\n"
    )  # the launch also holds the pipe, so the pipe closes when the launch has ended
    assert time.monotonic() < deadline
