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


def test_what_a_process_started_is_gone_with_what_that_started_when_end_descendants_returns():
    code = (
        "import subprocess, sys, time, psutil\n"
        "from grpo_recipes.process.tree import descendants, end_descendants\n"
        'sleeps = \'import subprocess; subprocess.run(["sleep", "300"], start_new_session=True)\'\n'
        "subprocess.Popen([sys.executable, '-c', sleeps])\n"
        "while not any(one.name() == 'sleep' for one in descendants()): time.sleep(0.01)\n"
        "end_descendants()\n"
        "print(len(descendants()), [one for one in psutil.Process().children() if one.status() != 'zombie'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 []\n", done.stderr
