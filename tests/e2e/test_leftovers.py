"""A run with all processes killed leaves scratch on the node. The next launch removes it and spares live runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest
from real_runs import Launch, override
from run_segments import RunSegments

SHARED_MEMORY = Path("/dev/shm")
SHORT = ("--max_steps", "4", "--save_steps", "2", "--prompts_per_step", "4", "--num_generations", "8")


@pytest.fixture
def node() -> Iterator[Path]:
    """A temporary folder of this test's own, with a path short enough for unix sockets."""
    with tempfile.TemporaryDirectory(prefix="node-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_the_next_launch_removes_what_a_killed_run_left_on_the_node(launch: Callable[..., Launch], node: Path) -> None:
    living = launch("--use_vllm", "false", "--max_steps", "100000", folder="living", TMPDIR=str(node))
    living.wait_for_step(1)
    (stays,) = node.glob("grpo-*")
    signal_all(living, signal.SIGSTOP)  # it lives, and leaves the cores to the others
    killed = launch(*override(SHORT, max_steps=100000), folder="killed", TMPDIR=str(node))
    killed.wait_for(lambda: killed.has_run_dir() and len(killed.rows()) >= 3, "step 3", timeout=300)
    (scratch,) = (path for path in node.glob("grpo-*") if path != stays)
    inodes = mapped_segments(killed)

    kill_at_once(killed)

    folders = [scratch, SHARED_MEMORY / scratch.name]
    assert all(folder.is_dir() for folder in folders)
    segments = segments_of(inodes)
    assert any(path.name.startswith("psm_") for path in segments), "vLLM's message queues"

    second = launch("--resume", "last", *override(SHORT, max_steps=6), folder="killed", TMPDIR=str(node))

    assert second.wait() == 0, second.output
    (line,) = [line for line in second.output.splitlines() if scratch.name in line]
    assert re.match(r"grpo: removed scratch of runs that died on this node \(.*grpo-", line), line
    assert stays.name not in second.output
    assert not any(folder.exists() for folder in folders) and not segments_of(inodes)
    assert list(node.iterdir()) == [stays]

    assert living.process.poll() is None and (stays / "token").exists() and (SHARED_MEMORY / stays.name).is_dir()
    signal_all(living, signal.SIGCONT)
    living.process.send_signal(signal.SIGUSR1)
    assert living.wait(60) == 75, living.output
    assert not list(node.iterdir()) and not (SHARED_MEMORY / stays.name).exists()


def test_a_segment_counts_for_the_run_that_has_mapped_it() -> None:
    program = """
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=8)
resource_tracker.unregister(memory._name, "shared_memory")
print(memory.name, flush=True)
sys.stdin.read()
"""
    mark, pipe = f"segments-{os.getpid()}", subprocess.PIPE
    environment = {**os.environ, "GRPO_TEST": mark}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        name = process.stdout.readline().decode().strip()
        segments = RunSegments(Launch(process, Path(), Path(), mark))
        process.kill()
    other = SharedMemory(create=True, size=8)  # of another run
    try:
        assert segments.find_left() == {name}
    finally:
        (SHARED_MEMORY / name).unlink()
        other.close()
        other.unlink()
    assert segments.find_left() == set()


def kill_at_once(run: Launch) -> None:
    """Kill every process of a run as a kernel ends a container: stopped first, so that no process cleans up."""
    signal_all(run, signal.SIGSTOP)
    signal_all(run, signal.SIGKILL)
    run.wait(30)
    run.wait_for_nothing_left()


def signal_all(run: Launch, signum: signal.Signals) -> None:
    for process in run.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signum)


def mapped_segments(run: Launch) -> set[int]:
    """Return the inodes of shared memory that the processes of a run map."""
    device = SHARED_MEMORY.stat().st_dev
    inodes = set()
    for process in run.processes():
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            _, _, _, where, inode, *_ = line.split()
            if where == f"{os.major(device):02x}:{os.minor(device):02x}":
                inodes.add(int(inode))
    return inodes


def segments_of(inodes: set[int]) -> list[Path]:
    """Return the files of these inodes that still have a name."""
    return [path for path in SHARED_MEMORY.iterdir() if path.is_file() and path.stat().st_ino in inodes]
