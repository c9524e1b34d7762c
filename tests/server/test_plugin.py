"""The plug-in in processes like the server's: stacks of all threads on request, and the end of all with the first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# Waits in a second thread and in one of a forked child, as the engine's processes may be.
WAITING = """
import os, time
from unittest import mock
from grpo_recipes.server import plugin
with mock.patch.object(plugin, "_adapt_to_cpu"):  # which needs vLLM
    plugin.register()
def waits_here():
    os.write(1, b"%d\\n" % os.getpid())
    time.sleep(60)
if os.fork() == 0:
    waits_here()
waits_here()
"""


@pytest.mark.slow
@pytest.mark.parametrize("role", ["1", None])
def test_every_process_of_the_server_adds_its_stacks_to_a_file_of_its_own(tmp_path: Path, role: str | None) -> None:
    variables = {**os.environ, "GRPO_RUN_DIR": str(tmp_path), "GRPO_SERVER": role or ""}
    process = subprocess.Popen([sys.executable, "-c", WAITING], env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    try:
        if role is None:
            assert not (tmp_path / "stacks").exists()  # vLLM inside a rank
            return
        for pid in pids:
            os.kill(pid, signal.SIGUSR2)
        deadline = time.monotonic() + 10
        files = [tmp_path / "stacks" / f"server_{pid}.txt" for pid in pids]
        while not all("waits_here" in file.read_text() for file in files):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["1", None])
def test_the_engine_ends_with_a_server_that_is_killed(tmp_path: Path, role: str | None) -> None:
    """Otherwise the engine holds its GPU until the process is ended by hand: vLLM does not detect the death."""
    variables = {**os.environ, "GRPO_RUN_DIR": str(tmp_path), "GRPO_SERVER": role or ""}
    process = subprocess.Popen([sys.executable, "-c", WAITING], env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    (forked,) = {int(process.stdout.readline()) for _ in range(2)} - {process.pid}
    child = psutil.Process(forked)

    process.kill()
    process.wait(10)

    if role:
        child.wait(10)
        return
    assert child.is_running()  # a rank that has vLLM inside ends with accelerate
    child.kill()


FORKED = """
import os, sys
import torch
from grpo_recipes.server import plugin

class FakePlatform:
    @classmethod
    def check_and_update_config(cls, config):
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"

def print_cores_of_a_child():
    if os.fork() == 0:
        print(*sorted(os.sched_getaffinity(0)), torch.get_num_threads(), sep=",", flush=True)
        os._exit(0)
    os.wait()

torch.set_num_threads(3)
settings = [setting.split(" ") for setting in sys.argv[1:]]
for variable, _ in settings:
    os.environ[variable] = "0-1"  # the user's
plugin._fork_engine(FakePlatform)
FakePlatform.check_and_update_config(None)
print(os.environ["VLLM_WORKER_MULTIPROC_METHOD"], flush=True)
print_cores_of_a_child()
for variable, value in settings:
    os.environ[variable] = value
    print_cores_of_a_child()
    os.environ[variable] = "0-1"
"""


def test_on_cpu_the_engine_is_forked_and_a_worker_uses_the_cores_that_vllm_chose() -> None:
    cores = sorted(os.sched_getaffinity(0))
    settings = (
        f"GOMP_CPU_AFFINITY {cores[-1]}",
        f"OMP_PLACES {{{cores[-1]}}}",
        f"KMP_AFFINITY granularity=fine,explicit,proclist=[{cores[-1]}]",
    )

    output = subprocess.run(
        [sys.executable, "-c", FORKED, *settings], text=True, capture_output=True, timeout=60, check=True
    )

    engine, worker = ",".join(map(str, [*cores, 3])), f"{cores[-1]},1"
    assert output.stdout.splitlines() == ["fork", engine, worker, worker, worker]
