"""The process guard with real processes: nothing outlives its command, or its launcher."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from waiting import wait_for

from grpo_recipes.errors import ConfigError
from grpo_recipes.launch.processes import Child
from grpo_recipes.paths import module_command
from grpo_recipes.plan.types import Process
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.process.tree import is_alive
from grpo_recipes.runs.rundir import Run, lock_run

pytestmark = pytest.mark.alone

# Starts a sleeper in a new session, writes its pid, sleeps and exits as argv requests.
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
    folders = Place(tmp_path / "run", tmp_path / "disk", tmp_path / "memory", tmp_path / "log", tmp_path / "pid")
    for folder in (folders.run_dir / "processes", folders.run_dir / "sync", folders.disk, folders.memory):
        folder.mkdir(parents=True)
    yield folders
    if folders.pid_file.exists() and is_alive(int(folders.pid_file.read_text())):
        os.kill(int(folders.pid_file.read_text()), signal.SIGKILL)


@pytest.mark.parametrize(("script", "code", "told"), [("exit 0", 0, 0), ("exit 7", 7, 7), ("kill -9 $$", 137, -9)])
def test_the_commands_exit_code_is_passed_on_and_recorded(place, script, code, told):
    guard = place.guard("sh", "-c", f"echo hello; {script}")
    assert guard.wait(20) == code
    assert place.record()["exit"] == told
    assert place.record()["guard"] == guard.pid
    assert place.log.read_text() == "hello\n"
    assert place.disk.is_dir(), "the launcher lives: the scratch folder is its own to remove"
    assert not (place.run_dir / "summary.json").exists()


@pytest.mark.slow
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


@pytest.mark.slow
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
    _, errors = guard.communicate(timeout=20)
    assert guard.returncode == 143, errors.decode()
    assert not place.pid_file.exists(), "the command was started"
    assert b"Traceback" not in errors
    assert f"the launcher (pid {dead.pid}) died" in json.loads((place.run_dir / "summary.json").read_text())["cause"]
    assert not place.disk.exists()


# Starts a rank and waits for it, like accelerate. The rank treats SIGTERM as a request to save.
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_summary_that_cannot_be_written_leaves_no_scratch(place, orphaned):
    (place.run_dir / "summary.json").write_text("damaged")
    orphaned()
    assert not place.disk.exists() and not place.memory.exists() and not (place.run_dir / "sync").exists()


@pytest.mark.slow
def test_a_run_that_another_launch_has_taken_over_is_left_to_it(place, orphaned):
    (place.run_dir / "summary.json").write_text('{"status": "running"}')
    (place.run_dir / "lock").write_text("host 1\n")
    orphaned()
    assert json.loads((place.run_dir / "summary.json").read_text()) == {"status": "running"}
    assert (place.run_dir / "sync").exists() and not place.disk.exists() and not place.memory.exists()


def test_when_the_guard_is_killed_its_command_ends(place):
    guard = place.guard(*place.parent(300, 0))
    place.sleeper()
    command = place.record()["pid"]
    guard.kill()
    guard.wait()
    wait_for(lambda: not is_alive(command), "the command's end")


def test_a_guard_holds_the_run_after_its_launcher_and_lets_it_go_at_its_end(place, monkeypatch):
    """Another launch must not start while processes of the previous launch are alive."""
    run = Run(place.run_dir)
    lock = lock_run(run)
    scratch = Scratch(place.disk, place.memory, [lock])
    (process,) = [Process("trainer", place.parent(300, 0), {}, (), str(place.log))]
    child = Child(process, dict(os.environ), place.run_dir, scratch)
    place.sleeper()
    os.close(lock)  # the launcher's end closes it
    assert run.is_running()
    with pytest.raises(ConfigError, match="another launch is running"):
        lock_run(run)
    child.end()
    assert not run.is_running()


@pytest.fixture
def shadows(tmp_path, monkeypatch):
    """Change to a folder with files named after packages that every process of a run imports."""
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("json", "yaml", "psutil", "torch", "accelerate"):
        (folder / f"{name}.py").write_text("raise SystemExit('imported from the working folder')\n")
    monkeypatch.chdir(folder)
    return folder


def test_a_guard_imports_nothing_from_the_working_folder(place, shadows):
    planned = Process("trainer", ["sh", "-c", "exit 7"], {}, (), str(place.log))
    child = Child(planned, dict(os.environ), place.run_dir, Scratch(place.disk, place.memory))
    assert child._popen.wait(20) == 7 and place.record()["exit"] == 7


def test_accelerate_imports_nothing_from_the_working_folder_and_a_script_what_is_beside_it(tmp_path, shadows):
    (tmp_path / "beside.py").write_text("found = 'beside the script'\n")
    script = tmp_path / "entry.py"
    script.write_text("import beside, json\nprint(beside.found, json.__name__)\n")
    flags = ["--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    argv = module_command("grpo_recipes.launch.accelerate", *flags, str(script))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["beside the script json"], done.stderr
