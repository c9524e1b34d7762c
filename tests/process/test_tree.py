"""Processes end, by SIGKILL where SIGTERM does not end them."""

from __future__ import annotations

import subprocess
import sys

import psutil

from grpo_recipes.process.tree import end_all, is_alive

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = bytearray(300_000_000)
print("ready", flush=True)
time.sleep(300)
"""


def test_a_process_that_ignores_sigterm_is_gone_when_end_all_returns():
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        end_all([psutil.Process(process.pid)], grace=0.2)
        assert not is_alive(process.pid)
