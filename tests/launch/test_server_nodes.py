"""A server with engines on a second node: it is lost with each of its processes, and the lost one is named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_recipes.launch import run as launcher
from grpo_recipes.launch.processes import Child, Ending, Group, State
from grpo_recipes.plan.types import Process
from launch.fake_run import FakeRun


@pytest.fixture
def run_on_two_nodes(fake_run: Callable[..., FakeRun], monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRun]:
    """``run_on_two_nodes(code, ...)``: a fake run whose server has a headless process on a node that is this machine.

    Python executes ``code`` in the headless process.
    """

    def make(code: str, **options: str) -> FakeRun:
        run = fake_run(**options)
        server, *others = run.attempt.plan.processes
        argv = [sys.executable, "-c", f"import sys, time\n{code}"]
        headless = replace(server, argv=argv, log=f"{run.folder}/s_node1.log", node=1)
        run.attempt.plan = replace(run.attempt.plan, processes=[server, headless, *others])
        environment, scratch = run.attempt.environment, run.attempt.scratch
        start = lambda _, process: Child(process, environment, run.folder, scratch)  # noqa: E731
        monkeypatch.setattr(launcher, "RemoteChild", start)
        return run

    return make


@pytest.mark.parametrize("victim", ["server", "server_1"])
def test_the_processes_of_both_nodes_are_replaced_if_one_is_killed(run_on_two_nodes, capsys, victim):
    run = run_on_two_nodes("time.sleep(300)")

    def kill() -> None:
        run.wait_for_step(2)
        before = dict(zip(("server", "server_1"), run.records("server", "server_1"), strict=True))
        run.kill(victim)
        run.wait_until(lambda: run.began_again(before))

    assert run.then(kill).end() == Ending(0)
    name = {"server": "the vLLM API server (pid", "server_1": "vllm serve --headless on node 1 (pid"}[victim]
    output = capsys.readouterr().out
    assert f"grpo: {name}" in output and "was killed by signal 9: only the server is started again (1 of 2)" in output
    assert run.summary()["server_restarts"] == 1


@pytest.mark.parametrize("code", [0, 3])
def test_a_node_that_fails_while_the_server_starts_ends_the_run_and_is_named(run_on_two_nodes, code):
    """vLLM's headless command exits with 0 if its engine has failed."""
    run = run_on_two_nodes(f"sys.exit({code})", server="late-server")
    ending = run.end()
    assert (ending.code, ending.log, ending.lost) == (code or 1, run.folder / "s_node1.log", None)
    assert ending.cause.startswith("the vLLM server died before it was ready: vllm serve --headless on node 1 (pid ")
    assert ending.cause.endswith(f"exited with code {code}")
    assert "server_restarts" not in run.summary()


class FakeMember:
    process, log_begins = Process("server", [], {}, (), "log", ready="serving"), 0

    def __init__(self, log: str, lost: Ending | None = None):
        self.log, self._lost = Path(log), lost

    def state(self) -> State:
        return State(lost=self._lost)


def test_a_server_is_lost_with_the_first_of_its_nodes_and_the_error_of_each_log_is_found(tmp_path):
    running, ended = FakeMember("head"), FakeMember("headless", Ending(0, "it ended"))
    assert Group([running, ended]).state().lost == Ending(0, "it ended", log=Path("headless"))
    assert Group([running, running]).state().lost is None
    log = tmp_path / "headless.log"
    log.write_text("(EngineCore_DP1 pid=5) ERROR 11-29 [core.py:9] ValueError: no such model\n")
    assert Group([running, FakeMember(str(log))]).find_first_error() == "ValueError: no such model"
