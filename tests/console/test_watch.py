"""`grpo watch`, `status` and `logs` of a live run and a live sweep."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes import cli
from grpo_recipes.cli import jobs
from grpo_recipes.console.watch import Picture, draw_curve
from grpo_recipes.plan.devices import Resources
from grpo_recipes.runs.rundir import Run, lock_run, move_rows_after, new_run, stop_file, write_json
from grpo_recipes.slurm import client


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a working folder with its own RUN_ROOT and without Slurm."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RUN_ROOT", str(tmp_path / "runs"))
    monkeypatch.setattr(client, "query", lambda *argv, **how: None)
    return tmp_path


def make_run(path: Path, status: str = "running", steps: int = 0) -> Run:
    run = new_run(path, "one", "stamp", Resources("cpu", (), 2).facts())
    assert run is not None
    add_rows(run, 1, steps)
    write_json(path / "summary.json", {"status": status})
    write_json(path / "processes/phase_0.json", {"phase": "sample", "since": time.time() - 12, "step": steps})
    return run


def add_rows(run: Run, first: int, last: int) -> None:
    seconds = {f"seconds/{name}": value for name, value in (("sample", 1.5), ("update", 0.5), ("step", 2.0))}
    rows = [{"step": step, "max_steps": 60, "reward": step / 60, **seconds} for step in range(first, last + 1)]
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def run_command(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert cli.main(list(argv)) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def run_command_while(live: Callable[[], None], capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return the output of a command that follows a run. The thread ``live`` changes and ends the run."""
    thread = threading.Thread(target=live)
    thread.start()
    output = run_command(capsys, *argv)
    thread.join()
    return output


def test_a_curve_is_as_high_as_its_values_and_as_wide_as_it_may_be():
    rows = draw_curve([0.0, 0.0, 1.0, 1.0], 1, 4, 80, height=3)
    assert [row[:10] for row in rows] == ["  1.000 | ", "        | ", "  0.000 |\u2581", "   step  1"]
    assert rows[0].endswith("|  \u2588\u2588") and rows[3].endswith(" 1  4")
    assert max(map(len, draw_curve([float(step) for step in range(1000)], 1, 1000, 40))) <= 40
    assert draw_curve([], 0, 0, 80) == []
    assert draw_curve([0.5], 7, 7, 80, height=1)[0].endswith("\u2581")


@pytest.mark.parametrize("width", [80, 40])
def test_the_picture_has_state_curve_phases_and_what_is_not_trivial(folder, width):
    run = make_run(folder / "runs/one-stamp", steps=30)
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, "max_steps": 60, "reward": 0.5, "completions/clipped_ratio": 0.6}) + "\n")
    evaluated = {"step": 20, "eval_reward": 0.25, "prompts": 8, "seconds": 3}
    (run.folder / "eval.jsonl").write_text(json.dumps(evaluated) + "\n")
    lines = Picture(run.folder).draw_lines(width, "running", False)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("runs/one-stamp  running") and re.match(r"sampling for 1[23] s$", lines[1])
    assert lines[2].startswith("step 31/60  left 0:00:58  reward 0.480"[:width])
    assert re.search(r"sample +75% +1\.4[23] s  \u2588+\n", text) and re.search(r"update +25%", text)
    assert "eval at step 20  reward 0.250" in text and "cut off 60%" in text
    over = Picture(run.folder).draw_lines(width, "completed", True)
    assert "left" not in over[1] and "sampling" not in over[1]


def test_the_episodes_of_an_environment_are_in_status_and_picture(folder, capsys):
    run = make_run(folder / "runs/one-stamp", steps=3)
    row = {
        "step": 4,
        "max_steps": 60,
        "reward": 0.5,
        "episodes/turns": 3.25,
        "episodes/won": 0.4,
        "episodes/legal": 1.0,
    }
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert "episodes turns 3.25  won 0.4  legal 1\n" in run_command(capsys, "status", "last")
    assert "  won 40%" in Picture(run.folder).draw_lines(80, "running", False)[2]


def watched(folder: Path, columns: int, run: Run, lock: int, end: int = 0) -> str:
    """Return the bytes that `grpo watch` writes to a terminal until the run or the signal ``end`` ends it."""
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    argv = [sys.executable, "-m", "grpo_recipes", "watch", str(run.folder)]
    environment = {**os.environ, "TERM": "xterm", "PATH": "/nowhere"}
    child = subprocess.Popen(argv, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, cwd=folder)
    content, begun, code = b"", time.monotonic(), 0
    while child.poll() is None or select.select([reader], [], [], 0.1)[0]:
        if select.select([reader], [], [], 0.1)[0]:
            content += os.read(reader, 1 << 16)
        if end and b"step 30/60" in content and code == 0:
            child.send_signal(end)
            code = 128 + end
        elif not end and b"step 30/60" in content and lock >= 0:
            add_rows(run, 31, 60)
            write_json(run.folder / "summary.json", {"status": "completed"})
            os.close(lock)
            lock = -1
        assert time.monotonic() - begun < 30
    assert child.returncode == code
    return content.decode()


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_shows_a_picture_that_is_drawn_anew_and_ends_with_the_run(folder, columns):
    run = make_run(folder / "runs/one-stamp", steps=30)
    output = watched(folder, columns, run, lock_run(run))
    assert "step 30/60" in output and "step 60/60" in output and "completed" in output.rpartition("step 60/60")[0]
    assert "\x1b[1A" in output, "drawn over the last picture"
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    assert max(len(line) for part in plain.split("\n") for line in part.split("\r")) <= columns


def test_a_signal_leaves_the_terminal_its_cursor(folder):
    run = make_run(folder / "runs/one-stamp", steps=30)
    lock = lock_run(run)
    output = watched(folder, 80, run, lock, signal.SIGTERM)
    os.close(lock)
    assert output.rfind("\x1b[?25l") < output.rfind("\x1b[?25h"), "hidden while it draws, and shown again"


def test_without_a_terminal_steps_stand_between_the_pictures(folder, capsys, monkeypatch):
    from grpo_recipes.cli import follow

    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    run = make_run(folder / "runs/one-stamp", steps=2)
    lock = lock_run(run)

    def end() -> None:
        time.sleep(0.5)
        add_rows(run, 3, 3)
        time.sleep(0.5)
        write_json(run.folder / "summary.json", {"status": "completed"})
        os.close(lock)

    output = run_command_while(end, capsys, "watch", "last")
    first, _, last = output.partition("\nstep 3/60  reward 0.050  2.00 s  left ")
    assert "step 2/60" in first and "step 3/60" in last and "runs/one-stamp  completed" in last
    assert "\x1b" not in output


@pytest.fixture
def sweep(folder: Path) -> Path:
    """Create a sweep of three trials: completed, running (this process holds the lock), and waiting."""
    path = folder / "runs/sweeps/mine-stamp"
    names = [f"seed={number}" for number in range(3)]
    path.mkdir(parents=True)
    write_json(path / "sweep.json", {
        "name": "mine", "timestamp": "stamp", "jobs": [], "axes": {"seed": ["0", "1", "2"]}, "fingerprint": "x",
        "command": "grpo sweep",
        "cells": [{"name": name, "values": {"seed": name[-1]}} for name in names],
    })  # fmt: skip
    for name, status, steps in zip(names, ("completed", "running", "submitted"), (60, 30, 0), strict=True):
        run = make_run(path / "cells" / name, status, steps)
        if status != "submitted":
            (run.folder / "launch.log").write_text(f"of {name}\n")
    return path


def test_status_logs_and_stop_know_a_sweep_while_it_runs(folder, sweep, capsys):
    sweep_lock = lock_run(Run(sweep))
    lock = lock_run(Run(sweep / "cells/seed=1"))
    table = run_command(capsys, "status")
    assert re.search(r"sweeps/mine-stamp +running, 1 of 3 trials completed", table)
    for which in ("mine-stamp", "runs/sweeps/mine-stamp"):
        lines = run_command(capsys, "status", which).splitlines()
        assert lines[:2] == ["sweep    runs/sweeps/mine-stamp", "state    running, 1 of 3 trials completed"]
    assert lines[3].split() == ["trial", "state", "job", "step", "reward", "left"]
    assert lines[4].startswith("seed=0  completed") and lines[5].split()[:3] == ["seed=1", "running", "30/60"]
    assert lines[6] == "seed=2  waiting for other trials"
    assert run_command(capsys, "logs", "mine-stamp").endswith("cells/seed=1/launch.log <==\nof seed=1\n")
    assert "the running trial saves and ends" in run_command(capsys, "stop", "mine-stamp")
    assert stop_file(sweep).exists()
    os.close(lock)
    os.close(sweep_lock)
    assert "state    stopped, 1 of 3 trials completed" in run_command(capsys, "status", "mine-stamp")
    output = run_command(capsys, "stop", "mine-stamp", code=2)
    assert "resume it with: grpo sweep --resume runs/sweeps/mine-stamp" in output


def test_following_a_sweep_goes_from_trial_to_trial(folder, sweep, capsys, monkeypatch):
    from grpo_recipes.cli import follow

    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    sweep_lock, lock = lock_run(Run(sweep)), lock_run(Run(sweep / "cells/seed=1"))

    def live() -> None:
        time.sleep(0.4)
        with (sweep / "cells/seed=1/launch.log").open("a") as file:
            file.write("last of seed=1\n")
        os.close(lock)
        second = lock_run(Run(sweep / "cells/seed=2"))
        (sweep / "cells/seed=2/launch.log").write_text("of seed=2\n")
        time.sleep(0.4)
        os.close(second)
        os.close(sweep_lock)

    lines = run_command_while(live, capsys, "logs", "-f", "mine-stamp").splitlines()
    assert [line for line in lines if not line.startswith("==>")] == [
        "of seed=1", "last of seed=1", "of seed=2",
        "grpo: runs/sweeps/mine-stamp has ended: stopped, 1 of 3 trials completed",
    ]  # fmt: skip


def test_the_table_of_runs_shows_the_jobs_of_a_sweep(folder, sweep, capsys):
    """R16: a sweep made with --slurm has integer job ids, which the table shows."""
    record = json.loads((sweep / "sweep.json").read_text())
    write_json(sweep / "sweep.json", record | {"jobs": [77, 78]})
    assert re.search(r"sweeps/mine-stamp +stopped, 1 of 3 trials completed +77 78", run_command(capsys, "status"))


@pytest.mark.parametrize("command", [("logs", "-f"), ("watch",), ("status",)])
def test_following_an_array_sweep_ends_though_slurm_does_not_answer(folder, sweep, capsys, monkeypatch, command):
    """R16: the trials of a finished sweep are finished, even if Slurm does not answer."""

    def ask(*argv, **how):
        raise client.SlurmError("connection refused")

    monkeypatch.setattr(client, "query", ask)
    record = json.loads((sweep / "sweep.json").read_text())
    write_json(sweep / "sweep.json", record | {"jobs": [77]})
    for index, trial in enumerate(("seed=0", "seed=1", "seed=2")):
        write_json(sweep / "cells" / trial / "summary.json", {"status": "completed"})
        write_json(sweep / "cells" / trial / "job.json", {"job": f"slurm-77_{index}", "working_folder": str(folder)})
    assert "completed, 3 of 3 trials completed" in run_command(capsys, *command, "mine-stamp")
    # The wait for a trial with an unknown ending has a limit.
    monkeypatch.setattr(jobs, "SILENCE_SECONDS", 0.5)
    monkeypatch.setattr(jobs, "SLURM_SECONDS", 0)
    write_json(sweep / "cells/seed=2/summary.json", {"status": "running"})
    assert command == ("status",) or "Slurm has not answered" in run_command(capsys, *command, "mine-stamp", code=2)


def test_the_picture_follows_rows_that_a_resume_moved_aside(folder):
    run = make_run(folder / "runs/one-stamp", steps=40)
    picture = Picture(run.folder)
    assert "step 40/60" in "\n".join(picture.draw_lines(80, "running", False))
    move_rows_after(run.folder, 20)
    picture.draw_lines(80, "running", False)
    add_rows(run, 21, 25)
    lines = picture.draw_lines(80, "running", False)
    assert "step 25/60" in "\n".join(lines)
    assert any(re.fullmatch(r" +step  1 +25", line) for line in lines), "25 rows are drawn, each once"


def test_slurm_is_asked_four_times_a_minute_whatever_is_drawn(folder, capsys, monkeypatch):
    from grpo_recipes.cli import follow

    requests = []
    monkeypatch.setattr(client, "query", lambda *argv, **how: requests.append(argv) or None)
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.02)
    run = make_run(folder / "runs/one-stamp", steps=2)
    write_json(run.folder / "job.json", {"job": "slurm-77", "working_folder": str(folder)})
    lock = lock_run(run)

    def end() -> None:
        time.sleep(1)
        write_json(run.folder / "summary.json", {"status": "completed"})
        os.close(lock)

    output = run_command_while(end, capsys, "watch", "last")
    assert "completed" in output
    assert len(requests) <= 6, "a state that changes is seen at once, and no job is asked for each picture"


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"{}", b"\x00\xff", b'{"name": "a", "cells": [1]}'])
def test_a_damaged_record_of_a_sweep_is_one_line_and_hides_no_run(folder, capsys, content: bytes) -> None:
    make_run(folder / "runs/one-stamp", status="stopped", steps=2)
    (folder / "runs/sweeps/one").mkdir(parents=True)
    (folder / "runs/sweeps/one/sweep.json").write_bytes(content)
    for argv, code in ((["report", "runs/sweeps/one"], 2), (["status", "runs/sweeps/one"], 2), (["status"], 0)):
        assert cli.main(argv) == code
        printed = capsys.readouterr()
        assert printed.err.startswith("grpo: ") == (code == 2) and ("stopped" in printed.out) == (code == 0)
    assert cli.main(["sweep", "--resume", "runs/sweeps/one"]) == 2
