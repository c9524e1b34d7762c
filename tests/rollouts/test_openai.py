"""Test the client of OpenAI-compatible servers with a fake server: requests, concurrency and failures.

SGLang does not run here. ``sglang_generate.json`` has answers of its /generate in the shape that its documentation and
its source give: token ids with log-probs, and ``output_ids`` that begin with a token of the prompt, as some versions
send them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.rollouts.openai import (
    SGLANG,
    VLLM,
    CompletionClient,
    Failed,
    NoCompletion,
    Sample,
    SamplingParameters,
)

from .fake_openai import END, FakeServer

ANSWERS = json.loads(Path(__file__).with_name("sglang_generate.json").read_text())
EVERY = SamplingParameters(
    max_tokens=9, temperature=0.7, top_p=0.95, top_k=50, min_p=0.1, repetition_penalty=1.1, seed=3, stop=("</s>",)
)
PLAIN = SamplingParameters(max_tokens=9)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)


def client(server: FakeServer, **changes: Any) -> CompletionClient:
    return CompletionClient(server.url, timeout=10, **changes)


# --- on the wire ------------------------------------------------------------------------------------------------------


def test_vllm_gets_every_sampling_field_under_its_name(server: FakeServer) -> None:
    ((sample,),) = client(server, token="secret").sample([[5, 6]], 1, EVERY)
    ((path, body),) = server.asked
    assert path == "/v1/completions" and server.authorized == ["Bearer secret"] * 2
    seed = body.pop("seed")
    assert 0 <= seed < 2**31
    assert body == {
        "model": "tiny", "prompt": [5, 6], "return_token_ids": True, "logprobs": 0, "max_tokens": 9, "temperature": 0.7,
        "top_p": 0.95, "top_k": 50, "min_p": 0.1, "repetition_penalty": 1.1, "stop": ["</s>"],
    }  # fmt: skip
    assert sample == Sample([2, seed, END], [0.0, -0.5, -1.0], "said 2", "stop")


def test_sglang_gets_every_sampling_field_under_its_name(server: FakeServer) -> None:
    ((sample,),) = client(server, backend=SGLANG).sample([[5, 6]], 1, EVERY)
    ((path, body),) = server.asked
    seed = body["sampling_params"].pop("sampling_seed")
    assert path == "/generate" and 0 <= seed < 2**31
    assert body == {
        "input_ids": [5, 6], "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": 9, "temperature": 0.7, "top_p": 0.95, "top_k": 50, "min_p": 0.1,
            "repetition_penalty": 1.1, "stop": ["</s>"],
        },
    }  # fmt: skip
    assert isinstance(sample, Sample) and sample.ids == [2, seed, END]


def test_no_truncation_and_no_seed_as_each_server_writes_them(server: FakeServer) -> None:
    client(server).sample([[5]], 1, PLAIN)
    client(server, backend=SGLANG).sample([[5]], 1, PLAIN)
    ((_, vllm), (_, sglang)) = server.asked
    assert (vllm["top_k"], vllm["top_p"], vllm["min_p"], vllm["repetition_penalty"]) == (0, 1.0, 0.0, 1.0)
    assert sglang["sampling_params"]["top_k"] == -1
    assert not {"seed", "stop"} & vllm.keys() and not {"sampling_seed", "stop"} & sglang["sampling_params"].keys()


def test_a_chat_comes_back_as_token_ids_from_vllm_alone(server: FakeServer) -> None:
    ((sample,),) = client(server).sample([CHAT], 1, PLAIN)
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions" and body["messages"] == CHAT
    assert body["return_token_ids"] is True and body["logprobs"] is True
    assert isinstance(sample, Sample) and sample.ids == [1, 7, END] and sample.logprobs == [0.0, -0.5, -1.0]
    with pytest.raises(ValueError, match="render it"):
        client(server, backend=SGLANG).sample([CHAT], 1, PLAIN)


def test_the_address_may_end_with_v1(server: FakeServer) -> None:
    for url in (server.url, f"{server.url}/", f"{server.url}/v1", f"{server.url}/v1/"):
        assert CompletionClient(url).ready() == "tiny"


@pytest.mark.parametrize("kind", ["length", "stop"])
def test_what_sglang_answers_is_read(server: FakeServer, kind: str) -> None:
    server.content = ANSWERS[kind]
    ((sample,),) = client(server, backend=SGLANG).sample([[5]], 1, PLAIN)
    scored = ANSWERS[kind]["meta_info"]["output_token_logprobs"]
    assert sample == Sample([entry[1] for entry in scored], [entry[0] for entry in scored], ANSWERS[kind]["text"], kind)


# --- number and order of requests -------------------------------------------------------------------------------------


def test_at_most_batch_size_are_in_flight_and_no_fewer(server: FakeServer) -> None:
    server.seconds = 0.03
    client(server, batch_size=3).sample([[token] for token in range(10)], 2, PLAIN)
    assert server.most == 3 and len(server.asked) == 20


def test_a_completion_depends_on_its_prompt_its_number_and_the_seed_alone(server: FakeServer) -> None:
    prompts = [[5], [5], [6, 7]]
    first = client(server, batch_size=1).sample(prompts, 3, EVERY)
    assert client(server, batch_size=9).sample(prompts, 3, EVERY) == first
    assert [row[:2] for row in first] == client(server).sample(prompts, 2, EVERY)
    assert client(server).sample(prompts[:2], 3, EVERY) == first[:2]
    seeds = [sample.ids[1] for row in first for sample in row if isinstance(sample, Sample)]
    assert len(set(seeds)) == 9
    ((repeated, *_),) = client(server).sample([[5]], 3, PLAIN, seeds=[11])
    ((same,),) = client(server).sample([[5]], 1, EVERY, seeds=[11])
    assert repeated == same


def test_prompts_are_yielded_as_they_are_completed(server: FakeServer) -> None:
    completed = client(server).iterate_completed([[token] for token in range(1, 6)], 2, PLAIN)
    assert len(next(completed)[1]) == 2
    completed.close()  # and the rest is cancelled


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 503, 429, 408, 0])
def test_a_passing_failure_is_tried_again(server: FakeServer, status: int) -> None:
    server.fails = [status, status]
    ((sample,),) = client(server, attempts=3).sample([[5]], 1, PLAIN)
    assert isinstance(sample, Sample) and len(server.asked) == 3


def test_attempts_are_bounded_and_a_failure_is_no_empty_text(server: FakeServer) -> None:
    server.broken = {6}
    results = client(server, attempts=2).sample([[5], [6], [7]], 2, PLAIN)
    assert [[type(result) for result in row] for row in results] == [[Sample] * 2, [Failed] * 2, [Sample] * 2]
    assert results[1][0] == Failed("InternalServerError: Error code: 500 - told to answer 500", True)
    assert len(server.asked) == 4 + 2 * 2


def test_what_the_server_refuses_is_not_tried_again(server: FakeServer) -> None:
    server.refuses = {6}
    (_, (failed,)) = client(server).sample([[5], [6]], 1, PLAIN)
    assert isinstance(failed, Failed) and "told to answer 400" in failed.reason and not failed.lost
    assert len(server.asked) == 2


def test_a_server_that_is_gone_or_slow_is_a_failure(server: FakeServer) -> None:
    asking = client(server, attempts=2)
    asking.ready()
    asking.timeout, server.seconds = 0.2, 1.0
    ((slow,),) = asking.sample([[5]], 1, PLAIN)
    server.close()
    asking.timeout = 10
    ((gone,),) = asking.sample([[5]], 1, PLAIN)
    assert isinstance(slow, Failed) and slow.lost and "Timeout" in slow.reason
    assert isinstance(gone, Failed) and gone.lost


WITHOUT = {"choices": [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": None}]}


@pytest.mark.parametrize(
    ("backend", "content", "reason"),
    [
        (VLLM, WITHOUT, "token_ids"),
        (VLLM, {"choices": []}, "without token ids"),
        (VLLM, "no JSON", "without token ids"),
        (SGLANG, ANSWERS["abort"], "ended by 'abort'"),
        (SGLANG, ANSWERS["without log-probs"], "output_token_logprobs"),
    ],
)
def test_an_answer_without_a_whole_completion_is_a_failure(
    server: FakeServer, backend: str, content: Any, reason: str
) -> None:
    server.content = content
    ((failed,),) = client(server, backend=backend).sample([[5]], 1, PLAIN)
    assert isinstance(failed, Failed) and reason in failed.reason


def scored(ids: list[int], logprobs: list[float | None], reason: str | None = "stop") -> dict[str, Any]:
    choice = {"index": 0, "text": "", "finish_reason": reason, "token_ids": ids}
    return {"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}]}


@pytest.mark.parametrize(
    "content",
    [scored([], []), scored([1, 2], [-0.5]), scored([1], [None]), scored([1], [-0.5], None),
     scored([1], [-9999.0]), scored([1], [0.5])],  # S8: no log-prob of a sampled token
)  # fmt: skip
def test_a_completion_needs_a_log_prob_for_each_token_and_an_end(server: FakeServer, content: dict[str, Any]) -> None:
    server.content = content
    ((failed,),) = client(server).sample([[5]], 1, PLAIN)
    assert isinstance(failed, Failed)


# --- readiness and identity -------------------------------------------------------------------------------------------


def test_a_server_that_starts_is_waited_for(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grpo_recipes.rollouts.openai._POLL_SECONDS", 0.02)
    messages: list[str] = []
    server.starting = 3
    assert client(server, say=messages.append).ready() == "tiny"
    assert messages == [f"waiting for the server at {server.url}"]


def test_the_model_may_be_named_by_what_it_was_loaded_from() -> None:
    fake = FakeServer("run-1234", "adapter")
    assert client(fake, model="/models/adapter").ready() == "adapter"
    assert client(fake).ready() == "run-1234"
    fake.close()


def problem(asking: CompletionClient, wait: float = 0.0) -> str:
    with pytest.raises(ConfigError) as error:
        asking.ready(wait)
    (only,) = error.value.problems
    return str(only)


def test_what_is_not_there_is_named(server: FakeServer) -> None:
    assert f"{server.url} serves 'tiny', not 'large'" in problem(client(server, model="large"))
    server.token = "the-token"
    assert "OPENAI_API_KEY" in problem(client(server, token="another"))
    assert client(server, token="the-token").ready() == "tiny"
    server.close()
    assert "no server answers" in problem(client(server))


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "localhost:8000"},
        {"base_url": ""},
        {"backend": "hf"},
        {"batch_size": 0},
        {"attempts": 0},
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CompletionClient(**{"base_url": "http://localhost:8000", **wrong})


# --- replies in pieces ------------------------------------------------------------------------------------------------


def test_a_reply_comes_in_pieces_with_all_fields(server: FakeServer) -> None:
    assert list(client(server).stream(CHAT, EVERY, {"enable_thinking": False})) == ["hel", "lo"]
    ((path, body),) = server.asked
    assert path == "/v1/chat/completions" and body["chat_template_kwargs"] == {"enable_thinking": False}
    assert {"max_tokens": 9, "top_k": 50, "seed": 3, "messages": CHAT, "stream": True}.items() <= body.items()


def test_a_reply_that_breaks_off_is_no_reply(server: FakeServer) -> None:
    server.reply = ["hel", None]
    pieces = client(server).stream(CHAT, PLAIN)
    assert next(pieces) == "hel"
    with pytest.raises(NoCompletion, match="broke the reply off"):
        next(pieces)
    server.fails = [400]
    with pytest.raises(NoCompletion, match="told to answer 400"):
        list(client(server).stream(CHAT, PLAIN))


def test_the_client_does_without_torch() -> None:
    code = "import sys, grpo_recipes.rollouts.openai; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
