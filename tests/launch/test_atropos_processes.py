"""How a run with Atropos continues when run-api, an environment, the server or several of them are lost.

Server, trainers and environments are fake. run-api is fake too if a test needs only an answer from it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.launch import run as launch_run
from grpo_recipes.launch.processes import Child, Ending
from grpo_recipes.paths import module_command
from grpo_recipes.plan.ports import find_listener
from grpo_recipes.plan.types import Process
from grpo_recipes.process.tree import is_alive
from grpo_recipes.runs.rundir import read_metrics, stop_file
from launch.fake_run import FakeRun, free_port

FakeRunOf = Callable[..., FakeRun]

# It answers once the file "slow" is gone from the run directory.
API = """
import http.server, os, pathlib, sys
run = pathlib.Path(os.environ["GRPO_RUN_DIR"])
class FakeApi(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404 if self.path != "/info" else 503 if (run / "slow").exists() else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), FakeApi).serve_forever()
"""
# It notes at its start whether run-api answers, and ends soon after run-api, as an environment of atroposlib does.
ENVIRONMENT = """
import os, pathlib, sys, time, urllib.request
run = pathlib.Path(os.environ["GRPO_RUN_DIR"])
def answers():
    try:
        return urllib.request.urlopen(sys.argv[1], timeout=5).status
    except TimeoutError:
        return answers()
    except OSError:
        return 0
with (run / "began").open("a") as file:
    file.write(f"{answers()}\\n")
if (run / "refuses").exists():
    sys.exit(2)
while answers():
    time.sleep(0.1)
sys.exit(1)
"""


def run_api(tmp_path: Path, port: int, argv: list[str] | None = None) -> Process:
    argv = argv or [sys.executable, "-c", API, str(port)]
    url = f"http://127.0.0.1:{port}/info"
    return Process(
        "run-api", argv, {}, (), str(tmp_path / "run-api.log"), ready="answering", ready_url=url,
        on_loss="restart with trainers", with_trainers=True, until_trained=True, title="run-api",
    )  # fmt: skip


def environment(tmp_path: Path, port: int, label: str = "sums") -> Process:
    argv, after = [sys.executable, "-c", ENVIRONMENT, f"http://127.0.0.1:{port}/info"], ("run-api", "server")
    return Process(
        f"environment-{label}", argv, {}, (), str(tmp_path / f"{label}.log"), after=after, on_loss="restart",
        with_trainers=True, until_trained=True, title=f"environment {label}",
    )  # fmt: skip


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def atropos_run(fake_run: FakeRunOf, tmp_path: Path, port: int) -> FakeRunOf:
    """``atropos_run(steps=..., bridge=..., KEY=VALUE)``: a fake run with a run-api and two environments."""

    def make(argv: list[str] | None = None, **options: Any) -> FakeRun:
        both = [environment(tmp_path, port, label) for label in ("sums", "more")]
        return fake_run(first=[run_api(tmp_path, port, argv)], last=both, **{"steps": 30} | options)

    return make


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the roles of all processes, in the order of their starts."""
    roles: list[str] = []

    class RecordedChild(Child):
        def __init__(self, process: Process, *arguments: Any) -> None:
            roles.append(process.role)
            super().__init__(process, *arguments)

    monkeypatch.setattr(launch_run, "Child", RecordedChild)
    return iter([roles]).__next__()


ALL = ["run-api", "server", "trainer", "environment-sums", "environment-more"]
ANEW = ["run-api", "trainer", "environment-sums", "environment-more"]


def told_of(run: FakeRun, *roles: str) -> dict[str, dict[str, Any]]:
    """Wait for the records of these roles and until both environments looked for run-api. Return the records."""
    began = run.folder / "began"
    run.wait_until(lambda: all(run.records(*roles)) and began.exists() and len(began.read_text().split()) >= 2)
    return dict(zip(roles, run.records(*roles), strict=True))


@pytest.mark.slow
def test_a_lost_run_api_starts_all_that_remembers_it_again_and_not_the_server(
    atropos_run: FakeRunOf, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, before = atropos_run(), dict[str, dict[str, Any]]()

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            before.update(told_of(run, *ALL))
            state = run.state()
            run.kill("run-api")
            run.wait_until(lambda: run.began_again({role: before[role] for role in ANEW}))
            assert state == {"epoch": 1, "state": "ready"}
            assert run.records("server") == [before["server"]] and run.state() == state

    assert run.then(kill).end() == Ending(0)
    assert started == [*ALL, *ANEW], "in the order of the plan, both times"
    assert (run.folder / "began").read_text().split() == ["200"] * 4, "each waited until run-api answers"
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 31))
    out = capsys.readouterr().out
    anew = "run-api, trainers, environment sums and environment more are started again from the newest checkpoint"
    assert f"run-api (pid {before['run-api']['pid']}) was killed by signal 9: {anew} (1 of 2)" in out
    assert "resuming from checkpoint-" in out
    assert run.summary()["process_restarts"] == {"run-api": 1} and "server_restarts" not in run.summary()
    assert not any(is_alive(before[role]["pid"]) for role in ANEW), "nothing of the first life is left"


@pytest.mark.slow
def test_a_lost_environment_is_started_again_alone(
    atropos_run: FakeRunOf, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run, before = atropos_run(), dict[str, dict[str, Any]]()

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            before.update(told_of(run, *ALL))
            state = (run.folder / "processes/server_state.json").stat()
            lost = {"environment-sums": before.pop("environment-sums")}
            run.kill("environment-sums")
            run.wait_until(lambda: run.began_again(lost))
            assert run.records(*before) == list(before.values())
            assert (run.folder / "processes/server_state.json").stat() == state, "the file must not change"

    assert run.then(kill).end() == Ending(0)
    assert started == [*ALL, "environment-sums"]
    assert "was killed by signal 9: only environment sums is started again (1 of 2)" in capsys.readouterr().out
    assert run.summary()["process_restarts"] == {"environment-sums": 1}
    assert run.state() == {"epoch": 1, "state": "gone"}


def test_what_only_training_needs_is_ended_before_benchmarks_and_stays_so(
    atropos_run: FakeRunOf, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = atropos_run(steps=3)
    for name in ("benchmarks", "hang"):
        (run.folder / name).touch()

    def kill() -> None:
        run.wait_until(lambda: all(run.records(*ALL)))  # trainers of a minute would not be done before the rest starts
        (run.folder / "hang").unlink()
        run.wait_for_step(3)
        over = ("run-api", "environment-sums", "environment-more")
        run.wait_until(lambda: all("exit" in record for record in run.records(*over)))
        (trainer,) = run.records("trainer")
        run.kill("server")
        run.wait_until(lambda: run.state() == {"epoch": 2, "state": "ready"})
        assert run.records("trainer") == [trainer] and is_alive(trainer["pid"])
        (run.folder / "benchmarks").unlink()

    assert run.then(kill).end() == Ending(0)
    assert started == [*ALL, "server"]
    assert "training is over, ending run-api and environment sums and environment more" in capsys.readouterr().out
    assert run.summary()["server_restarts"] == 1 and "process_restarts" not in run.summary()


@pytest.mark.slow
def test_where_a_lost_server_takes_trainers_with_it_after_training_all_of_it_comes_again(
    atropos_run: FakeRunOf, started: list[str]
) -> None:
    run = atropos_run(steps=3, bridge="nccl")
    for name in ("benchmarks", "hang"):
        (run.folder / name).touch()

    def kill() -> None:
        run.wait_until(lambda: all(run.records(*ALL)))  # trainers of a minute would not be done before the rest starts
        (run.folder / "hang").unlink()
        run.wait_for_step(3)
        run.wait_until(lambda: "exit" in run.records("run-api")[0])
        run.kill("server")
        run.wait_until(lambda: run.state() == {"epoch": 2, "state": "ready"})
        (run.folder / "benchmarks").unlink()

    assert run.then(kill).end() == Ending(0)
    assert started == [*ALL, *ALL]


@pytest.mark.slow
def test_a_server_that_reconnects_is_started_again_alone(atropos_run: FakeRunOf, started: list[str]) -> None:
    run = atropos_run()

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            run.kill("server")
            run.wait_until(lambda: run.state() == {"epoch": 2, "state": "ready"})

    assert run.then(kill).end() == Ending(0)
    assert started == [*ALL, "server"] and run.summary()["server_restarts"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["server", "run-api"])
def test_where_the_server_cannot_go_on_without_its_trainers_everything_is_started_again(
    atropos_run: FakeRunOf, started: list[str], lost: str
) -> None:
    run = atropos_run(bridge="nccl")

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            before = told_of(run, *ALL)
            run.kill(lost)
            run.wait_until(lambda: run.began_again(before))
            assert run.state() == {"epoch": 2, "state": "ready"}

    assert run.then(kill).end() == Ending(0)
    assert started == [*ALL, *ALL]
    assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, 31))


def test_an_environment_that_dies_again_without_a_step_ends_the_run_with_its_log(
    atropos_run: FakeRunOf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = atropos_run(steps=200)

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            before = told_of(run, "environment-sums")
            run.kill("environment-sums")
            run.wait_until(lambda: run.began_again(before))
            run.kill("environment-sums")
            run.wait_until(lambda: run.state()["state"] == "gone")

    ending = run.then(kill).end()
    assert ending.code == 137 and ending.log == tmp_path / "sums.log"
    assert ending.cause.startswith("environment sums (pid ") and ending.lost is None
    assert ending.cause.endswith(
        "was killed by signal 9; no step was completed since environment sums was started again"
    )


def test_an_environment_that_refuses_its_recipe_ends_the_run_at_once(
    atropos_run: FakeRunOf, tmp_path: Path, started: list[str]
) -> None:
    run = atropos_run(steps=200)
    (run.folder / "refuses").touch()
    ending = run.end()
    assert ending.code == 2 and ending.log in (tmp_path / "sums.log", tmp_path / "more.log")
    assert "exited with code 2" in ending.cause and started == ALL


def test_a_run_that_was_asked_to_stop_starts_nothing_again(atropos_run: FakeRunOf, started: list[str]) -> None:
    run = atropos_run(steps=200)

    def stop() -> None:
        run.wait_for_step(2)
        run.wait_until(lambda: all(run.records(*ALL)))
        with run.held():
            stop_file(run.folder).touch()
            run.kill("environment-sums")
            run.kill("run-api")

    assert run.then(stop).end().cause == "rank 0: stopped on request"
    assert started == ALL


def test_server_restarts_0_ends_the_run_with_run_api(atropos_run: FakeRunOf, tmp_path: Path) -> None:
    run = atropos_run(server_restarts=0)

    def kill() -> None:
        run.wait_for_step(1)
        run.kill("run-api")

    ending = run.then(kill).end()
    assert (ending.code, ending.log) == (137, tmp_path / "run-api.log")
    assert ending.cause.startswith("run-api (pid ") and ending.cause.endswith(") was killed by signal 9")


def test_a_run_api_that_does_not_answer_is_waited_for_within_bounds(
    atropos_run: FakeRunOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, started: list[str]
) -> None:
    monkeypatch.setattr(launch_run, "MEETING_SECONDS", 2.0)
    run = atropos_run()
    (run.folder / "slow").touch()
    began = time.monotonic()
    ending = run.end()
    assert (ending.code, ending.cause) == (1, "run-api was not ready after 2 s")
    assert ending.log == tmp_path / "run-api.log" and started == ["run-api"]
    assert time.monotonic() - began < 20


def test_a_run_api_that_dies_at_its_start_ends_the_run_with_its_code(
    atropos_run: FakeRunOf, tmp_path: Path, port: int, started: list[str]
) -> None:
    ending = atropos_run(argv=[sys.executable, "-c", "raise SystemExit(3)"]).end()
    assert (ending.code, ending.cause) == (3, "run-api died before it was ready")
    assert ending.log == tmp_path / "run-api.log" and started == ["run-api"]


def test_a_port_that_another_process_took_meanwhile_is_said_with_its_pid(
    atropos_run: FakeRunOf, port: int, tmp_path: Path
) -> None:
    run = atropos_run(argv=[sys.executable, "-c", "import time; time.sleep(60)"])
    with socket.create_server(("127.0.0.1", port)):
        ending = run.end()
    assert ending.cause == f"port {port} was taken by another process (pid {os.getpid()}) while run-api started"
    assert ending.code == 1 and ending.log == tmp_path / "run-api.log"


@pytest.mark.slow
def test_the_real_run_api_lives_as_long_as_its_trainers(
    atropos_run: FakeRunOf, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("atroposlib")
    run = atropos_run(argv=module_command("atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)))
    registration = {
        "wandb_group": "", "wandb_project": "", "batch_size": 32, "max_token_len": 64, "checkpoint_dir": "",
        "save_checkpoint_interval": 1, "starting_step": 3, "num_steps": 20,
    }  # fmt: skip

    def asked(path: str, body: dict[str, Any] | None = None) -> Any:
        data, headers = json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as answer:
            return json.load(answer)

    def kill() -> None:
        run.wait_for_step(2)
        with run.held():
            asked("/register", registration)
            assert asked("/info") == {"batch_size": 32, "max_token_len": 64}
            before = told_of(run, *ANEW)
            run.kill("run-api")
            run.wait_until(lambda: run.began_again(before))
            assert asked("/info") == {"batch_size": -1, "max_token_len": -1}, "it remembers nobody"

    assert run.then(kill).end(whole=True) == Ending(0)
    assert len(re.findall(rf"run-api ready after \d+ s on 127\.0\.0\.1:{port}$", capsys.readouterr().out, re.M)) == 2
    assert f"Uvicorn running on http://127.0.0.1:{port}" in (tmp_path / "run-api.log").read_text()
    assert find_listener(port) is None, "nothing of it is left"
