"""The process guard with real processes: nothing outlives its command, or its launcher."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from waiting import wait_for

from grpo_recipes.plan.commands import Process
from grpo_recipes.process.tree import is_alive

pytestmark = pytest.mark.alone

# Starts a sleeper in a session of its own, writes its pid, and goes on as argv says.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], start_new_session=True)
open(sys.argv[1], "w").write(str(child.pid))
print("output of the command", flush=True)
time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[3]))
"""
LAUNCHER = """
import os, subprocess, sys, time
argv = [sys.executable, "-m", "grpo_recipes.launch.processes", *sys.argv[1:]]
argv = [str(os.getpid()) if text == "LAUNCHER" else text for text in argv]
subprocess.Popen(argv, start_new_session=True)
time.sleep(300)
"""


@dataclass
class Place:
    run_dir: Path
    disk: Path
    memory: Path
    log: Path
    pid_file: Path

    def options(self, launcher: str, *command: str) -> list[str]:
        planned = json.dumps(asdict(Process("trainer", list(command), {}, (), str(self.log))))
        return [str(self.run_dir), str(self.disk), str(self.memory), launcher, planned]

    def guard(self, *command: str, launcher: int | None = None) -> subprocess.Popen[bytes]:
        argv = [
            sys.executable,
            "-m",
            "grpo_recipes.launch.processes",
            *self.options(str(launcher or os.getpid()), *command),
        ]
        return subprocess.Popen(argv, stderr=subprocess.PIPE, start_new_session=True)

    def parent(self, seconds: float, code: int) -> list[str]:
        return [sys.executable, "-c", PARENT, str(self.pid_file), str(seconds), str(code)]

    def sleeper(self) -> int:
        wait_for(lambda: self.pid_file.exists() and self.pid_file.read_text().isdigit(), "the sleeper")
        return int(self.pid_file.read_text())

    def record(self) -> dict:
        return json.loads((self.run_dir / "processes/trainer.json").read_text())


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path / "run", tmp_path / "disk", tmp_path / "memory", tmp_path / "log", tmp_path / "pid")
    for folder in (made.run_dir / "processes", made.run_dir / "sync", made.disk, made.memory):
        folder.mkdir(parents=True)
    yield made
    if made.pid_file.exists() and is_alive(int(made.pid_file.read_text())):
        os.kill(int(made.pid_file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("script", "code", "told"), [("exit 0", 0, 0), ("exit 7", 7, 7), ("kill -9 $$", 137, -9)])
def test_the_commands_exit_code_is_passed_on_and_recorded(place, script, code, told):
    guard = place.guard("sh", "-c", f"echo hello; {script}")
    assert guard.wait(20) == code
    assert place.record()["exit"] == told
    assert place.record()["guard"] == guard.pid
    assert place.log.read_text() == "hello\n"
    assert place.disk.is_dir(), "the launcher lives: the scratch folder is its own to remove"
    assert not (place.run_dir / "summary.json").exists()


def test_grandchildren_in_their_own_session_end_with_the_command(place):
    guard = place.guard(*place.parent(0.2, 3))
    sleeper = place.sleeper()
    assert is_alive(sleeper)
    assert guard.wait(20) == 3
    assert not is_alive(sleeper)


def test_sigterm_ends_the_command_and_everything_below(place):
    guard = place.guard(*place.parent(300, 0))
    sleeper = place.sleeper()
    command = place.record()["pid"]
    guard.terminate()
    assert guard.wait(20) == 143
    assert not is_alive(sleeper) and not is_alive(command)


def test_a_command_that_ignores_sigterm_is_killed(place):
    guard = place.guard("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done")
    wait_for(lambda: place.log.exists() and place.log.read_text() == "ready\n", "the trap")
    command = place.record()["pid"]
    guard.terminate()
    assert guard.wait(20) == 143
    assert not is_alive(command)


def test_when_the_launcher_is_killed_all_ends_and_the_summary_says_why(place):
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, *place.options("LAUNCHER", *place.parent(300, 0))])
    sleeper = place.sleeper()
    guard = place.record()["guard"]
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not is_alive(guard), "the guard's end")
    assert not is_alive(sleeper)
    summary = json.loads((place.run_dir / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["exit_code"] == 137
    assert summary["cause"].startswith(f"the launcher (pid {launcher.pid}) died")
    assert not place.disk.exists() and not place.memory.exists() and not (place.run_dir / "sync").exists()


def test_a_launcher_that_died_before_the_guard_began_is_noticed_at_once(place):
    dead = subprocess.Popen(["true"])
    dead.wait()
    guard = place.guard(*place.parent(300, 0), launcher=dead.pid)
    _, said = guard.communicate(timeout=20)
    assert guard.returncode == 143, said.decode()
    assert not place.pid_file.exists(), "the command was started"
    assert b"Traceback" not in said
    assert f"the launcher (pid {dead.pid}) died" in json.loads((place.run_dir / "summary.json").read_text())["cause"]
    assert not place.disk.exists()


# As accelerate does, starts a rank and waits for it; the rank takes SIGTERM for a request to save.
SAVES = """
import os, pathlib, signal, subprocess, sys, time
def save(*_):
    time.sleep(6.5)  # longer than whoever is only ended has left
    pathlib.Path(sys.argv[1]).with_name("saved").touch()
    os._exit(75)
if sys.argv[2:]:
    signal.signal(signal.SIGTERM, save)
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    time.sleep(300)
sys.exit(subprocess.Popen([sys.executable, *sys.orig_argv[1:], "rank"], start_new_session=True).wait())
"""


def test_of_a_cancelled_job_the_ranks_may_save_if_the_launcher_asked_for_it(place):
    guard = place.guard(sys.executable, "-c", SAVES, str(place.pid_file))
    rank = place.sleeper()
    (place.run_dir / "stop").touch()
    for pid in (guard.pid, place.record()["pid"], rank):
        os.kill(pid, signal.SIGTERM)
    guard.wait(20)
    assert place.pid_file.with_name("saved").exists()
    assert not is_alive(rank)


@pytest.fixture
def orphaned(place):
    """``orphaned()``: kill the launcher of a guard, and wait until the guard has ended."""

    def orphan() -> None:
        launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, *place.options("LAUNCHER", *place.parent(300, 0))])
        place.sleeper()
        guard = place.record()["guard"]
        launcher.kill()
        launcher.wait()
        wait_for(lambda: not is_alive(guard), "the guard's end")

    return orphan


def test_a_summary_that_cannot_be_written_leaves_no_scratch(place, orphaned):
    (place.run_dir / "summary.json").write_text("damaged")
    orphaned()
    assert not place.disk.exists() and not place.memory.exists() and not (place.run_dir / "sync").exists()


def test_a_run_that_another_launch_has_taken_over_is_left_to_it(place, orphaned):
    (place.run_dir / "summary.json").write_text('{"status": "running"}')
    with (place.run_dir / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        orphaned()
    assert json.loads((place.run_dir / "summary.json").read_text()) == {"status": "running"}
    assert (place.run_dir / "sync").exists() and not place.disk.exists() and not place.memory.exists()
