"""Whatever a living server answers ends in one line that names it, or is asked again and costs nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo_recipes.weights import client as client_module
from grpo_recipes.weights.file import FileClient
from grpo_recipes.weights.transport import BadAnswer, ServerError, need_completions
from weights.fake_server import WEIGHT, FakeServer

PROMPTS = [[1], [2]]
RESET = "/reset_prefix_cache"
FORCED = f"{RESET}?reset_running_requests=true"
PATHS = ["/v1/completions", "/pause?mode=keep", "/resume", "/collective_rpc", "/grpo/activity", RESET]


def choices(token: Any = 5, logprob: Any = -0.5, tokens: int = 1, count: int = 2, **changed: Any) -> dict[str, Any]:
    logprobs = {"tokens": [f"token_id:{token}"] * tokens, "token_logprobs": [logprob] * tokens}
    logprobs["top_logprobs"] = [None] * tokens
    one = {"prompt_token_ids": [1], "token_ids": [token] * tokens, "logprobs": logprobs, **changed}
    return {"choices": [one] * count}


WRONG_COMPLETIONS = [
    {}, {"choices": None}, {"choices": []}, {"choices": [{}]}, {"choices": [7]}, choices(count=1), choices(count=3),
    choices(token=97), choices(token=-1), choices(token="5"), choices(token=None), choices(tokens=0), choices(tokens=5),
    choices(logprob=float("nan")), choices(logprob=float("inf")), choices(logprob=None), choices(logprob="-0.5"),
    choices(logprobs=None), choices(logprobs={}), choices(logprobs={"tokens": []}), choices(token_ids=None),
    choices(token_ids=[5, 6]),
]  # fmt: skip
CONTENTS = [{}, {"results": None}, {"results": []}, {"results": [7]}, {"results": [{"parameters": {}}]},
            {"results": [{"parameters": {"w": 1}, "packed": {}}]}, {"completions": "many"}]  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
bodies = st.sampled_from([*WRONG_COMPLETIONS, *CONTENTS]).map(lambda one: json.dumps(one).encode())
answers = st.tuples(st.sampled_from([200, 400, 500, 503]), bodies | st.binary(max_size=40))
answers |= st.sampled_from([(204, b""), (200, None)])  # nothing follows a 204; None: no answer at all


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_AGAIN_SECONDS", 0.001)
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
@example(path="/v1/completions", answer=(500, b"{}"), times=1)
@example(path="/pause?mode=keep", answer=(503, b"{}"), times=1)
@example(path="/resume", answer=(503, b"{}"), times=2)
@example(path="/collective_rpc", answer=(500, b"{}"), times=2)
@example(path="/v1/completions", answer=(200, None), times=2)
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
    server.wrong = {"/v1/completions": (200, json.dumps(content).encode(), 99)}
    said = rf"the vLLM server at {re.escape(server.url)} gave no usable answer: .* \(in /v1/completions; log: its own\)"
    with pytest.raises(BadAnswer, match=said):
        client.generate(PROMPTS, n=2, max_tokens=4)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (choices(token=97), "token 97, and the model has 97"),
        (choices(tokens=5), "a completion of 5 tokens where at most 4 were asked for"),
        (choices(count=1), "1 completions where 2 were asked for"),
        (choices(logprob=float("nan")), "2 log-probs that are not finite"),
        (choices(logprobs=None), "not one log-prob for each token"),
    ],
)
def test_the_message_names_what_is_wrong(healthy, server, answer, said) -> None:
    server.wrong = {"/v1/completions": (200, json.dumps(answer).encode(), 99)}
    with pytest.raises(BadAnswer, match=said):
        healthy[0].generate(PROMPTS, n=2, max_tokens=4)


def test_a_request_of_another_client_does_not_keep_the_cache_of_old_weights(healthy, server) -> None:
    client, _ = healthy
    kept = (200, b'{"success": false}', 99)
    server.calls.clear()
    server.wrong = {RESET: kept}
    client.reset_prefix_cache()
    assert server.calls == [FORCED]  # the fake records what it answered itself

    server.wrong = {RESET: kept, FORCED: kept}
    with pytest.raises(BadAnswer, match="did not empty its prefix cache, which is of the weights before"):
        client.reset_prefix_cache()


def test_what_was_right_stays_right() -> None:
    need_completions({"completion_ids": [[0, 96], [5]], "logprobs": [[[-1.0], [0.0]], [[-9999.0]]]}, 2, 2, 97, 0)
    need_completions({"completion_ids": [[7], [5]], "logprobs": None}, 2, 2, None, None)


def test_the_log_of_the_server_is_named(healthy, server, tmp_path) -> None:
    (tmp_path / "plan.json").write_text('{"processes": [{"role": "server", "log": "logs/liv_vllm_x.log"}]}')
    server.wrong = {"/v1/completions": (500, b'{"error": "out of range"}', 99)}
    with pytest.raises(BadAnswer, match=r'answered 500: {"error": "out of range"} .*log: logs/liv_vllm_x\.log'):
        healthy[0].generate(PROMPTS, n=2)


def test_another_vllm_of_this_name_is_said_to_be_one(healthy, server) -> None:
    server.wrong = {"/collective_rpc": (500, b"'Worker' object has no attribute 'grpo_config'", 99)}
    with pytest.raises(ServerError, match=r"no attribute 'grpo_config'.* is it one that grpo launch started") as error:
        healthy[0].get_server_info()
    assert "\n" not in str(error.value)
