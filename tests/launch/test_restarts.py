"""What follows when the server is lost."""

from __future__ import annotations

from grpo_recipes.launch.restarts import Next, Restarts
from grpo_recipes.launch.supervisor import Ending

LOST = Ending(137, "the vLLM API server (pid 5) was killed by signal 9", of_server=True)


def test_a_bridge_that_reconnects_needs_the_server_alone():
    assert Restarts(2, "file").after(LOST, stopping=False) == (Next.SERVER, LOST)


def test_without_such_a_bridge_the_trainers_start_again_too():
    assert Restarts(2, "nccl").after(LOST, stopping=False) == (Next.BOTH, LOST)


def test_a_lost_trainer_ends_the_run():
    failed = Ending(1, "rank 0: ValueError", 0)
    assert Restarts(2, "file").after(failed, stopping=False) == (Next.END, failed)


def test_nothing_is_started_for_a_run_that_was_asked_to_stop():
    assert Restarts(2, "file").after(LOST, stopping=True) == (Next.END, LOST)


def test_server_restarts_0_is_never():
    assert Restarts(0, "file").after(LOST, stopping=False) == (Next.END, LOST)


def test_restarts_are_counted_and_bounded():
    restarts = Restarts(1, "file")
    assert restarts.after(LOST, stopping=False)[0] is Next.SERVER and restarts.done == 1
    restarts.stepped = True
    what, ending = restarts.after(LOST, stopping=False)
    assert what is Next.END and ending.code == 137
    assert ending.cause == f"{LOST.cause}; the server was started again 1 times already (server_restarts)"


def test_a_server_is_not_started_twice_without_a_step_between():
    restarts = Restarts(5, "file")
    restarts.after(LOST, stopping=False)
    what, ending = restarts.after(LOST, stopping=False)
    assert what is Next.END
    assert ending.cause == f"{LOST.cause}; no step was completed since the server was started again"
    restarts.stepped = True
    assert restarts.after(LOST, stopping=False)[0] is Next.SERVER and restarts.done == 2
