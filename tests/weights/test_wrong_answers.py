"""Test wrong answers of a living server: each ends in one line that names it, or is requested again at no cost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from grpo_recipes.server.middleware import SYNCED_PATH
from grpo_recipes.server.wire import (
    COMPLETIONS_PATH,
    WORKERS_PATH,
    flatten_completions,
    pack_completions,
    unpack_completions,
)
from grpo_recipes.weights import client as client_module
from grpo_recipes.weights import connection
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.transport import BadAnswer, ServerError, check_completions
from weights.fake_server import WEIGHT, FakeServer

PROMPTS = [[1], [2]]
RESET = SYNCED_PATH
FORCED = f"{RESET}?reset_running_requests=true"
PATHS = [COMPLETIONS_PATH, "/pause?mode=keep", "/resume", WORKERS_PATH, "/grpo/activity", RESET]


def body(
    token: int = 5, logprob: float | None = -0.5, tokens: int = 1, count: int = 2, **changed: np.ndarray | None
) -> bytes:
    """An answer, some of its arrays changed or, None, left out."""
    scored = None if logprob is None else [[logprob] * tokens] * count
    arrays = flatten_completions([[token] * tokens] * count, scored)._asdict() | changed
    return save({name: array for name, array in arrays.items() if array is not None})


def int32(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


RIGHT = body()
WRONG_COMPLETIONS = [
    b"", b"{}", b"[]", RIGHT[:-1], RIGHT[:30], RIGHT + b"x", body(count=1), body(count=3), body(count=0),
    body(token=97), body(token=-1), body(tokens=0), body(tokens=5), body(logprob=float("nan")),
    body(logprob=float("inf")), body(logprob=None), body(ids=None), body(lengths=None), body(ids=int32(5, 6, 7)),
    body(lengths=int32(1, 2)), body(lengths=int32(3, -1)), body(lengths=int32(2**31 - 1, 3)),
    body(logprobs=np.array([-0.5], np.float32)), body(ids=np.array([5, 5])), body(lengths=int32(1, 1)[:, None]),
    body(ids=np.array([5.0, 5.0])), body(logprobs=np.array([-0.5, -0.5])),
]  # fmt: skip
CONTENTS = [{}, {"results": None}, {"results": []}, {"results": [7]}, {"results": [{"parameters": {}}]},
            {"results": [{"parameters": {"w": 1}, "packed": {}}]}, {"completions": "many"}]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
bodies = st.sampled_from(WRONG_COMPLETIONS) | st.sampled_from(CONTENTS).map(
    lambda content: json.dumps(content).encode()
)
answers = st.tuples(st.sampled_from([200, 400, 500, 503]), bodies | st.binary(max_size=40))
answers |= st.sampled_from([(204, b""), (200, None)])  # nothing follows a 204; None: no answer at all


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(client_module, "_QUEUE_SECONDS", 0.001)


def work(client: FileClient) -> Any:
    """A sync and a generation, as a training step has them."""
    client._held = {}
    client.update_named_params([("w", "float32", [2, 3])], iter([("w", WEIGHT)]))
    client.reset_prefix_cache()
    return client.checksum_error, client.generate(PROMPTS, n=2, max_tokens=4)


@pytest.fixture
def healthy(connect: Callable[..., FileClient], quick: None) -> tuple[FileClient, Any]:
    client = connect(seed=7, server_request_timeout=60.0)
    client.vocabulary = 97
    return client, work(client)


@pytest.fixture
def impatient(connect: Callable[..., FileClient], healthy: tuple[FileClient, Any]) -> FileClient:
    client = connect(seed=7, server_request_timeout=0.5)
    client.vocabulary = 97
    return client


@given(path=st.sampled_from(PATHS), answer=answers, times=st.sampled_from([1, 2, 50]))
@example(path=COMPLETIONS_PATH, answer=(500, b"{}"), times=1)
@example(path="/pause?mode=keep", answer=(503, b"{}"), times=1)
@example(path="/resume", answer=(503, b"{}"), times=2)
@example(path=WORKERS_PATH, answer=(500, b"{}"), times=2)
@example(path=COMPLETIONS_PATH, answer=(200, None), times=2)
@example(path=RESET, answer=(500, b"{}"), times=2)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_a_wrong_answer_costs_nothing_or_ends_in_one_line(
    healthy: tuple[FileClient, Any], impatient: FileClient, server: FakeServer,
    path: str, answer: tuple[int, bytes | None], times: int,
) -> None:  # fmt: skip
    client, right = healthy
    still_paused = path == "/resume" and answer[0] < 300  # it said it resumed, and did not: a generation waits
    client = impatient if still_paused else client
    server.wrong = {path: (*answer, times)}
    try:
        assert work(client) == right  # it was asked again, or what came was right
    except ServerError as error:
        assert times == 50 or answer[1] is None or still_paused, error
        assert "\n" not in str(error) and "vLLM server" in str(error)
    finally:
        server.wrong = {}
        server._running.set()


@pytest.mark.parametrize("content", WRONG_COMPLETIONS)
def test_completions_that_are_not_what_was_asked_for_are_never_trained_on(healthy, server, content) -> None:
    client, _ = healthy
    server.wrong = {COMPLETIONS_PATH: (200, content, 99)}
    message = (
        rf"the vLLM server at {re.escape(server.url)} gave no usable answer: .* \(in {COMPLETIONS_PATH}; log: its own\)"
    )
    with pytest.raises(BadAnswer, match=message):
        client.generate(PROMPTS, n=2, max_tokens=4)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (body(token=97), "token 97, and the model has 97"),
        (body(tokens=5), "expected 1 to 4 tokens in a completion, got 5"),
        (body(count=1), "expected 2 completions, got 1"),
        (body(logprob=float("nan")), "2 log-probs that are not finite"),
        (body(logprob=None), "not one log-prob for each token"),
        (RIGHT[:-1], "bytes that are not completions"),
        (body(ids=int32(5, 6, 7)), "expected 2 tokens by the lengths, got 3"),
        (body(ids=np.array([5, 5])), "arrays of other kinds: .*int64"),
    ],
)
def test_the_message_names_what_is_wrong(healthy, server, answer, message) -> None:
    server.wrong = {COMPLETIONS_PATH: (200, answer, 99)}
    with pytest.raises(BadAnswer, match=message):
        healthy[0].generate(PROMPTS, n=2, max_tokens=4)


def test_a_request_of_another_client_does_not_keep_the_cache_of_old_weights(healthy, server) -> None:
    client, _ = healthy
    not_emptied = (200, b'{"success": false}', 99)
    server.calls.clear()
    server.wrong = {RESET: not_emptied}
    client.reset_prefix_cache()
    assert server.calls == [FORCED]  # the fake records only the requests that it answered itself

    server.wrong = {RESET: not_emptied, FORCED: not_emptied}
    with pytest.raises(BadAnswer, match="did not empty its prefix cache, which belongs to the previous weights"):
        client.reset_prefix_cache()


def test_what_was_right_stays_right() -> None:
    right = flatten_completions([[0, 96], [5]], [[-1.0, 0.0], [float("-inf")]])
    check_completions(unpack_completions(pack_completions(right)), 2, 2, 97, 0)
    check_completions(flatten_completions([[7], [5]], None), 2, 2, None, None)


def test_the_log_of_the_server_is_named(healthy, server, tmp_path) -> None:
    (tmp_path / "plan.json").write_text('{"processes": [{"role": "server", "log": "logs/liv_vllm_x.log"}]}')
    server.wrong = {COMPLETIONS_PATH: (500, b'{"error": "out of range"}', 99)}
    with pytest.raises(BadAnswer, match=r'answered 500: {"error": "out of range"} .*log: logs/liv_vllm_x\.log'):
        healthy[0].generate(PROMPTS, n=2)


def test_another_vllm_of_this_name_is_said_to_be_one(healthy, server) -> None:
    server.wrong = {WORKERS_PATH: (500, b"'Worker' object has no attribute 'grpo_config'", 99)}
    with pytest.raises(ServerError, match=r"no attribute 'grpo_config'.* is it one that grpo launch started") as error:
        healthy[0].get_server_info()
    assert "\n" not in str(error.value)
