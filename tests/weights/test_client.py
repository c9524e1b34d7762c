"""The bridge client against a small fake of the server: token, time limit, seeds, and when the guard looks."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from trl.generation.vllm_client import VLLMClient
from trl.trainer import grpo_trainer

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.server.middleware import SYNCED_PATH
from grpo_recipes.server.wire import WORKERS_PATH
from grpo_recipes.trainers.sampling import building_vllm_client
from grpo_recipes.weights import client as module
from grpo_recipes.weights.bridges import ServerGeneration
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.transport import BadAnswer, ServerError
from weights.fake_server import WEIGHT


def sync(client: FileClient) -> None:
    client.update_named_params([("w", "float32", [2, 3])], iter([("w", WEIGHT)]))


def test_every_request_carries_the_token_and_a_foreign_server_is_refused(connect, server, monkeypatch) -> None:
    sync(connect())
    assert server.tokens == {"Bearer the-token"}
    with pytest.raises(ServerError, match=r"serves \['this-run'\], not this run's another"):
        monkeypatch.setenv("GRPO_RUN", "another")
        connect()


def test_a_server_without_a_model_has_answered(connect, server) -> None:
    server.serves = []
    with pytest.raises(ServerError, match=r"serves \[\], not this run's this-run"):
        connect()


def test_an_answer_that_does_not_come_ends_the_call(connect, server) -> None:
    client = connect(server_request_timeout=0.3)
    server.delay = 2.0
    with pytest.raises(ServerError, match=r"did not answer /grpo/workers within 0\.3 s"):
        sync(client)


def test_with_the_guard_a_server_that_holds_something_else_is_seen(connect, server) -> None:
    client = connect()
    sync(client)
    assert client.checksum_error is None

    server.held[0, 0] += 1
    sync(client)

    assert client.checksum_error is not None and "after the sync it holds other values" in client.checksum_error


def test_the_weights_of_another_sync_are_seen_though_their_values_are_equal(connect, server) -> None:
    client = connect()
    sync(client)
    server.keeps_sync = True
    sync(client)
    assert client.checksum_error.endswith("'file' bridge: it has the weights of sync 1, and the trainer sent sync 2")


def test_a_replica_with_old_weights_is_seen_and_named(connect, server) -> None:
    server.replicas = 3
    client = connect(vllm_data_parallel_size=3)
    sync(client)
    assert client.checksum_error is None
    server.late_replicas = {2}
    sync(client)
    assert client.checksum_error.endswith(
        "bridge: replica 2: it has the weights of sync 1, and the trainer sent sync 2"
    )


@pytest.mark.parametrize("results", [[[1]], [[1], []], [[1], [1, 2]], [[1], 1], [[1]] * 3, []], ids=str)
def test_an_answer_without_a_result_of_every_worker_is_refused(connect, server, results) -> None:
    server.replicas = 2
    client = connect(vllm_data_parallel_size=2)
    server.wrong = {WORKERS_PATH: (200, json.dumps({"results": results}).encode(), 9)}
    with pytest.raises(BadAnswer, match="results of grpo_load, expected a result of all workers of 2 replicas"):
        client.call_workers("grpo_load")


def test_replicas_with_different_configurations_are_refused(connect, server) -> None:
    server.replicas = 2
    client = connect(vllm_data_parallel_size=2)
    server.wrong = {WORKERS_PATH: (200, b'{"results": [[{"a": 1}], [{"a": 2}]]}', 9)}
    with pytest.raises(ServerError, match="has workers with different configurations"):
        client.get_server_info()


def test_in_a_seeded_run_each_prompt_has_its_replica(connect, server) -> None:
    """Otherwise the load decides which completions share a forward pass, and that decides the log-probs' last bits."""
    server.replicas, prompts = 2, [[3], [4], [5]]
    connect(seed=7, vllm_data_parallel_size=2).generate(prompts, n=2)
    assert server.replica_of == {"[3]": "0", "[4]": "1", "[5]": "0"}
    connect(vllm_data_parallel_size=2).generate(prompts, n=2)
    assert set(server.replica_of.values()) == {None}


def test_a_fingerprint_is_taken_while_its_tensor_is_sent(connect, monkeypatch) -> None:
    client, sent, take = connect(), threading.Event(), module.compute_sent_fingerprint

    def take_when_sent(*args: Any) -> torch.Tensor:
        assert sent.wait(10)
        return take(*args)

    def send(metadata: Any, named_params: Any) -> None:
        for _ in named_params:
            sent.set()

    monkeypatch.setattr(module, "compute_sent_fingerprint", take_when_sent)
    monkeypatch.setattr(client, "_send", send)
    sync(client)
    assert client.checksum_error is None


def test_the_end_of_a_sync_tells_the_server_which_weights_it_has(connect, server) -> None:
    client = connect()
    sync(client)
    client.reset_prefix_cache()
    client.policy_version = 0
    client.reset_prefix_cache()
    client.policy_version = 12
    server.wrong = {SYNCED_PATH: (200, b'{"success": false}', 1)}  # another client's request has a part of it
    client.reset_prefix_cache()
    assert server.policies == [None, "0", "12", "12"]


def test_without_the_guard_nobody_looks(connect, server) -> None:
    client = connect(weight_guard=False)
    server.held[0, 0] += 1
    sync(client)
    assert client.checksum_error is None and server.methods() == ["grpo_load"]


def test_with_a_run_seed_every_prompt_of_every_generation_has_its_own(connect, server) -> None:
    client = connect(seed=7)
    seeds = {}
    for generation in ("0/0", "1/1", "0/0"):
        server.asked.clear()
        client.generation_name = generation
        client.generate([[1], [2], [3]], n=2)
        prompt_seeds = {request["prompt"][0]: request["seed"] for request in server.asked}
        assert len(set(prompt_seeds.values())) == 3
        assert seeds.setdefault(generation, prompt_seeds) == prompt_seeds
    assert not set(seeds["0/0"].values()) & set(seeds["1/1"].values())


def test_without_a_run_seed_a_prompt_is_a_request_too_and_the_seed_the_servers(connect, server) -> None:
    answer = connect().generate([[1], [2], [3]], n=2)
    assert [request["prompt"] for request in server.sampled()] == [[1], [2], [3]]
    assert not [request for request in server.asked if "seed" in request]
    assert answer == {"prompt_ids": [[1], [2], [3]], "completion_ids": [[1]] * 6, "logprobs": [[[-0.5]]] * 6}


KEYS = {"temperature": 0.7, "max_tokens": 9, "structured_outputs_regex": "[0-9]+", "generation_kwargs": {"stop": ["x"]}}


@pytest.mark.parametrize("keys", [{}, KEYS, {"generation_kwargs": {"top_p": 0.5, "structured_outputs": {"json": {}}}}])
def test_the_server_is_asked_for_what_trl_asks_for(connect, server, keys) -> None:
    client = connect()
    client.generate([[1, 2]], n=3, **keys)
    (request,) = server.asked
    server.asked.clear()
    with pytest.raises(BadAnswer):  # the answer is not in TRL's format
        VLLMClient.generate(client, [[1, 2]], n=3, **keys)
    (trl_request,) = server.asked
    answered = {"return_token_ids", "return_tokens_as_token_ids"}
    assert request == {name: value for name, value in trl_request.items() if name not in answered} | {"prompt": [1, 2]}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 42),  # seeded by default on CPU
        ({"seed_server": False}, None),
        ({"seed_server": True, "seed": 3}, 3),
    ],
)
def test_the_recipe_and_its_seed_reach_the_client(tmp_path, keys, expected) -> None:
    args = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, use_vllm=True, weight_sync="file", report_to="none", **keys
    )
    stop = StopRequest(tmp_path)
    with building_vllm_client(args, tmp_path, stop):
        built = grpo_trainer.VLLMGeneration
    assert built.func is ServerGeneration and built.keywords["client"] is FileClient
    assert built.keywords["settings"] == {"args": args, "run_dir": tmp_path, "seed": expected, "stop": stop}
