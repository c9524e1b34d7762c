"""Restarts of lost processes and their bounds."""

from __future__ import annotations

from dataclasses import replace

from grpo_recipes.launch.processes import Ending
from grpo_recipes.launch.restarts import Restarts
from grpo_recipes.plan.types import Process

SERVER = Process("server", [], {}, (), "log", ready="serving", on_loss="restart")
LOST = Ending(137, "the vLLM API server (pid 5) was killed by signal 9", lost=SERVER)


def test_what_is_lost_is_started_again_where_the_plan_says_so():
    assert Restarts(2).decide(LOST, stopping=False) == LOST


def test_a_process_whose_loss_fails_the_run_is_not():
    lost = replace(LOST, lost=replace(SERVER, on_loss="fail"))
    assert Restarts(2).decide(lost, stopping=False) == replace(lost, lost=None)


def test_a_lost_trainer_ends_the_run():
    failed = Ending(1, "rank 0: ValueError", 0)
    assert Restarts(2).decide(failed, stopping=False) == failed


def test_nothing_is_started_for_a_run_that_was_asked_to_stop():
    assert Restarts(2).decide(LOST, stopping=True) == replace(LOST, lost=None)


def test_server_restarts_0_is_never():
    assert Restarts(0).decide(LOST, stopping=False) == replace(LOST, lost=None)


def test_restarts_are_counted_and_bounded():
    restarts = Restarts(1)
    assert restarts.decide(LOST, stopping=False).lost and restarts.counts["server"] == 1
    restarts.idle.clear()
    ending = restarts.decide(LOST, stopping=False)
    assert ending.lost is None and ending.code == 137
    assert ending.cause == f"{LOST.cause}; the server was already started again 1 times (server_restarts)"


def test_a_server_is_not_started_twice_without_a_step_between():
    restarts = Restarts(5)
    restarts.decide(LOST, stopping=False)
    ending = restarts.decide(LOST, stopping=False)
    assert ending.lost is None
    assert ending.cause == f"{LOST.cause}; no step was completed since the server was started again"
    restarts.idle.clear()
    assert restarts.decide(LOST, stopping=False).lost and restarts.counts["server"] == 2


def test_the_bounds_of_one_role_are_not_anothers():
    sums = replace(SERVER, role="environment-sums", title="environment sums", ready="started")
    died = Ending(1, "environment sums (pid 6) exited with code 1", lost=sums)
    restarts = Restarts(1)
    assert restarts.decide(LOST, stopping=False).lost and restarts.decide(died, stopping=False).lost
    ending = restarts.decide(died, stopping=False)
    assert ending.cause == f"{died.cause}; environment sums was already started again 1 times (server_restarts)"


def test_an_engine_that_fails_before_the_first_step_is_not_started_again():
    """R3: a restart would fail again; after a step, the error may be caused by that step."""
    lost = replace(LOST, cause="the engine died: ValueError: x", error="ValueError: x")
    ending = Restarts(2).decide(lost, False)
    assert ending.lost is None
    assert ending.cause.startswith(
        "the engine died: ValueError: x; before the first step, so a restart would fail again"
    )
    assert Restarts(2, stepped=True).decide(lost, False) is lost
    assert Restarts(2).decide(replace(lost, error=""), False).lost, "it was killed"


def test_what_refuses_its_input_is_not_started_again_with_the_same():
    refused = Ending(2, "environment sums (pid 6) exited with code 2", lost=SERVER)
    assert Restarts(2).decide(refused, stopping=False) == replace(refused, lost=None)
