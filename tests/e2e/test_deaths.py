"""`kill -9` of each process of a run: it ends within 30 s, says who and why, and leaves nothing behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from real_runs import SECRET, Launch
from test_server_restarts import engine_of

from grpo_recipes.runs.rundir import Run, read_json

ENDLESS = ("--max_steps", "100000", "--run_name", "killed", "--server_restarts", "0")


def find_pid(run: Launch, victim: str) -> int:
    if victim == "launcher":
        return run.process.pid
    if victim == "engine":
        return engine_of(run)
    return run.pid_of({"accelerate": "trainer", "rank": "rank_0", "api server": "server"}[victim])


@pytest.mark.parametrize(
    ("victim", "message", "code"),
    [
        pytest.param("launcher", "the launcher (pid {pid}) died", -9, id="launcher"),
        pytest.param("accelerate", "accelerate launch (pid {pid}) was killed by signal 9", 137, id="accelerate"),
        pytest.param("rank", "rank 0 (pid {pid}) was killed by signal 9", 137, id="rank"),
        pytest.param("api server", "the vLLM API server (pid {pid}) was killed by signal 9", 137, id="api-server"),
        pytest.param("engine", "the vLLM engine process EngineCore (pid {pid}) died or was killed", 1, id="engine"),
    ],
)
@pytest.mark.slow
def test_kill_9_ends_the_run_and_names_the_victim(
    launch: Callable[..., Launch], victim: str, message: str, code: int
) -> None:
    # A single rank runs in the process of accelerate.
    run = launch(*ENDLESS, *(("--num_processes", "2") if victim == "accelerate" else ()))
    run.wait_for_step(2)
    pid = find_pid(run, victim)

    psutil.Process(pid).send_signal(signal.SIGKILL)

    killed = time.monotonic()
    assert run.wait(30) == code, run.output
    run.wait_for_nothing_left()
    assert time.monotonic() - killed < 30
    assert message.format(pid=pid) in run.output
    summary = run.summary()
    assert summary["status"] == "failed"
    assert summary["cause"].startswith(message.format(pid=pid))
    assert summary["failed_rank"] == (0 if victim == "rank" else None)
    assert summary["exit_code"] == (137 if victim == "launcher" else code)
    assert summary["steps"] >= 2
    page = (run.run_dir / "report.html").read_text()
    assert "✕ failed" in page and message.format(pid=pid) in page


@pytest.mark.slow
def test_of_two_ranks_the_killed_one_is_named(launch: Callable[..., Launch]) -> None:
    run = launch(*ENDLESS, "--num_processes", "2")
    run.wait_for_step(2)
    pid = run.pid_of("rank_1")
    port = read_json(run.run_dir / "plan.json")["ports"]["main_process"]
    connections = [entry for process in run.processes() for entry in process.net_connections("tcp")]
    rendezvous = {entry.laddr.ip for entry in connections if entry.status == "LISTEN" and entry.laddr.port == port}
    assert rendezvous == {"127.0.0.1"}
    assert SECRET not in Path(f"/proc/{pid}/environ").read_text()

    psutil.Process(pid).send_signal(signal.SIGKILL)

    assert run.wait(30) == 137, run.output
    run.wait_for_nothing_left()
    assert run.summary()["failed_rank"] == 1
    assert run.summary()["cause"] == f"rank 1 (pid {pid}) was killed by signal 9"


@pytest.mark.slow
def test_sigterm_ends_everything_with_143(launch: Callable[..., Launch]) -> None:
    run = launch(*ENDLESS)
    run.wait_for(lambda: run.has_run_dir() and len(run.processes()) >= 3, "a server process")

    run.process.terminate()

    assert run.wait(30) == 143, run.output
    assert run.processes() == []
    assert run.summary()["status"] == "stopped"
    assert "stopped by SIGTERM" in run.output


@pytest.mark.slow
def test_a_server_that_cannot_start_is_told_with_its_last_lines(launch: Callable[..., Launch], tmp_path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    run = launch("--model_name_or_path", str(tmp_path / "model"), "--max_steps", "2")

    assert run.wait(120) not in (0, 2)

    assert "the vLLM server died before it was ready" in run.output
    assert "last lines of logs/liv_vllm_" in run.output and "config.json" in run.output
    assert run.summary()["status"] == "failed"
    assert run.processes() == []


@pytest.mark.slow
def test_when_launcher_and_guards_are_killed_together_nothing_trains_on(launch: Callable[..., Launch]) -> None:
    run = launch(*ENDLESS)
    run.wait_for_step(2)
    guards = [read_json(run.run_dir / "processes" / f"{role}.json")["guard"] for role in ("server", "trainer")]

    for pid in (run.process.pid, *guards):
        psutil.Process(pid).send_signal(signal.SIGKILL)

    run.wait(10)
    run.wait_for_nothing_left()
    assert not Run(run.run_dir).is_running()


@pytest.mark.slow
def test_a_resume_at_once_waits_for_what_a_killed_launcher_left(launch: Callable[..., Launch]) -> None:
    run = launch(*ENDLESS, "--save_steps", "1")
    run.wait_for_step(2)
    old = {process.pid for process in run.processes()} - {run.process.pid}

    run.process.kill()
    resumed = launch("--resume", str(run.run_dir), "--max_steps", "5", folder="again")

    assert resumed.wait() == 0, resumed.output
    assert not old & {process.pid for process in run.processes()}
    summary = read_json(run.run_dir / "summary.json")
    assert (summary["status"], summary["restarts"], summary["steps"]) == ("completed", 1, 5)
