"""What follows when the server is lost."""

from __future__ import annotations

from dataclasses import replace

from grpo_recipes.launch.processes import Ending
from grpo_recipes.launch.supervisor import Restarts
from grpo_recipes.plan.types import Process

SERVER = Process("server", [], {}, (), "log", ready="serving", on_loss="restart")
LOST = Ending(137, "the vLLM API server (pid 5) was killed by signal 9", lost=SERVER)


def test_what_is_lost_is_started_again_where_the_plan_says_so():
    assert Restarts(2).after(LOST, stopping=False) == (True, LOST)


def test_a_process_whose_loss_fails_the_run_is_not():
    lost = replace(LOST, lost=replace(SERVER, on_loss="fail"))
    assert Restarts(2).after(lost, stopping=False) == (False, lost)


def test_a_lost_trainer_ends_the_run():
    failed = Ending(1, "rank 0: ValueError", 0)
    assert Restarts(2).after(failed, stopping=False) == (False, failed)


def test_nothing_is_started_for_a_run_that_was_asked_to_stop():
    assert Restarts(2).after(LOST, stopping=True) == (False, LOST)


def test_server_restarts_0_is_never():
    assert Restarts(0).after(LOST, stopping=False) == (False, LOST)


def test_restarts_are_counted_and_bounded():
    restarts = Restarts(1)
    assert restarts.after(LOST, stopping=False)[0] and restarts.done == 1
    restarts.stepped = True
    again, ending = restarts.after(LOST, stopping=False)
    assert not again and ending.code == 137
    assert ending.cause == f"{LOST.cause}; the server was started again 1 times already (server_restarts)"


def test_a_server_is_not_started_twice_without_a_step_between():
    restarts = Restarts(5)
    restarts.after(LOST, stopping=False)
    again, ending = restarts.after(LOST, stopping=False)
    assert not again
    assert ending.cause == f"{LOST.cause}; no step was completed since the server was started again"
    restarts.stepped = True
    assert restarts.after(LOST, stopping=False)[0] and restarts.done == 2
