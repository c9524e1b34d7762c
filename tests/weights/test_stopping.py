"""A stop request while rank 0 waits for the server: it gives up at once, and a lost server is not a failure."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes.runs.rundir import stop_file
from grpo_recipes.runs.stop_request import StopRequest
from grpo_recipes.trainers.checkpoints import Preemption
from grpo_recipes.weights import client as client_module
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.transport import ServerLost
from weights.fake_server import WEIGHT

PROMPTS = [[1], [2], [3]]
PLACEHOLDER = [[0]] * 6  # a token for each of two completions


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def stopping(connect, run_dir: Path, monkeypatch) -> Iterator[Callable[..., FileClient]]:
    """``stopping(KEY=VALUE)``: a client that a stop request in ``run_dir`` interrupts."""
    monkeypatch.setattr(client_module, "_SIGNAL_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "_ABORT_SECONDS", 0.3)
    stop = StopRequest(run_dir)

    def connected(**keys: Any) -> FileClient:
        client = connect(stop=stop, **keys)
        monkeypatch.setattr(client_module, "QUICK_SECONDS", 0.3)  # not before: a busy machine may connect more slowly
        return client

    with stop.cutting_short():
        yield connected


def ask(run_dir: Path, seconds: float = 0.2) -> None:
    threading.Timer(seconds, stop_file(run_dir).touch).start()


def send(client: FileClient) -> list[Any]:
    """Sync the weights; return the tensors that are left to gather."""
    tensors = iter([("w", WEIGHT), ("b", torch.zeros(2)), ("c", torch.zeros(2))])
    client.update_named_params([("w", "float32", [2, 3])], tensors)
    return list(tensors)


@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("way", ["queued", "in flight", "hung", "not aborted"])
def test_a_generation_is_given_up(stopping, server, run_dir, seed, way) -> None:
    client = stopping(seed=seed, server_request_timeout=2.0)
    if way == "queued":
        server.under_way = -1  # the count that is waited for never comes
        client.pause("keep")
    elif way == "in flight":
        server.sampling_seconds = 1.5
    else:
        server.delay = {"hung": 3.0, "not aborted": 1.0}[way]
    if way == "not aborted":
        server.refuses.add("/pause?mode=abort")  # TRL raises a bare Exception for it
    ask(run_dir)
    threads = set(threading.enumerate())
    start = time.monotonic()
    answer = client.generate(PROMPTS, n=2)
    assert time.monotonic() - start < 2
    assert answer["prompt_ids"] == PROMPTS and len(answer["logprobs"]) == 6
    assert answer["completion_ids"] == PLACEHOLDER
    # The interpreter waits for no thread that still waits for the server.
    assert all(thread.daemon for thread in set(threading.enumerate()) - threads)
    if way not in ("hung", "not aborted"):
        assert "/pause?mode=abort" in server.calls and server.calls[-1] == "/resume"


def test_after_a_request_nothing_more_is_sampled(stopping, server, run_dir) -> None:
    client = stopping(seed=7)
    stop_file(run_dir).touch()
    assert client.generate(PROMPTS, n=2)["completion_ids"] == PLACEHOLDER
    assert server.calls == []


# A request to the server, and its return value when the run stops: the other ranks gather every parameter.
CALLS = {
    "send": (send, []),
    "reset": (lambda client: client.reset_prefix_cache(), None),
    "generate": (lambda client: client.generate(PROMPTS, n=2)["completion_ids"], PLACEHOLDER),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failure_without_a_request_is_a_failure(stopping, server, call) -> None:
    client = stopping()
    server.close()
    with pytest.raises(ServerLost, match="lost the connection"):
        CALLS[call][0](client)


@pytest.mark.parametrize("call", CALLS)
def test_outside_a_training_a_failure_is_reported_at_once(connect, server, run_dir, monkeypatch, call) -> None:
    monkeypatch.setattr(client_module, "_SIGNAL_SECONDS", 60.0)
    client = connect(stop=StopRequest(run_dir))
    server.close()
    start = time.monotonic()
    with pytest.raises(ServerLost, match="lost the connection"):
        CALLS[call][0](client)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_lost_with_the_request_is_no_failure(stopping, server, run_dir, call) -> None:
    client = stopping()
    server.close()
    ask(run_dir, 0.1)
    assert CALLS[call][0](client) == CALLS[call][1]


@pytest.mark.parametrize("call", CALLS)
def test_a_wait_for_another_server_ends(stopping, server, run_dir, tmp_path, call) -> None:
    state = tmp_path / "processes" / "server_state.json"
    state.write_text(json.dumps({"epoch": 1, "state": "ready"}))
    client = stopping(vllm_server_timeout=60.0)
    server.close()
    state.write_text(json.dumps({"epoch": 2, "state": "starting"}))
    ask(run_dir)
    start = time.monotonic()
    assert CALLS[call][0](client) == CALLS[call][1]
    assert time.monotonic() - start < 3


@pytest.mark.parametrize("training", [True, False])
def test_a_trainer_that_samples_in_a_training_makes_the_client_stop(connect, run_dir, training) -> None:
    trainer = SimpleNamespace(
        is_in_train=training,
        control=SimpleNamespace(should_training_stop=False),
        state=SimpleNamespace(global_step=0, max_steps=2),
        model_wrapped=None,
        accelerator=SimpleNamespace(unwrap_model=lambda _: SimpleNamespace(generate=lambda: None)),
    )
    preemption = Preemption(trainer, None, StopRequest(run_dir))
    client = connect(stop=preemption.stop)
    stop_file(run_dir).touch()
    assert not client.is_stopping()
    with preemption.sampling():
        assert client.is_stopping() == training


def test_outside_a_training_a_request_does_not_touch_the_server(connect, server, run_dir) -> None:
    client = connect(stop=StopRequest(run_dir))
    stop_file(run_dir).touch()
    assert client.generate([[1]], n=2)["completion_ids"] == [[1], [1]]
    assert "/pause?mode=abort" not in server.calls
