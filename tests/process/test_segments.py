"""Segments in shared memory: recorded while their makers live, removed when these were killed; real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_for

from grpo_recipes.launch.processes import Child
from grpo_recipes.plan.types import Process
from grpo_recipes.process import scratch as scratch_module
from grpo_recipes.process.scratch import Scratch, make_scratch, remove_segments
from grpo_recipes.process.tree import descendants, is_alive

# A segment as vLLM makes, in a process below, and a semaphore as the trainers have: all that a kill leaves behind.
MAKER = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Lock()
segment = SharedMemory(create=True, size=1000)
open(sys.argv[1], "w").write(f"{segment.name} sem.{lock._semlock.name[1:]}\\n")
time.sleep(300)
"""
ABOVE = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Scratch]:
    scratch = make_scratch({"SLURM_TMPDIR": str(tmp_path)})
    yield scratch
    scratch.remove()


@pytest.fixture
def child(tmp_path: Path, made: Scratch) -> Iterator[Child]:
    """A process under a process guard; a process below it makes a segment and a semaphore."""
    (tmp_path / "run/processes").mkdir(parents=True)
    argv = [sys.executable, "-c", ABOVE, MAKER, str(tmp_path / "names")]
    child = Child(Process("server", argv, {}, (), str(tmp_path / "log")), dict(os.environ), tmp_path / "run", made)
    yield child
    child.end()


def names_in(file: Path) -> list[Path]:
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"), "the segments")
    return [Path("/dev/shm") / name for name in file.read_text().split()]


def wait_for_record(made: Scratch, count: int) -> None:
    record = made.memory / ".segments"
    wait_for(lambda: record.exists() and record.read_text().count("\n") == count, "the record")


def kill_all(child: Child) -> None:
    """Kill a process guard and everything below at once, as the kernel ends a job."""
    victims = [child.guard_pid, *(process.pid for process in descendants(child.guard_pid))]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, signum)
    wait_for(lambda: not any(is_alive(pid) for pid in victims), "the end of all")


@pytest.fixture
def foreign() -> Iterator[Path]:
    """A segment of another program of this user, which keeps it without mapping it."""
    path = Path(f"/dev/shm/psm_{os.urandom(4).hex()}")
    path.write_bytes(bytes(100))
    yield path
    path.unlink(missing_ok=True)


def test_what_a_killed_run_left_is_removed_with_its_scratch(tmp_path, made, child, foreign):
    left = names_in(tmp_path / "names")
    wait_for_record(made, 2)
    kill_all(child)
    assert len(left) == 2 and all(path.exists() for path in left), "a SIGKILL left nothing: is the record of use?"
    assert remove_segments(made.memory) == 2
    assert not any(path.exists() for path in left) and foreign.exists()
    assert remove_segments(made.memory) == 0


def test_the_end_of_a_run_removes_what_its_killed_server_left(tmp_path, made, child):
    left = names_in(tmp_path / "names")
    wait_for_record(made, 2)
    kill_all(child)
    made.remove()
    assert not any(path.exists() for path in left) and not made.memory.exists()


def test_segments_of_a_living_process_stay(tmp_path, made, child):
    left = names_in(tmp_path / "names")
    wait_for_record(made, 2)
    assert remove_segments(made.memory) == 0 and all(path.exists() for path in left)


def test_segments_that_were_removed_in_time_are_no_matter(tmp_path, made, child):
    left = names_in(tmp_path / "names")
    wait_for_record(made, 2)
    child.end()
    wait_for(lambda: not any(path.exists() for path in left), "Python's own clean-up")
    made.remove()
    assert not made.memory.exists()


def test_segments_of_other_programs_are_not_recorded(tmp_path, made, child):
    names_in(tmp_path / "names")
    wait_for_record(made, 2)
    other = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path / "others")], start_new_session=True)
    try:
        others = names_in(tmp_path / "others")
        time.sleep(3 * scratch_module._LOOK_SECONDS)
        record = (made.memory / ".segments").read_text()
        assert not any(path.name in record for path in others)
    finally:
        other.terminate()
        other.wait()
        for path in others:
            path.unlink(missing_ok=True)


def test_only_what_was_recorded_is_removed(made, foreign, tmp_path):
    inode = foreign.stat().st_ino
    record = made.memory / ".segments"
    (tmp_path / "mine").write_text("mine")
    for text in (
        f"{inode + 1} {foreign.name}\n",  # made again under the name
        f"{inode} {foreign.name}",  # torn
        f"{inode} ../shm/{foreign.name}\n",
        f"{(tmp_path / 'mine').stat().st_ino} ../..{tmp_path}/mine\n",
        "\0\n7\n",
    ):
        record.write_text(text)
        assert remove_segments(made.memory) == 0 and foreign.exists() and (tmp_path / "mine").exists(), text
    record.write_text(f"{inode} {foreign.name}\n")
    if os.geteuid() == 0:
        os.chown(foreign, 12345, -1)
        assert remove_segments(made.memory) == 0 and foreign.exists()
        os.chown(foreign, 0, -1)
    assert remove_segments(made.memory) == 1 and not foreign.exists()


def test_a_file_that_the_user_named_is_never_recorded(made, tmp_path):
    kept = Path(f"/dev/shm/embeddings-{os.urandom(4).hex()}")
    (tmp_path / "run/processes").mkdir(parents=True)
    maps = f"import mmap, time; f = open('{kept}', 'wb+'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); time.sleep(300)"
    process = Process("server", [sys.executable, "-c", maps], {}, (), str(tmp_path / "log"))
    child = Child(process, dict(os.environ), tmp_path / "run", made)
    try:
        wait_for(kept.exists, "the file")
        time.sleep(2 * scratch_module._LOOK_SECONDS)
        assert not (made.memory / ".segments").exists()
    finally:
        child.end()
        with contextlib.suppress(FileNotFoundError):
            kept.unlink()


def test_without_shared_memory_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_module, "SHARED_MEMORY", tmp_path / "none")
    recorder = scratch_module.SegmentRecorder(tmp_path / "memory")
    recorder.look()
    assert remove_segments(tmp_path / "memory") == 0 and list(tmp_path.iterdir()) == []
