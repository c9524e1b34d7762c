"""Sampling through the server: paused until all requests are there, and in their order."""

from __future__ import annotations

import threading

import pytest

from grpo_recipes.server.wire import COMPLETIONS_PATH
from grpo_recipes.weights.sampling import sampling_seed
from grpo_recipes.weights.transport import BadAnswer, ServerLost

pytestmark = pytest.mark.alone

PROMPTS = [[1], [2], [3]]


def test_in_a_seeded_run_the_engine_begins_when_it_has_all_requests(connect, server) -> None:
    client = connect(seed=7)
    for _ in range(3):
        client.generate(PROMPTS, n=2)
    assert server.queues == [6, 6, 6]
    assert server.calls[:1] + server.calls[4:5] == ["/pause?mode=keep", "/resume"]


def test_in_a_seeded_run_the_order_is_that_of_the_prompts(connect, server) -> None:
    connect(seed=7).generate(PROMPTS, n=2)
    assert [request["priority"] for request in server.sampled()] == [0, 1, 2]


def test_elsewhere_nothing_is_held_or_ordered(connect, server) -> None:
    client = connect()
    client.generate(PROMPTS, n=2)
    client.generate_seeded(PROMPTS, [5, 6, 7], n=2)
    assert set(server.calls) == {COMPLETIONS_PATH}
    assert not [request for request in server.asked if "priority" in request]


def test_prompts_with_given_seeds_come_back_in_their_order(connect, server) -> None:
    answer = connect(seed=7).generate_seeded(PROMPTS, [5, 6, 7], n=2)
    assert answer["prompt_ids"] == PROMPTS
    assert answer["completion_ids"] == [[5], [5], [6], [6], [7], [7]]
    assert answer["logprobs"] == [[[-0.5]]] * 6


def test_more_prompts_than_requests_at_a_time_are_held_in_turn(connect, server) -> None:
    extra = {"ignore_eos": True}
    answer = connect(seed=7, max_concurrent_requests=2).generate(
        [[index] for index in range(5)], n=2, generation_kwargs=extra
    )
    assert server.queues == [4, 4, 2]
    assert answer["prompt_ids"] == [[index] for index in range(5)]
    assert all(request["ignore_eos"] for request in server.sampled())


def test_without_an_order_so_many_requests_are_under_way_and_the_next_does_not_wait_for_the_slowest(
    connect, server
) -> None:
    began, go_on = [], threading.Event()
    complete = server._completions

    def slow_first(body):
        began.append(body["prompt"])
        if body["prompt"] == [0]:
            assert go_on.wait(10)
        elif body["prompt"] == [4]:
            go_on.set()  # the last request starts before the first has finished
        return complete(body)

    server._completions = slow_first
    answer = connect(max_concurrent_requests=2).generate([[index] for index in range(5)], n=2)
    assert go_on.is_set() and sorted(began) == [[index] for index in range(5)]
    assert server.most_under_way <= 4
    assert answer["prompt_ids"] == [[index] for index in range(5)] and len(answer["completion_ids"]) == 10


def test_after_a_failure_nothing_more_is_asked(connect, server) -> None:
    server.wrong = {COMPLETIONS_PATH: (400, b"no", 3)}  # one try of a generation each
    server.sampling_seconds = 0.1
    client = connect(max_concurrent_requests=1)
    with pytest.raises(BadAnswer, match="answered 400: no"):
        client.generate(PROMPTS)
    assert not server.sampled()


def test_a_request_that_fails_does_not_leave_the_engine_paused(connect, server) -> None:
    server.loses[COMPLETIONS_PATH] = 2  # the second is the repetition
    server.refuses.add("/health")
    with pytest.raises(ServerLost):
        connect(seed=7).generate([[1]], n=2)
    assert server.calls[-1] == "/resume"


def test_an_engine_that_does_not_take_up_requests_is_not_waited_for_without_end(connect, server) -> None:
    client = connect(seed=7, server_request_timeout=0.3)
    server.under_way = 1  # another client's request that never ends
    with pytest.raises(ServerLost, match=r"did not take up 0 completions within 0\.3 s"):
        client.generate(PROMPTS, n=2)


def test_an_engine_that_others_ask_too_is_neither_waited_for_nor_paused(connect, server) -> None:
    client = connect(seed=7, server_request_timeout=0.3)
    client.has_other_clients, server.under_way = True, 1
    answer = client.generate_seeded(PROMPTS, [5, 6, 7], n=2)
    assert answer["completion_ids"] == [[5], [5], [6], [6], [7], [7]]
    assert set(server.calls) == {COMPLETIONS_PATH}
    assert not [request for request in server.asked if "priority" in request]


def test_each_prompt_of_each_generation_has_a_seed_of_its_own_and_gets_it_again(connect, server) -> None:
    seeds = {}
    for run_seed in (7, 8, 7):
        client = connect(seed=run_seed)
        for generation in ("train/1", "train/2"):
            server.asked.clear()
            client.generation_name = generation
            client.generate(PROMPTS, n=2)
            drawn = [request["seed"] for request in server.sampled()]
            assert seeds.setdefault((run_seed, generation), drawn) == drawn
    assert len({seed for drawn in seeds.values() for seed in drawn}) == 4 * len(PROMPTS)


def test_prompts_with_rows_of_their_own_have_the_seeds_of_those(connect, server) -> None:
    client = connect(seed=7)
    client.generation_name, client.seed_numbers = "4/0/turn1", [9, 3]
    client.generate([[1], [2]], n=1)
    assert {request["seed"] for request in server.sampled()} == {sampling_seed(7, "4/0/turn1", row) for row in (9, 3)}
