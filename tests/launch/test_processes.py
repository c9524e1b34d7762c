"""Who ended the run: real processes under real process guards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from grpo_recipes.launch import processes
from grpo_recipes.launch.processes import Child, Ending, Group, find_first_error, read_last_lines, wait_for_ending
from grpo_recipes.plan.types import Process
from grpo_recipes.process.scratch import Scratch
from grpo_recipes.secrets import MASK

RECORD = """
import json, os, subprocess, sys, time
def record(rank, pid=os.getpid(), **facts):
    path = os.path.join(sys.argv[1], "processes", f"rank_{rank}.json")
    with open(path + ".new", "w") as file:
        json.dump({"rank": rank, "pid": pid, **facts}, file)
    os.rename(path + ".new", path)
"""


@pytest.fixture
def start(tmp_path):
    """``start(role, code)`` runs Python code as that role under a process guard."""
    children: list[Child] = []
    run_dir = tmp_path / "run"
    (run_dir / "processes").mkdir(parents=True)

    def start_it(role: str, code: str) -> Child:
        argv = [sys.executable, "-c", RECORD + code, str(run_dir)]
        title = "" if role in ("server", "trainer") else role.replace("environment-", "environment ")
        process = Process(role, argv, {}, (), str(tmp_path / f"{role}.log"), title=title)
        children.append(Child(process, dict(os.environ), run_dir, Scratch(tmp_path / "disk", tmp_path / "memory")))
        return children[-1]

    start_it.run_dir = run_dir
    yield start_it
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            for below in psutil.Process(child.guard_pid).children(recursive=True):
                below.kill()  # the guard would wait for them
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child.guard_pid, signal.SIGTERM)
        while child.alive():
            time.sleep(0.02)


def ending_of(start, trainer: Child, server: Child | None = None) -> Ending:
    deadline = time.monotonic() + 30

    def tick() -> None:
        assert time.monotonic() < deadline, "no ending within 30 s"

    groups = [Group([child]) for child in (server, trainer) if child]
    return wait_for_ending(groups, tick)


def test_trainers_that_are_done_end_the_run_with_0(start):
    server = start("server", "time.sleep(300)")
    ending = ending_of(start, start("trainer", "time.sleep(0.3)"), server)
    assert ending == Ending(0)
    assert server.alive()


@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [("sys.exit(3)", 3, "exited with code 3"), ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9")],
)
def test_a_launch_command_that_fails_is_named_with_its_code(start, code, exit_code, how):
    trainer = start("trainer", f"time.sleep(0.3); {code}")
    ending = ending_of(start, trainer)
    assert (ending.code, ending.failed_rank, ending.log) == (exit_code, None, trainer.log)
    assert ending.cause == f"accelerate launch (pid {trainer.state().pid}) {how}"


def test_the_first_rank_that_failed_is_the_cause(start):
    trainer = start(
        "trainer",
        "record(0, exit=1, cause='RuntimeError: connection lost', time=200.0)\n"
        "record(1, exit=5, cause='ValueError: the real one', time=100.0)\n"
        "time.sleep(300)",
    )
    ending = ending_of(start, trainer)
    assert (ending.code, ending.failed_rank) == (5, 1)
    assert ending.cause == "rank 1: ValueError: the real one"
    assert ending.log == trainer.log


def test_a_ranks_own_exit_code_beats_accelerates(start):
    trainer = start("trainer", "record(0, exit=2, cause='column missing', time=1.0)\nsys.exit(1)")
    ending = ending_of(start, trainer)
    assert (ending.code, ending.cause, ending.failed_rank) == (2, "rank 0: column missing", 0)


def test_a_rank_that_was_killed_is_named_with_its_signal(start):
    trainer = start(
        "trainer",
        "child = subprocess.Popen(['sleep', '300'])\n"
        "record(0, exit=0, cause='', time=1.0)\nrecord(1, pid=child.pid)\ntime.sleep(0.3)\nchild.kill()\nchild.wait()\n"
        "print(f'  exitcode  : -9 (pid: {child.pid})', flush=True)\ntime.sleep(300)",
    )
    ending = ending_of(start, trainer)
    pid = json.loads((start.run_dir / "processes/rank_1.json").read_text())["pid"]
    assert (ending.code, ending.failed_rank) == (137, 1)
    assert ending.cause == f"rank 1 (pid {pid}) was killed by signal 9"


def test_a_single_rank_runs_in_the_process_of_accelerate_and_is_named_if_it_is_killed(start):
    trainer = start("trainer", "record(0)\ntime.sleep(0.3)\nos.kill(os.getpid(), 9)")
    ending = ending_of(start, trainer)
    assert (ending.code, ending.failed_rank) == (137, 0)
    assert ending.cause == f"rank 0 (pid {trainer.state().pid}) was killed by signal 9"


def test_several_ranks_that_are_gone_are_waited_for_together(start, monkeypatch):
    monkeypatch.setattr(processes, "_PRINTED_SECONDS", 1.0)
    trainer = start(
        "trainer",
        "gone = [subprocess.Popen(['true']) for _ in range(4)]\n"
        "for rank, child in enumerate(gone):\n    child.wait()\n    record(rank, pid=child.pid)\n"
        "print(f'  exitcode  : -9 (pid: {gone[3].pid})', flush=True)\ntime.sleep(300)",
    )
    while len(list(start.run_dir.glob("processes/rank_?.json"))) < 4 or not trainer.log.read_text():
        time.sleep(0.02)
    began = time.monotonic()
    assert [rank.code for rank in trainer.state().ranks] == [None, None, None, -9]
    assert time.monotonic() - began < 2.5


@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [
        pytest.param("sys.exit(4)", 4, "exited with code 4", marks=pytest.mark.slow),
        ("sys.exit(0)", 1, "exited with code 0"),
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9"),
    ],
)
def test_a_server_that_ends_before_the_trainers_is_the_cause(start, code, exit_code, how):
    server = start("server", f"time.sleep(0.4); {code}")
    ending = ending_of(start, start("trainer", "time.sleep(300)"), server)
    assert (ending.code, ending.log) == (exit_code, server.log)
    assert ending.cause == f"the vLLM API server (pid {server.state().pid}) {how}"


def test_of_run_api_environments_and_ranks_that_failed_together_the_first_in_the_plan_is_to_blame(start):
    run_api, sums = start("run-api", "os.kill(os.getpid(), 9)"), start("environment-sums", "sys.exit(1)")
    trainer = start("trainer", "record(0, exit=1, cause='AtroposError: run-api is gone', time=1.0)\ntime.sleep(300)")
    while not trainer.state().ranks or sums.state().lost is None or run_api.state().lost is None:
        time.sleep(0.02)
    trainers, of_sums = Group([trainer]), Group([sums])
    ending = processes.find_ending([Group([run_api]), trainers, of_sums], stopping=False)
    assert ending.cause == f"run-api (pid {run_api.state().pid}) was killed by signal 9"
    assert (ending.log, ending.lost) == (run_api.log, run_api.process)
    without = processes.find_ending([trainers, of_sums], stopping=False)
    assert without.cause == f"environment sums (pid {sums.state().pid}) exited with code 1"
    alone = processes.find_ending([trainers], stopping=False)
    assert alone.cause == "rank 0: AtroposError: run-api is gone" and alone.lost is None


def test_what_ended_while_a_stop_request_came_is_not_lost(start):
    sums = start("environment-sums", "sys.exit(1)")
    trainer = start("trainer", "time.sleep(1)\nrecord(0, exit=75, cause='stopped on request', time=1.0)\nsys.exit(75)")
    while sums.state().lost is None:
        time.sleep(0.02)
    answers = [False]  # at the first check, the request has not arrived yet
    ending = wait_for_ending([Group([trainer]), Group([sums])], lambda: None, lambda: not answers or answers.pop())
    assert (ending.code, ending.cause) == (75, "rank 0: stopped on request")


def test_a_child_leaves_its_output_in_its_log_and_forgets_an_older_record(start):
    record = start.run_dir / "processes/trainer.json"
    record.write_text('{"pid": 1, "exit": 9}')
    trainer = start("trainer", "print('hello')")
    ending = ending_of(start, trainer)
    assert ending.code == 0 and trainer.state().exit == 0
    assert trainer.log.read_text() == "hello\n"


def test_the_tail_of_a_log_is_short_and_masked(tmp_path):
    log = tmp_path / "log"
    token = "hf_" + "plantedsecret" * 2
    log.write_bytes(
        b"".join(b"line %d\n" % number for number in range(1000)) + f"\xff token {token}\n".encode("latin1")
    )
    lines = read_last_lines(log, 5).splitlines()
    assert lines[:4] == [f"line {number}" for number in range(996, 1000)]
    assert lines[4].endswith(f"token {MASK}") and len(lines) == 5


def test_the_tail_of_a_log_has_the_users_own_lines_and_no_frames_of_libraries(tmp_path):
    frames = "".join(
        f'  File "/env/lib/python3.11/site-packages/trl/x.py", line {row}, in f\n    g()\n' for row in range(40)
    )
    user_lines = '  File "/home/me/rewards.py", line 3, in score\n    return gold[0]\n'
    (tmp_path / "log").write_text(f"Traceback (most recent call last):\n{user_lines}{frames}KeyError: 0\n")
    lines = read_last_lines(tmp_path / "log").splitlines()
    assert len(lines) == 5 and "40 frames of libraries" in lines[3] and "/home/me/rewards.py" in lines[1]


def test_the_tail_of_a_log_counts_rows_of_metrics_and_keeps_other_lines(tmp_path):
    rows = "".join(f"{{'loss': '0.1', 'reward': '{row}'}}\n" for row in range(3))
    (tmp_path / "log").write_text(f"{{'mine': 1}}\n{rows}{{'eval_reward': '1'}}\nKeyError: 0\n")
    assert read_last_lines(tmp_path / "log").splitlines() == ["{'mine': 1}", "… rows of metrics: 4", "KeyError: 0"]


def test_the_tail_of_a_missing_or_empty_log_is_empty(tmp_path):
    (tmp_path / "empty").touch()
    assert read_last_lines(tmp_path / "none") == read_last_lines(Path(tmp_path / "empty")) == ""


TRACEBACK = """step 3
WARNING: ImportError: no flash attention, which is fine
[rank0]: Traceback (most recent call last):
[rank0]:   File "metrics.py", line 3, in append
[rank0]:     lines.write(text)
[rank0]: OSError: [Errno 28] No space left on device: 'runs/mine/metrics.jsonl'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
RuntimeError: cannot save
"""
ENGINE = """(APIServer pid=7) INFO 11-27 14:00:00 [api.py:1] started
(EngineCore pid=9) WARNING 11-27 14:00:01 [x.py:2] KeyError: harmless
(EngineCore pid=9) ERROR 11-27 14:00:02 [core.py:10] EngineCore encountered a fatal error.
(EngineCore pid=9) ERROR 11-27 14:00:02 [core.py:10] Traceback (most recent call last):
(EngineCore pid=9) ERROR 11-27 14:00:02 [core.py:10]   File "cpu_attn.py", line 3, in forward
(EngineCore pid=9) ERROR 11-27 14:00:02 [core.py:10] ValueError: Unsupported head size 16
(APIServer pid=7) ERROR 11-27 14:00:03 [async_llm.py:1] vllm.v1.engine.exceptions.EngineDeadError: EngineCore died
(EngineCore pid=9) RuntimeError: leaked semaphore
"""


def test_the_first_error_of_a_log_is_found(tmp_path):
    """R3, R8: not the last error, and not another process's report of it."""
    log = tmp_path / "log"
    log.write_text(TRACEBACK)
    assert find_first_error(log) == "OSError: [Errno 28] No space left on device: 'runs/mine/metrics.jsonl'"
    log.write_text("Traceback (most recent call last):\nValueError: of the process before\n" + ENGINE)
    begins = log.read_text().index("(APIServer")
    engine = processes._ENGINE_ERROR
    assert find_first_error(log, begins, engine) == "ValueError: Unsupported head size 16"
    killed = "".join(line for line in ENGINE.splitlines(keepends=True) if "(API" in line)
    log.write_text(killed)
    assert find_first_error(log, 0, engine) == "", "an engine that was killed says nothing"
    assert find_first_error(tmp_path / "none") == ""
