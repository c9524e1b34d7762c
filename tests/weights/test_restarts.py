"""Test a server that is lost and restarted by the launcher, with a fake server and its state file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_recipes.recipe.registry import SYNC_METHODS
from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.server.wire import COMPLETIONS_PATH, WORKERS_PATH
from grpo_recipes.trainers import rank
from grpo_recipes.weights import client as client_module
from grpo_recipes.weights.bridges import CLIENTS
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.guard import WeightsDiffer
from grpo_recipes.weights.sampling import sampling_seed
from grpo_recipes.weights.shared import SharedClient
from grpo_recipes.weights.transport import ServerError, ServerLost
from weights.fake_server import WEIGHT, FakeServer

pytestmark = pytest.mark.alone

PROMPTS = [[1], [2]]


@pytest.fixture
def state(tmp_path: Path, connect) -> Callable[..., None]:
    """``state(epoch, state)``: write the launcher's state file; a first server is ready."""

    def write(epoch: int, name: str) -> None:
        partial = tmp_path / "processes" / "server_state.partial"
        partial.write_text(json.dumps({"epoch": epoch, "state": name}))
        partial.replace(tmp_path / "processes" / "server_state.json")

    write(1, "ready")
    return write


@pytest.fixture
def restart(server: FakeServer, state: Callable[..., None]) -> Iterator[Callable[..., FakeServer]]:
    """``restart(after=seconds, loads=weights)``: kill the server; the next has its port and other weights."""
    replacements: list[FakeServer] = []

    def restart_it(after: float = 0.0, loads: torch.Tensor = WEIGHT) -> FakeServer:
        server.close()
        state(2, "starting")
        time.sleep(after)
        other = FakeServer(int(server.url.rsplit(":", 1)[1]))
        other.held, other.loads = WEIGHT + 1, loads
        replacements.append(other)
        state(2, "ready")
        return other

    yield restart_it
    for other in replacements:
        other.close()


def sync(client: FileClient) -> None:
    client.update_named_params([("w", "float32", [2, 3])], iter([("w", WEIGHT)]))


def later(call: Callable[[], Any], seconds: float = 0.3) -> threading.Thread:
    timer = threading.Timer(seconds, call)
    timer.start()
    return timer


def test_a_server_that_was_restarted_unseen_is_given_the_weights_before_it_samples(connect, state, restart) -> None:
    client = connect(seed=7)
    sync(client)
    before = client.generate(PROMPTS, n=2)
    other = restart()

    assert client.generate(PROMPTS, n=2) == before
    assert other.methods() == ["grpo_load", "grpo_weights"]
    assert other.asked[0]["method"] == "grpo_load" and client.checksum_error is None


def test_a_generation_that_a_death_cuts_is_repeated_with_the_same_seeds(connect, state, server, restart) -> None:
    client = connect(seed=7)
    sync(client)
    server.loses[COMPLETIONS_PATH] = 99
    server.refuses.add("/health")
    replacements: list[FakeServer] = []
    death = later(lambda: replacements.append(restart(after=0.3)))
    client.generate(PROMPTS, n=2)
    death.join()

    seeds = [sampling_seed(7, "", prompt) for prompt in (0, 1)]
    assert [request["seed"] for request in replacements[0].sampled()] == seeds
    before = {request["seed"] for request in server.sampled()}
    assert before and before <= set(seeds)  # once a request has failed, those that were not sent yet are not


def test_a_weight_load_that_a_death_cuts_is_repeated(connect, state, server, restart) -> None:
    client = connect()
    client._held = {"parameters": {"w": [0, "float32"]}, "packed": {}}
    server.loses[WORKERS_PATH] = 2
    server.refuses.add("/health")
    replacements: list[FakeServer] = []
    death = later(lambda: replacements.append(restart()))
    sync(client)
    death.join()
    # The new server gets the weights before the request is repeated, and the repeated request is the load.
    assert replacements[0].methods().count("grpo_load") == 2 and client.checksum_error is None
    assert torch.equal(replacements[0].held, WEIGHT)


def test_a_restarted_server_learns_which_weights_it_was_given_while_others_wait_for_it(connect, state, restart) -> None:
    client = connect()
    client.policy_version = 5
    sync(client)
    client.reset_prefix_cache()
    client.policy_version = 6  # the number of the next sync, which has not happened yet
    other = restart()
    client.reconnect()
    assert other.methods() == ["grpo_load", "grpo_weights"] and other.policies == ["5"]

    client.reconnect()
    assert other.policies == ["5"]  # the server was not restarted again

    sync(client)
    client.reset_prefix_cache()
    assert other.policies == ["5", "6"]


def test_a_restart_in_the_middle_of_the_end_of_a_sync_is_told_of_that_sync(connect, state, server, restart) -> None:
    client = connect()
    sync(client)
    client.policy_version = 3
    other = restart()
    client.reset_prefix_cache()
    assert other.methods() == ["grpo_load", "grpo_weights"] and other.policies == ["3"] and server.policies == []


def test_a_restarted_server_that_holds_other_weights_ends_the_run(connect, state, restart) -> None:
    client = connect(seed=7)
    sync(client)
    restart(loads=WEIGHT * 2)
    with pytest.raises(WeightsDiffer, match="other values than the trainer in w; this was the load into a restarted"):
        client.generate(PROMPTS, n=2)


def test_before_the_first_sync_a_restarted_server_is_given_nothing(connect, state, restart) -> None:
    client = connect(seed=7)
    other = restart()
    client.generate(PROMPTS, n=2)
    assert other.methods() == []


def test_a_server_that_hangs_is_repeated_to_the_next(connect, state, server, restart) -> None:
    client = connect(weight_guard=False, server_request_timeout=0.3)
    server.delay = 1.0
    replacements: list[FakeServer] = []
    death = later(lambda: replacements.append(restart()), 0.5)
    client.generate(PROMPTS, n=2)
    death.join()
    assert len(replacements[0].sampled()) == len(PROMPTS)


def test_a_launcher_that_gives_up_ends_the_wait(connect, state, server) -> None:
    client = connect()
    server.close()
    later(lambda: state(1, "gone"))
    start = time.monotonic()
    with pytest.raises(ServerError, match="is gone and is not started again"):
        client.generate(PROMPTS, n=2)
    assert time.monotonic() - start < 3


def test_a_loss_that_the_launcher_does_not_see_ends_the_wait(connect, state, server, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_NOTICE_SECONDS", 0.3)
    client = connect()
    server.close()
    with pytest.raises(ServerLost, match="lost the connection"):
        client.generate(PROMPTS, n=2)


def test_a_server_that_takes_too_long_to_come_back_ends_the_wait(connect, state, server, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "_MARGIN_SECONDS", 0.0)
    client = connect(vllm_server_timeout=0.3)
    state(2, "starting")
    with pytest.raises(ServerError, match=r"not ready again after 0\.3 s"):
        client.generate(PROMPTS, n=2)


def test_trainers_wait_for_the_first_server(tmp_path, state, monkeypatch) -> None:
    monkeypatch.setattr(rank, "_LATE_SECONDS", 0.0)
    stop = StopRequest(tmp_path)
    state(1, "starting")
    with pytest.raises(ServerError, match=r"not ready after 0\.3 s"):
        rank.wait_for_first_server(tmp_path, 0.3, stop)
    ready, start = later(lambda: state(1, "ready")), time.monotonic()
    rank.wait_for_first_server(tmp_path, 30.0, stop)
    assert not ready.is_alive() and time.monotonic() - start < 3
    state(1, "gone")
    with pytest.raises(ServerError, match="the vLLM server is gone; see its log"):
        rank.wait_for_first_server(tmp_path, 30.0, stop)
    state(1, "starting")
    stop_file(tmp_path).touch()
    rank.wait_for_first_server(tmp_path, 30.0, stop)
    assert time.monotonic() - start < 4


def test_without_a_file_of_its_state_a_lost_server_is_an_error_at_once(connect, server) -> None:
    client = connect()
    server.close()
    start = time.monotonic()
    with pytest.raises(ServerLost):
        client.generate(PROMPTS, n=2)
    assert time.monotonic() - start < 2


def test_the_launcher_knows_which_bridges_can_go_on() -> None:
    able = {name for name, bridge in CLIENTS.items() if "_resend" in vars(bridge)}
    assert able == {name for name, bridge in SYNC_METHODS.items() if "cpu" in bridge.reconnects}


def test_on_gpus_nothing_is_read_of_memory_that_went_with_its_server(connect, state, server) -> None:
    client = connect(client=SharedClient)
    client._args.use_cpu = False
    server.close()
    with pytest.raises(ServerLost):
        client.generate(PROMPTS, n=2)


def test_a_file_of_its_state_that_vanishes_ends_the_wait(connect, state, server, tmp_path) -> None:
    client = connect()
    server.close()
    gone = later((tmp_path / "processes" / "server_state.json").unlink)
    start = time.monotonic()
    with pytest.raises(ServerLost):
        client.generate(PROMPTS, n=2)
    gone.join()
    assert time.monotonic() - start < 5
