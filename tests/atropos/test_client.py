"""The client against the real run-api: registration, delivery, kept and dropped groups, reasons for no batch."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from waiting import wait_for

from atropos.groups import group, of_version
from atropos.run_api import REGISTRATION, RunApi, post_groups
from grpo_recipes.extensions.atropos.client import AtroposClient, AtroposError, NoLogprobs, Registration, WaitAborted
from grpo_recipes.extensions.atropos.group import UNTRAINED, Group

Client = Callable[..., AtroposClient]
TAKE: dict[str, Any] = {"size": 2, "longest": 64, "vocabulary": 1000, "step": 9, "max_staleness": None}


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def connect(api: RunApi, messages: list[str]) -> Client:
    """Return ``connect(register={...}, KEY=VALUE, ...)``: build a client; register it unless that is None."""

    def connected(register: dict[str, Any] | None = {}, **keys: Any) -> AtroposClient:  # noqa: B006
        client = AtroposClient(
            api.url, **{"delay": 0.01, "max_wait": 10.0, "timeout": 10.0, "say": messages.append, **keys}
        )
        if register is not None:
            client.register({**REGISTRATION, **register})
        return client

    return connected


def post(api: RunApi, scored: Any) -> dict[str, Any]:
    """Post a group like an environment, also with NaN."""
    wire = scored.to_json() if isinstance(scored, Group) else scored
    headers = {"Content-Type": "application/json"}
    answer = api._session.post(f"{api.url}/scored_data", data=json.dumps(wire), headers=headers, timeout=10)
    assert answer.ok, answer.text
    return answer.json()


# --- registration --------------------------------------------------------------------------------------------------


def test_environments_can_join_once_the_trainer_is_registered(
    api: RunApi, connect: Client, messages: list[str]
) -> None:
    body = {"max_token_length": 64, "desired_name": "sums", "weight": 1.0, "group_size": 2}
    assert api.post("/register-env", body).json() == {"status": "wait for trainer to start"}
    client = connect(None)
    uuid = client.register(Registration(**{**REGISTRATION, "starting_step": 7}))
    assert messages == [
        "Atropos API connectivity confirmed",
        f"Trainer successfully registered with UUID: {uuid}",
    ]
    joined = api.post("/register-env", body).json()
    assert (joined["status"], joined["starting_step"], joined["num_steps"]) == ("success", 7, REGISTRATION["num_steps"])
    assert client.info() == {"batch_size": 4, "max_token_len": 64}
    assert client.status() == {"current_step": 7, "queue_size": 0}


@pytest.mark.parametrize("name", REGISTRATION)
def test_a_field_that_is_missing_is_named_before_anything_is_sent(name: str) -> None:
    registration = {key: value for key, value in REGISTRATION.items() if key != name}
    with pytest.raises(AtroposError, match=f"^Missing required registration field: {name}$"):
        AtroposClient("http://127.0.0.1:9", timeout=0.1).register(registration)


@pytest.mark.parametrize(
    ("registration", "why"),
    [
        ("batch_size=4", "$"),
        (None, "$"),
        ({**REGISTRATION, "batch_size": "4"}, ": batch_size is '4', not of type int$"),
        ({**REGISTRATION, "num_steps": 1.5}, ": num_steps is 1.5, not of type int$"),
        ({**REGISTRATION, "wandb_group": None}, ": wandb_group is None, not of type str$"),
        ({**REGISTRATION, "batch_size": 0}, ": batch_size is 0, below 1$"),
    ],
)
def test_a_wrong_registration_is_refused_before_anything_is_sent(registration: Any, why: str) -> None:
    with pytest.raises(AtroposError, match=f"^Invalid registration data format{why}"):
        AtroposClient("http://127.0.0.1:9", timeout=0.1).register(registration)


@pytest.mark.parametrize("changes", [{"batch_size": 8}, {"starting_step": 3}, {}])
def test_a_run_api_of_another_trainer_is_refused(api: RunApi, connect: Client, changes: dict[str, Any]) -> None:
    api.register(**changes)
    with pytest.raises(AtroposError, match=r"already has a trainer .*Fix: restart it"):
        connect()


def test_a_run_api_that_was_sent_groups_too_early_is_refused(api: RunApi, connect: Client) -> None:
    api.restart()
    post(api, group())
    with pytest.raises(AtroposError, match=r"received groups before a trainer registered.*GET /reset_data"):
        connect()
    api.reset()
    assert connect().info()["batch_size"] == REGISTRATION["batch_size"]


def test_groups_that_come_during_the_registration_are_not_lost(api: RunApi, connect: Client) -> None:
    client = connect(None)
    register = client._check_registration

    def registered_and_posted(registration: Registration) -> None:
        register(registration)
        api.post("/scored_data_list", [group().to_json(), group().to_json()])

    client._check_registration = registered_and_posted  # type: ignore[method-assign]
    client.register(REGISTRATION)
    assert client.next_batch() == [group(), group()]


# --- delivery ------------------------------------------------------------------------------------------------------


def test_nobody_registered_is_an_error_and_no_empty_batch(api: RunApi, connect: Client) -> None:
    api.restart()
    with pytest.raises(AtroposError, match="does not know this training: Trainer not registered"):
        connect(None, max_wait=60.0).next_batch()


def test_a_run_api_that_was_started_again_has_forgotten_the_training(api: RunApi, connect: Client) -> None:
    client = connect()
    api.restart()
    with pytest.raises(AtroposError, match=r"does not know this training: Trainer not registered.*Fix: restart it"):
        client.next_batch()


def test_a_run_api_that_was_reset_has_forgotten_the_training(api: RunApi, connect: Client) -> None:
    client = connect()
    api.reset()
    with pytest.raises(AtroposError, match="does not know this training: it was reset"):
        client.next_batch()


def test_a_batch_is_waited_for(api: RunApi, connect: Client, messages: list[str]) -> None:
    client = connect()
    timer = threading.Timer(0.4, lambda: [post(api, group()) for _ in range(2)])
    began = time.monotonic()
    timer.start()
    assert client.next_batch() == [group(), group()]
    assert time.monotonic() - began > 0.4
    assert messages[-1] == "Successfully retrieved batch with 2 items (2 groups, 4 sequences)"
    assert client.counts["batches"] == 1 and client.counts["groups"] == 2 and client.counts["lost_batches"] == 0
    assert 0 < client.seconds["/batch"] < 5


def test_several_batches_come_newest_first(connect: Client) -> None:
    client = connect()
    post_groups(client.url, [of_version(version) for version in range(6)])
    batches = [client.take_groups(2, **TAKE) for _ in range(3)]
    assert [[taken_group.policy_version for taken_group in groups] for groups in batches] == [[5, 4], [3, 2], [1, 0]]


def test_a_large_batch_keeps_the_order_of_its_groups(connect: Client) -> None:
    client = connect({"batch_size": 300})
    posted = [group(first=100 + number) for number in range(150)]
    post_groups(client.url, posted)
    assert client.next_batch() == posted


def test_what_run_api_does_not_take_is_an_error_with_its_words(connect: Client) -> None:
    with pytest.raises(AtroposError, match=r"rejected .*/scored_data_list: 422: .*content"):
        connect()._api.request("POST", "/scored_data_list", [group(messages=[[{"role": "user"}], []]).to_json()])


def test_a_batch_with_nan_in_it_is_lost_and_counted_and_the_next_one_comes(
    api: RunApi, connect: Client, messages: list[str]
) -> None:
    client = connect()
    for posted in (group(scores=[float("nan"), 1.0]), group()):
        post(api, posted)
    timer = threading.Timer(0.3, lambda: [post(api, group()) for _ in range(2)])
    timer.start()
    assert client.next_batch() == [group(), group()]
    assert client.counts["lost_batches"] == 1 and client.counts["batches"] == 1
    assert any("may have lost a batch: /batch answered 500: Internal Server Error" in line for line in messages)
    assert client.status()["current_step"] == 2


@pytest.mark.slow
@pytest.mark.alone  # if run-api takes as long as the client waits, it loses more batches than this one
def test_a_batch_that_came_too_late_is_counted_and_the_next_one_comes(api: RunApi, connect: Client) -> None:
    """run-api answers the old request and loses the batch, or it notices that the client has closed the connection."""
    client = connect(timeout=4.0)
    for _ in range(2):
        post(api, group(first=100))
    os.kill(api.process.pid, signal.SIGSTOP)

    def go_on() -> None:
        wait_for(lambda: client.counts["lost_batches"], "a request that nobody answers")
        os.kill(api.process.pid, signal.SIGCONT)
        for _ in range(2):
            post(api, group(first=200))

    helper = threading.Thread(target=go_on)
    helper.start()
    came = client.next_batch()
    helper.join()
    first_delivered = came == [group(first=100)] * 2
    assert first_delivered or came == [group(first=200)] * 2
    assert client.counts["batches"] == 1 and client.counts["lost_batches"] >= 1
    wait_for(lambda: client.status()["current_step"] + client.status()["queue_size"] // 2 == 2, "all four groups")
    if first_delivered:
        assert client.next_batch() == [group(first=200)] * 2


def test_three_clients_share_the_batches_and_none_comes_twice(api: RunApi, connect: Client) -> None:
    connect({"batch_size": 2})
    got: list[int] = []

    def consume() -> None:
        client = connect(None, stopped=lambda: len(got) >= 300)
        with contextlib.suppress(WaitAborted):
            while True:
                got.extend(received.tokens[0][3] for received in client.next_batch())

    def produce(number: int) -> None:
        post_groups(api.url, [group(first=1000 * number + 10 * at) for at in range(100)])

    consumers = [threading.Thread(target=consume) for _ in range(3)]
    producers = [threading.Thread(target=produce, args=(number,)) for number in range(3)]
    for thread in producers + consumers:
        thread.start()
    for thread in producers + consumers:
        thread.join()
    assert sorted(got) == [1000 * number + 10 * at for number in range(3) for at in range(100)]


@pytest.mark.parametrize("compressed", [True, False])
def test_answers_are_compressed_where_that_is_asked_for(api: RunApi, connect: Client, compressed: bool) -> None:
    client = connect({"batch_size": 64}, compressed=compressed)
    post_groups(client.url, [group(8)] * 8)
    answer = client._api.send("GET", "/latest_example")
    assert answer.headers.get("Content-Encoding") == ("gzip" if compressed else None)
    assert client.next_batch() == [group(8)] * 8


def test_compressed_groups_of_an_environment_are_taken(api: RunApi, connect: Client) -> None:
    client = connect()
    body = gzip.compress(json.dumps([group().to_json()] * 2).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert api._session.post(f"{api.url}/scored_data_list", data=body, headers=headers, timeout=10).ok
    assert client.next_batch() == [group(), group()]


def test_empty_lists_and_nulls_of_environments_are_the_same(api: RunApi, connect: Client) -> None:
    client = connect()
    names = ["advantages", "ref_logprobs", "messages", "overrides", "images"]
    post(api, group().to_json() | {name: [] for name in names})
    post(api, group().to_json() | dict.fromkeys(names))
    assert client.next_batch() == [group(), group()]


# --- groups to train on --------------------------------------------------------------------------------------------


def wrong(name: str, row: int, values: list[Any]) -> Group:
    """Replace one row of a field in a group."""
    rows = list(getattr(group(), name))
    rows[row] = values
    return group(**{name: rows})


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (wrong("masks", 1, [UNTRAINED] * 3), "trajectory 1: 5 tokens, but 3 masks"),
        (wrong("masks", 0, [0, 0, 0, 1]), "trajectory 0: mask 0 at token 4"),
        (wrong("inference_logprobs", 1, [1.0, 1.0, 1.0, -0.5, 1.0]), "trajectory 1: inference log-prob 1 > 0"),
        (group(first=998), "trajectory 1: token id 1000, but the model knows only 0 to 999"),
        (group(scores=[1.0]), "scores have 1 trajectories, tokens have 2"),
        (group(generation_params={"policy_version": 10}), "weights of step 10 sampled it"),
    ],
)
def test_a_group_that_must_not_be_trained_on_is_dropped_counted_and_named(
    connect: Client, messages: list[str], bad: Group, why: str
) -> None:
    client = connect()
    post_groups(client.url, [group(first=50), bad])
    assert client.take_groups(1, **TAKE) == [group(first=50)]
    assert client.counts["rejected"] == 1
    [line] = [line for line in messages if "is not trained on" in line]
    assert why in line and ("step 10" in line or "group 1 of batch 1, of environment None" in line)


def test_a_group_that_is_too_large_is_dropped(connect: Client) -> None:
    client = connect({"batch_size": 8})
    post_groups(client.url, [group(4), group(), group()])
    assert client.take_groups(2, **TAKE) == [group(), group()]
    assert client.counts["rejected"] == 1
    assert client._last_rejection.endswith("4 trajectories, expected 2")


def test_only_the_first_rejections_are_printed(connect: Client, messages: list[str]) -> None:
    client = connect({"batch_size": 64})
    post_groups(client.url, [group(scores=[1.0])] * 31 + [group()])
    assert client.take_groups(1, **TAKE) == [group()]
    assert client.counts["rejected"] == 31
    lines = [line for line in messages if "is not trained on" in line]
    assert len(lines) == 10 and lines[-1].endswith("; further rejections are only counted")


def test_a_group_without_log_probs_ends_the_run_before_anything_is_trained_on(api: RunApi, connect: Client) -> None:
    client = connect()
    for nothing in (None, []):
        post(api, {**group().to_json(), "inference_logprobs": nothing})
    message = r"^GRPO requires inference_logprobs for importance sampling! .* in group 0 of batch 1,.*server_type vllm"
    with pytest.raises(ValueError, match=message) as error:
        client.take_groups(2, **TAKE)
    assert isinstance(error.value, NoLogprobs) and isinstance(error.value, AtroposError)


def test_what_an_environment_says_of_a_trajectory_arrives(connect: Client) -> None:
    client = connect()
    told = group(
        advantages=[[0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, -0.25, 0.75]],
        overrides=[{"set_advantage_to_zero": True}, {"temperature": 0.5}],
        generation_params={"temperature": 1.0, "policy_version": 9},
    )
    post_groups(client.url, [told, told])
    first, _ = client.take_groups(2, **TAKE)
    assert first == told
    assert [first.is_zeroed(row) for row in range(2)] == [True, False]
    assert [first.find_temperature(row) for row in range(2)] == [1.0, 0.5]


def test_parts_of_a_group_are_joined_and_what_stays_alone_is_dropped(api: RunApi, connect: Client) -> None:
    client = connect()
    env = api.register_env(group_size=2)
    answers = [post(api, group(1, first=first, env_id=env)) for first in (30, 40, 50, 60)]
    assert [answer["status"] for answer in answers] == ["buffered"] * 4
    groups = client.take_groups(2, **TAKE)
    assert [[row[3] for row in taken_group.tokens] for taken_group in groups] == [[30, 40], [50, 60]]


def test_parts_whose_others_never_come_are_dropped_and_few_are_kept(api: RunApi, connect: Client) -> None:
    client = connect()
    env = api.register_env(group_size=2)
    for number in range(12):  # each prompt is different, so no part finds a partner
        post(api, group(1, tokens=[[4, 100 + number, 16, 20]], env_id=env))
    assert client.take_groups(0, **TAKE) == []
    assert client.next_batch()[0].tokens == [[4, 108, 16, 20]]  # the newest parts; two batches of parts remain
    post(api, group(first=70, env_id=env))
    post(api, group(first=80, env_id=env))
    assert [taken_group.tokens[0][3] for taken_group in client.take_groups(2, **TAKE)] == [70, 80]
    assert len(client._parts) == 4 and client.counts["rejected"] == 4
    assert client._last_rejection.endswith("only 1 of its 2 trajectories came")


def test_groups_of_an_old_policy_are_dropped_and_counted(connect: Client) -> None:
    client = connect({"batch_size": 8})
    post_groups(client.url, [of_version(version) for version in (4, 9, 3, 5)])
    groups = client.take_groups(2, **{**TAKE, "max_staleness": 4})
    assert [taken_group.policy_version for taken_group in groups] == [9, 5]
    assert client.counts["stale"] == 2 and client.counts["rejected"] == 0
    post_groups(client.url, [of_version(version) for version in (4, 9, 3, 5)])
    assert [taken_group.policy_version for taken_group in client.take_groups(4, **TAKE)] == [9, 5, 4, 3]


def test_the_newest_groups_are_taken_and_the_others_kept_until_they_are_too_old(connect: Client) -> None:
    client = connect({"batch_size": 8})
    post_groups(client.url, [of_version(version) for version in (4, 7, 5, 6)])
    keys = {**TAKE, "max_staleness": 2}
    assert [taken_group.policy_version for taken_group in client.take_groups(1, **{**keys, "step": 7})] == [7]
    assert client.counts == {
        "batches": 1, "groups": 4, "rejected": 0, "stale": 1, "lost_batches": 0, "stolen_batches": 0,
        "unknown_version": 0,
    }  # fmt: skip
    assert [taken_group.policy_version for taken_group in client.take_groups(1, **{**keys, "step": 8})] == [6]
    post_groups(client.url, [of_version(version) for version in (9, 9, 8, 8)])
    assert [taken_group.policy_version for taken_group in client.take_groups(2, **{**keys, "step": 9})] == [9, 9]
    assert client.counts["stale"] == 2 and client.counts["batches"] == 2


def test_groups_of_an_unknown_policy_are_taken_last_and_counted(connect: Client) -> None:
    client = connect({"batch_size": 6})
    post_groups(client.url, [group(first=50), of_version(2), of_version(9)])
    keys = {**TAKE, "max_staleness": 20}
    assert [taken_group.policy_version for taken_group in client.take_groups(3, **keys)] == [9, 2, None]
    assert client.counts["unknown_version"] == 1


# --- why nothing comes ---------------------------------------------------------------------------------------------


def diagnosed(client: AtroposClient) -> list[str]:
    """Return the lines of the error at the end of a wait."""
    with pytest.raises(AtroposError) as error:
        client.take_groups(2, **TAKE)
    return str(error.value).splitlines()


def test_at_the_deadline_everything_there_is_to_see_is_said(api: RunApi, connect: Client, messages: list[str]) -> None:
    client = connect(max_wait=0.5, describe_run=lambda: ["the server is well"])
    posting, silent = api.register_env(group_size=2), api.register_env(group_size=2)
    for _ in range(3):
        post(api, group(env_id=posting))
    client.next_batch()
    began = time.monotonic()
    lines = diagnosed(client)
    assert 0.5 <= time.monotonic() - began < 5
    assert lines[0].startswith("Maximum wait time (0.5s) exceeded: the groups in the queue (1 of 2 sequences) do not")
    assert lines[1] == "Failed to retrieve batch from Atropos after all retry attempts"
    assert lines[2:5] == [
        f"  /status of run-api at {api.url}: {{'current_step': 1, 'queue_size': 1}}",
        "  /info: {'batch_size': 4, 'max_token_len': 64}",
        f"  environment {posting}: last seen {lines[4].split()[4]} s ago, 1 of its groups in the queue",
    ]
    assert lines[5] == f"  environment {silent}: it never sent a group, 0 of its groups in the queue"
    assert lines[6] == "  packing: the groups in the queue (1 of 2 sequences) do not fill a batch of 4 sequences"
    assert lines[7].startswith("  since the start: batches 1, groups 2, rejected 0")
    assert lines[8] == "  the server is well"
    assert messages[-2:] == ["Maximum wait time (0.5s) exceeded", lines[1]]


def test_a_reason_that_the_caller_knows_comes_first_until_groups_have_come(api: RunApi, connect: Client) -> None:
    """R11: the diagnosis blamed group sizes although the server had refused every request."""
    client = connect(max_wait=0.2, explain_wait=lambda: "the server refused 7 requests")
    env_id = api.register_env(group_size=2)
    assert diagnosed(client)[0] == "Maximum wait time (0.2s) exceeded: the server refused 7 requests"
    for _ in range(2):
        post(api, group(env_id=env_id))
    client.next_batch()
    assert "refused" not in diagnosed(client)[0]


@pytest.mark.parametrize(
    ("batch_size", "before", "sizes", "why"),
    [
        (4, [], [3, 3, 3, 3], "batches of 4 sequences are not a multiple of groups of 3"),
        (8, [2, 2, 2, 2], [2, 2, 2, 2, 3], "groups of 2 and of 3 sequences do not pack"),
        (8, [8], [8, 16, 8], "a group of 16 sequences does not fit into a batch of 8"),
    ],
)
def test_sizes_that_do_not_pack_are_named(
    api: RunApi, connect: Client, batch_size: int, before: list[int], sizes: list[int], why: str
) -> None:
    client = connect({"batch_size": batch_size}, max_wait=0.2)
    api.register_env(group_size=2)
    if before:
        post_groups(client.url, [group(size) for size in before])
        client.next_batch()
    post_groups(client.url, [group(size) for size in sizes])
    first, *lines = diagnosed(client)
    assert first.startswith(f"Maximum wait time (0.2s) exceeded: deadlock, since {why}")
    assert any(line.startswith(f"  packing: deadlock, since {why}") for line in lines)


def test_a_dead_environment_with_a_least_share_is_reported(api: RunApi, connect: Client) -> None:
    client = connect(max_wait=0.3)
    dead = api.register_env(group_size=2, min_batch_allocation=0.5)
    living = api.register_env(group_size=2)
    for _ in range(4):
        post(api, group(env_id=living))
    lines = diagnosed(client)
    assert f"  environment {dead}: it never sent a group, 0 of its groups in the queue" in lines
    assert lines[0].endswith(f"with a min_allocation and no groups blocks every batch: perhaps {dead}")


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ([3, 2, 2, 2, 2], "groups of 2 and of 3 sequences do not pack"),
        ([16, 8, 8], "a group of 16 sequences does not fit into a batch of 8"),
        ([3, 3, 3], "batches of 8 sequences are not a multiple of groups of 3"),
    ],
)
def test_groups_of_no_environment_are_diagnosed_by_all_their_sizes(
    api: RunApi, connect: Client, sizes: list[int], why: str
) -> None:
    """M10: run-api shows the largest size to environments only, and none has joined."""
    client = connect({"batch_size": 8}, max_wait=0.2)
    post_groups(client.url, [group(size) for size in sizes])
    first, *lines = diagnosed(client)
    assert first.startswith(f"Maximum wait time (0.2s) exceeded: deadlock, since {why}")
    assert f"  groups without an env_id: {len(sizes)} in the queue" in lines
    assert not any("no group ever came" in line for line in lines)


def test_groups_without_an_env_id_wait_for_ever_next_to_a_least_share(api: RunApi, connect: Client) -> None:
    """M10: the diagnosis blamed the environment with the least share."""
    client = connect({"batch_size": 4}, max_wait=0.2)
    sharing = api.register_env(group_size=2, min_batch_allocation=0.25)
    post_groups(client.url, [group(2) for _ in range(4)])
    first, *lines = diagnosed(client)
    assert first.endswith("while an environment has a min_allocation, run-api hands out no group without an env_id")
    assert f"  environment {sharing}: it never sent a group, 0 of its groups in the queue" in lines


def test_batches_that_another_client_took_are_counted_and_said(
    api: RunApi, connect: Client, messages: list[str]
) -> None:
    """M10: run-api counts each batch that it packs, and at an empty queue each of them went to a client."""
    client = connect()
    post_groups(client.url, [group(2) for _ in range(8)])
    client.next_batch()
    assert client.counts["stolen_batches"] == 0
    assert api.get("/batch").json()["batch"] and api.get("/batch").json()["batch"]
    client.next_batch()
    post_groups(client.url, [group(2)])
    for _ in range(2):
        assert client._request_batch() is None
    assert client.counts["stolen_batches"] == 2
    assert [line for line in messages if "another client" in line] == [
        f"another client of run-api at {api.url} took 2 batches of this training. Fix: give each trainer its own "
        "run-api"
    ]


def test_all_groups_that_wait_for_the_trainer_are_counted(api: RunApi, connect: Client) -> None:
    """M10: /status leaves out the batches that run-api has packed already."""
    client = connect()
    post_groups(client.url, [group(2) for _ in range(11)])  # five batches of two groups, plus a single group
    assert client.count_waiting_groups(2) == 11
    client.next_batch()
    assert client.status()["queue_size"] == 1 and client.count_waiting_groups(2) == 9


def test_no_environment_at_all_is_said(connect: Client) -> None:
    lines = diagnosed(connect(max_wait=0.2))
    assert lines[0] == "Maximum wait time (0.2s) exceeded: no environment has joined, and no group ever came"
    assert "  packing: the queue is empty" in lines


def test_a_stream_of_groups_that_cannot_be_trained_on_ends_at_the_deadline(api: RunApi, connect: Client) -> None:
    client = connect(max_wait=0.6)
    ends = threading.Event()

    def produce() -> None:
        while not ends.is_set():
            post(api, group(scores=[1.0]))

    producer = threading.Thread(target=produce)
    producer.start()
    try:
        lines = diagnosed(client)
    finally:
        ends.set()
        producer.join()
    assert client.counts["rejected"] > 2
    rejected = "Maximum wait time (0.6s) exceeded: groups came but were rejected, the last: group "
    assert lines[0].startswith(rejected) and "scores have 1 trajectories" in lines[0]


def test_a_run_api_that_dies_is_an_error_within_its_attempts(api: RunApi, connect: Client) -> None:
    client = connect(attempts=3, max_wait=60.0)
    threading.Timer(0.3, api.stop).start()
    began = time.monotonic()
    lines = diagnosed(client)
    assert time.monotonic() - began < 10
    assert lines[0].startswith(f"Atropos API not reachable at {api.url}: it gave no answer")
    assert lines[1] == "Failed to retrieve batch from Atropos after all retry attempts"
