"""Scratch folders: created for one attempt, and removed by the next launch if their owner died.

Segments in shared memory are recorded while their creators live, and removed after these were killed. The tests
use real processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from dead_scratch import dead_scratch, kill, start_owner
from waiting import wait_for

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.processes import Child
from grpo_recipes.plan.types import Process
from grpo_recipes.process import scratch
from grpo_recipes.process.scratch import (
    Scratch,
    is_owner_alive,
    make_scratch,
    measure_folder,
    remove_dead_scratch,
    remove_segments,
)
from grpo_recipes.process.tree import descendants, is_alive


@pytest.fixture
def node(tmp_path: Path, monkeypatch) -> dict[str, str]:
    """Return the environment of a launch on a separate node, with its own temporary folder and shared memory."""
    for name in ("node", "shm"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "shm")
    return {"SLURM_TMPDIR": str(tmp_path / "node")}


@pytest.fixture
def owner(node: dict[str, str], tmp_path: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Scratch]]]:
    """Start a process that owns scratch on that node."""
    started = []

    def start() -> tuple[subprocess.Popen[str], Scratch]:
        process, run_scratch = start_owner(tmp_path / "node", tmp_path / "shm")
        started.append(process)
        return process, run_scratch

    yield start
    for process in started:
        kill(process)


@pytest.fixture
def dead(node, tmp_path: Path) -> Callable[[], Scratch]:
    """Create scratch on that node and kill its owner."""
    return lambda: dead_scratch(tmp_path / "node", tmp_path / "shm")


def test_a_scratch_folder_is_private_short_and_gone_after_use():
    scratch = make_scratch({})
    try:
        assert scratch.disk.is_dir() and scratch.memory.is_dir()
        for folder in (scratch.disk, scratch.memory):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(scratch.token_file.stat().st_mode) == 0o600
        assert len(scratch.token_file.read_text()) == 32
        assert len(str(scratch.disk)) < 60
    finally:
        scratch.remove()
    assert not scratch.disk.exists() and not scratch.memory.exists()
    scratch.remove()


def test_every_attempt_has_its_own_token_in_the_jobs_own_folder(tmp_path):
    first, second = make_scratch({"SLURM_TMPDIR": str(tmp_path)}), make_scratch({"SLURM_TMPDIR": str(tmp_path)})
    try:
        assert first.disk.parent == second.disk.parent == tmp_path
        assert first.token_file.read_text() != second.token_file.read_text()
    finally:
        first.remove()
        second.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", ["write_token", "_create_lock_marker"])
def test_a_full_disk_refuses_the_launch_and_leaves_no_folder(node, tmp_path, monkeypatch, step):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Scratch if step == "write_token" else scratch, step, full)
    with pytest.raises(
        ConfigError, match=r"TMPDIR: cannot create the run's folder in .*/node \(No space left on device\)"
    ):
        make_scratch(node)
    assert list((tmp_path / "node").iterdir()) == list((tmp_path / "shm").iterdir()) == []


def test_scratch_is_made_from_a_given_environment_alone(monkeypatch, tmp_path):
    monkeypatch.setitem(os.environ, "SLURM_TMPDIR", str(tmp_path / "none"))
    scratch = make_scratch({})
    assert scratch.disk.parent != tmp_path and scratch.token_file.exists()
    scratch.remove()
    assert not scratch.disk.exists() and not scratch.memory.exists()


def test_the_temporary_folder_may_be_shared_memory_itself(node, tmp_path):
    run_scratch = make_scratch({"SLURM_TMPDIR": str(tmp_path / "shm")})
    assert run_scratch.disk.parent == tmp_path / "shm" and run_scratch.memory.is_dir()
    run_scratch.remove()
    assert list((tmp_path / "shm").iterdir()) == []


def test_what_a_killed_run_left_is_removed_and_said_in_one_line(node, dead, tmp_path):
    stale = dead()
    assert remove_dead_scratch(node) == f"removed scratch of runs that died on this node ({stale.disk.name}: 3.0 MB)"
    assert list((tmp_path / "node").iterdir()) == list((tmp_path / "shm").iterdir()) == []
    assert remove_dead_scratch(node) == ""


def test_several_are_named_together_and_each_folder_is_found_alone(node, dead, tmp_path):
    names = sorted(dead().disk.name for _ in range(7))
    shutil.rmtree(tmp_path / "node" / names[0])  # a site removes a job's own folder
    message = remove_dead_scratch(node)
    assert message.startswith("removed scratch of runs that died on this node (")
    assert 2 < sum(name in message for name in names) < 7 and " ...: 18.0 MB)" in message
    assert list((tmp_path / "node").iterdir()) == list((tmp_path / "shm").iterdir()) == []


def test_its_segments_go_with_it(node, dead, tmp_path):
    stale = dead()
    for name in ("psm_0123abcd", "sem.mp-0123abcd", "psm_of_another"):
        (tmp_path / "shm" / name).write_text("x")
    with (stale.memory / ".segments").open("w") as record:
        for path in tmp_path.glob("shm/*0123abcd"):
            record.write(f"{path.stat().st_ino} {path.name}\n")
    assert stale.disk.name in remove_dead_scratch(node)
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["psm_of_another"]


def test_a_living_runs_scratch_stays(node, owner, dead):
    _, living = owner()
    stale = dead()
    assert stale.disk.name in (message := remove_dead_scratch(node)) and living.disk.name not in message
    assert living.token_file.exists() and living.memory.is_dir() and not stale.disk.exists()


def test_a_process_guard_holds_the_scratch_of_a_launcher_that_died(node, tmp_path):
    (tmp_path / "run/processes").mkdir(parents=True)
    run_scratch = make_scratch(node)
    command = Process("trainer", ["sleep", "300"], {}, (), str(tmp_path / "log"))
    child = Child(command, {"PATH": os.environ["PATH"]}, tmp_path / "run", run_scratch)
    try:
        while run_scratch.locks:
            os.close(run_scratch.locks.pop())  # the kernel closes the locks of a dead launcher
        wait_for(lambda: child.state().pid, "the guard's command")
        assert is_owner_alive(run_scratch.disk) and remove_dead_scratch(node) == "" and run_scratch.token_file.exists()
    finally:
        child.end()
    assert not is_owner_alive(run_scratch.disk) and run_scratch.disk.name in remove_dead_scratch(node)


def test_a_process_that_outlived_launcher_and_guards_keeps_its_scratch(node, dead):
    stale = dead()
    rank = subprocess.Popen(["sleep", "300"], env={"TMPDIR": str(stale.disk), "PATH": os.environ["PATH"]})
    try:
        assert remove_dead_scratch(node) == "" and stale.token_file.exists() and stale.memory.is_dir()
    finally:
        kill(rank)
    assert stale.disk.name in remove_dead_scratch(node)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder to another user")
@pytest.mark.parametrize("part", ["folder", "marker"])
def test_another_users_folder_is_never_touched(node, dead, part):
    stale = dead()
    for folder in (stale.disk, stale.memory):
        os.chown(folder if part == "folder" else folder / ".grpo-scratch", 12345, -1)
    assert remove_dead_scratch(node) == ""
    assert stale.token_file.exists() and stale.memory.is_dir()


def test_a_link_is_never_followed(node, dead, tmp_path):
    stale = dead()
    elsewhere = tmp_path / "elsewhere"
    stale.disk.rename(elsewhere)
    stale.disk.symlink_to(elsewhere)
    message = remove_dead_scratch(node)
    assert stale.disk.name in message and "could not" not in message, "its folder in shared memory goes, the link stays"
    assert stale.disk.is_symlink() and (elsewhere / "token").exists()
    stale.disk.unlink()
    inside = dead()
    (inside.disk / "link").symlink_to(elsewhere)
    assert remove_dead_scratch(node) and not inside.disk.exists() and (elsewhere / "token").exists()


MARKERS = ["", "null", "[]", "7", "\xff", '{"name": "grpo-my_notes"}', '{"name": [], "inode": {}, "boot": 0}']


@pytest.mark.parametrize("marker", [None, *MARKERS])
def test_a_folder_that_somebody_made_by_hand_stays(node, tmp_path, marker):
    for name in ("grpo-notes", "grpo-my_notes"):
        (tmp_path / "node" / name).mkdir()
        (tmp_path / "node" / name / "token").write_text("0" * 32)
        if marker is not None:
            (tmp_path / "node" / name / ".grpo-scratch").write_text(marker, encoding="latin-1")
    assert remove_dead_scratch(node) == ""
    assert len(list((tmp_path / "node").glob("*/token"))) == 2


def test_a_copy_and_what_is_no_plain_marker_stay(node, dead, tmp_path):
    stale = dead()
    copy = tmp_path / "node" / "grpo-for_later"
    shutil.copytree(stale.disk, copy)
    for name, make in (("grpo-fifo0000", os.mkfifo), ("grpo-folder00", os.mkdir)):
        (tmp_path / "node" / name).mkdir()
        make(tmp_path / "node" / name / ".grpo-scratch")
    linked = tmp_path / "node" / "grpo-linked00"
    linked.mkdir()
    (linked / ".grpo-scratch").symlink_to(copy / ".grpo-scratch")
    moved = dead()
    (moved.disk / ".grpo-scratch").rename(tmp_path / "marker")
    (moved.disk / ".grpo-scratch").symlink_to(tmp_path / "marker")
    shutil.rmtree(moved.memory)
    assert f"of runs that died on this node ({stale.disk.name}: " in remove_dead_scratch(node)
    assert (copy / "token").exists() and moved.token_file.exists() and len(list((tmp_path / "node").iterdir())) == 5


@pytest.mark.parametrize("step", ["mkdtemp", "flock", "write", "rename"])
def test_a_folder_that_is_being_made_stays(node, monkeypatch, step):
    home = {"mkdtemp": tempfile, "flock": fcntl, "write": os, "rename": Path}[step]
    real, results = getattr(home, step), []

    def and_remove(*arguments, **options):
        if results and results[-1] is None:
            return real(*arguments, **options)  # a call of the removal itself
        results.append(None)
        results[-1] = remove_dead_scratch(node)
        done = real(*arguments, **options)
        results.append(None)
        results[-1] = remove_dead_scratch(node)
        return done

    monkeypatch.setattr(home, step, and_remove)
    run_scratch = make_scratch(node)
    monkeypatch.undo()
    assert set(results) == {""} and len(results) >= 2
    assert run_scratch.token_file.exists() and is_owner_alive(run_scratch.disk) and is_owner_alive(run_scratch.memory)
    run_scratch.remove()


def test_of_two_launches_at_once_each_folder_is_removed_by_one(node, dead, tmp_path):
    names = [dead().disk.name for _ in range(5)]
    messages, barrier = [], threading.Barrier(4)

    def remove_too():
        barrier.wait()
        messages.append(remove_dead_scratch(node))

    threads = [threading.Thread(target=remove_too) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list((tmp_path / "node").iterdir()) == list((tmp_path / "shm").iterdir()) == []
    # Folder and shared memory of a run may go to two of them.
    assert all(1 <= sum(name in line for line in messages) <= 2 for name in names)
    assert not any("could not" in line for line in messages), messages


def test_a_folder_that_another_launch_has_just_removed_is_no_folder(node, dead, monkeypatch):
    stale, real = dead(), fcntl.flock

    def too_late(descriptor, operation):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", too_late)
    assert remove_dead_scratch(node) == "" and stale.token_file.exists()


def test_where_there_are_no_locks_nothing_is_marked_or_removed(node, monkeypatch, tmp_path):
    def fake_no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fake_no_locks)
    run_scratch = make_scratch(node)
    assert run_scratch.locks == [] and run_scratch.token_file.exists()
    assert {path.name for path in run_scratch.disk.iterdir()} == {"token"}
    assert remove_dead_scratch(node) == "" and run_scratch.token_file.exists() and not is_owner_alive(run_scratch.disk)


@pytest.mark.parametrize(("device", "removed"), [(0, False), (8, True)])
def test_a_marker_of_another_boot_counts_on_a_disk_of_this_machine_alone(node, dead, monkeypatch, device, removed):
    stale = dead()
    facts = json.loads((stale.disk / ".grpo-scratch").read_text())
    assert facts["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    monkeypatch.setattr(scratch, "_read_boot_id", lambda: "another node, or this one started again")
    monkeypatch.setattr(os, "major", lambda _: device)
    assert bool(remove_dead_scratch(node)) is removed
    assert stale.token_file.exists() is not removed


def test_what_cannot_be_removed_is_named_and_tried_again(node, dead, monkeypatch):
    stale, real = dead(), shutil.rmtree

    def fake_stubborn(path: Path, **options: bool) -> None:
        if path.name != "inductor":
            real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", fake_stubborn)
    assert remove_dead_scratch(node).endswith(f"; could not remove {stale.disk}")
    assert not stale.token_file.exists() and not stale.memory.exists() and stale.disk.is_dir()
    monkeypatch.setattr(shutil, "rmtree", real)
    assert stale.disk.name in remove_dead_scratch(node) and not stale.disk.exists()


@pytest.mark.parametrize("step", ["measure_folder", "remove_segments"])
def test_a_folder_that_fails_keeps_no_other_from_its_removal(node, dead, monkeypatch, step):
    first, second = sorted((dead(), dead()), key=lambda stale: stale.disk.name)
    real = getattr(scratch, step)

    def fake_failing(folder: Path) -> int | None:
        if folder == first.disk:
            raise FileNotFoundError(folder)
        return real(folder)

    monkeypatch.setattr(scratch, step, fake_failing)
    message = remove_dead_scratch(node)
    assert second.disk.name in message and message.endswith(f"; could not remove {first.disk}")
    assert first.disk.is_dir() and not second.disk.exists()
    assert not first.memory.exists() and not second.memory.exists()


def test_whether_a_folder_is_in_use_is_asked_while_its_lock_is_held(node, dead, monkeypatch):
    stale, locked = dead(), []
    monkeypatch.setattr(
        scratch, "find_used_names", lambda names: locked.append(is_owner_alive(stale.disk)) or set(names)
    )
    assert remove_dead_scratch(node) == "" and stale.token_file.exists() and stale.memory.is_dir()
    assert locked[0], "its disk folder comes first"


def test_the_removal_takes_a_bounded_time_and_never_fails_the_launch(node, dead, monkeypatch):
    stale = dead()
    monkeypatch.setattr(scratch, "_MAX_SECONDS", -1.0)
    assert remove_dead_scratch(node) == "the next launch removes the rest" and stale.token_file.exists()

    def fake_no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scratch, "_MAX_SECONDS", 20.0)
    monkeypatch.setattr(scratch, "find_used_names", fake_no_descriptors)
    assert "could not search for scratch of dead runs" in remove_dead_scratch(node) and stale.token_file.exists()


# Segments as vLLM makes, and torch for a GPU's memory that is shared, in a process below, and a semaphore as the
# trainers have: all that a kill leaves behind.
MAKER = """
import multiprocessing, os, sys, time
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Lock()
segment = SharedMemory(create=True, size=1000)
counters = SharedMemory(f"torch_{os.getpid()}_1_0", create=True, size=1000)
open(sys.argv[1], "w").write(f"{segment.name} {counters.name} sem.{lock._semlock.name[1:]}\\n")
time.sleep(300)
"""
ABOVE = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', *sys.argv[1:]]))"


@pytest.fixture
def run_scratch(tmp_path: Path) -> Iterator[Scratch]:
    scratch = make_scratch({"SLURM_TMPDIR": str(tmp_path)})
    yield scratch
    scratch.remove()


@pytest.fixture
def child(tmp_path: Path, run_scratch: Scratch) -> Iterator[Child]:
    """Start a process under a process guard; its child creates a segment and a semaphore."""
    (tmp_path / "run/processes").mkdir(parents=True)
    argv = [sys.executable, "-c", ABOVE, MAKER, str(tmp_path / "names")]
    child = Child(
        Process("server", argv, {}, (), str(tmp_path / "log")), dict(os.environ), tmp_path / "run", run_scratch
    )
    yield child
    child.end()


def names_in(file: Path) -> list[Path]:
    wait_for(lambda: file.exists() and file.read_text().endswith("\n"), "the segments")
    return [Path("/dev/shm") / name for name in file.read_text().split()]


def wait_for_record(run_scratch: Scratch, count: int) -> None:
    record = run_scratch.memory / ".segments"
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


def test_what_a_killed_run_left_is_removed_with_its_scratch(tmp_path, run_scratch, child, foreign):
    segments = names_in(tmp_path / "names")
    wait_for_record(run_scratch, 3)
    kill_all(child)
    assert len(segments) == 3 and all(path.exists() for path in segments), (
        "a SIGKILL left nothing: is the record of use?"
    )
    remove_segments(run_scratch.memory)
    assert not any(path.exists() for path in segments) and foreign.exists()


def test_the_end_of_a_run_removes_what_its_killed_server_left(tmp_path, run_scratch, child):
    segments = names_in(tmp_path / "names")
    wait_for_record(run_scratch, 3)
    kill_all(child)
    run_scratch.remove()
    assert not any(path.exists() for path in segments) and not run_scratch.memory.exists()


def test_segments_of_a_living_process_stay(tmp_path, run_scratch, child):
    segments = names_in(tmp_path / "names")
    wait_for_record(run_scratch, 3)
    remove_segments(run_scratch.memory)
    assert all(path.exists() for path in segments)


def test_segments_that_were_removed_in_time_are_no_matter(tmp_path, run_scratch, child):
    segments = names_in(tmp_path / "names")
    wait_for_record(run_scratch, 3)
    child.end()
    wait_for(lambda: not any(path.exists() for path in segments), "Python's own clean-up")
    run_scratch.remove()
    assert not run_scratch.memory.exists()


@pytest.mark.slow
def test_segments_of_other_programs_are_not_recorded(tmp_path, run_scratch, child):
    names_in(tmp_path / "names")
    wait_for_record(run_scratch, 3)
    other = subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path / "others")], start_new_session=True)
    try:
        other_segments = names_in(tmp_path / "others")
        time.sleep(3 * scratch._CHECK_SECONDS)
        record = (run_scratch.memory / ".segments").read_text()
        assert not any(path.name in record for path in other_segments)
    finally:
        other.terminate()
        other.wait()
        for path in other_segments:
            path.unlink(missing_ok=True)


def test_only_what_was_recorded_is_removed(run_scratch, foreign, tmp_path):
    inode = foreign.stat().st_ino
    record = run_scratch.memory / ".segments"
    (tmp_path / "mine").write_text("mine")
    for text in (
        f"{inode + 1} {foreign.name}\n",  # made again under the name
        f"{inode} {foreign.name}",  # torn
        f"{inode} ../shm/{foreign.name}\n",
        f"{(tmp_path / 'mine').stat().st_ino} ../..{tmp_path}/mine\n",
        "\0\n7\n",
    ):
        record.write_text(text)
        remove_segments(run_scratch.memory)
        assert foreign.exists() and (tmp_path / "mine").exists(), text
    record.write_text(f"{inode} {foreign.name}\n")
    if os.geteuid() == 0:
        os.chown(foreign, 12345, -1)
        remove_segments(run_scratch.memory)
        assert foreign.exists()
        os.chown(foreign, 0, -1)
    remove_segments(run_scratch.memory)
    assert not foreign.exists()


def test_a_file_that_the_user_named_is_never_recorded(run_scratch, tmp_path):
    path = Path(f"/dev/shm/embeddings-{os.urandom(4).hex()}")
    (tmp_path / "run/processes").mkdir(parents=True)
    maps = f"import mmap, time; f = open('{path}', 'wb+'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); time.sleep(300)"
    process = Process("server", [sys.executable, "-c", maps], {}, (), str(tmp_path / "log"))
    child = Child(process, dict(os.environ), tmp_path / "run", run_scratch)
    try:
        wait_for(path.exists, "the file")
        time.sleep(2 * scratch._CHECK_SECONDS)
        assert not (run_scratch.memory / ".segments").exists()
    finally:
        child.end()
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def test_without_shared_memory_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "SHARED_MEMORY", tmp_path / "none")
    recorder = scratch.SegmentRecorder(tmp_path / "memory")
    recorder.record_new()
    remove_segments(tmp_path / "memory")
    assert list(tmp_path.iterdir()) == []


def test_a_look_that_fails_is_made_up_for_by_the_next(run_scratch, monkeypatch):
    def fake_no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(scratch, "_CHECK_SECONDS", 0)
    recorder = scratch.SegmentRecorder(run_scratch.memory)
    maker = subprocess.Popen([sys.executable, "-c", MAKER, str(run_scratch.disk / "names")])
    try:
        names_in(run_scratch.disk / "names")
        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", fake_no_descriptors)
            recorder.record_new()
        assert not (run_scratch.memory / ".segments").exists()
        recorder.record_new()
        wait_for_record(run_scratch, 3)
    finally:
        maker.terminate()
        maker.wait()


def test_segments_and_a_record_that_cannot_be_touched_fail_nothing(run_scratch, tmp_path, monkeypatch):
    segment = Path(f"/dev/shm/psm_{os.urandom(4).hex()}")
    segment.write_text("")
    try:
        (run_scratch.memory / ".segments").write_text(f"{segment.stat().st_ino} {segment.name}\n")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *_, **__: os.listdir(tmp_path / "none"))
            remove_segments(run_scratch.memory)
        assert segment.exists()
        (run_scratch.memory / ".segments").unlink()
        (run_scratch.memory / ".segments").mkdir()
        remove_segments(run_scratch.memory)
        assert segment.exists()
        run_scratch.remove()
        assert not run_scratch.memory.exists()
    finally:
        segment.unlink(missing_ok=True)


def test_a_file_that_is_removed_while_its_folder_is_added_up_counts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").write_bytes(bytes(10))
    monkeypatch.setattr(os, "walk", lambda folder: [(str(folder), [], ["gone", "there"])])
    assert measure_folder(tmp_path) == 10
