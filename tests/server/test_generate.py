"""R11: ``/generate`` accepts the requests of atroposlib's ``VLLMServer`` and answers in its format."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from grpo_recipes.errors import ConfigError
from grpo_recipes.extensions.atropos.generate_endpoint import _ServingGroups, read_request

PROMPT = {"prompt_token_ids": [5, 6, 7]}
SAMPLING = {"temperature": 0.7, "top_p": 0.9}


def read(longest: int = 64, sampling: dict[str, Any] = SAMPLING, **body: Any) -> Any:
    return read_request({"prompt": PROMPT, "logprobs": 0, **body}, longest, sampling)


def test_a_missing_parameter_has_the_recipes_value_and_a_neutral_one_without() -> None:
    request = read(n=4, max_tokens=8, stop=["x"], top_k=None)
    assert (request.prompt, request.n, request.logprobs, request.stop) == ([5, 6, 7], 4, 0, ["x"])
    assert (request.temperature, request.top_p, request.top_k, request.min_p) == (0.7, 0.9, 0, 0.0)
    assert read(temperature=0.0).temperature == 0.0 and read(sampling={}).temperature == 1.0
    assert read(sampling={}).repetition_penalty == 1.0  # not from the model's generation config


@pytest.mark.parametrize(("max_tokens", "most"), [(8, 8), (61, 61), (2048, 61), (None, 61), ("missing", 16)])
def test_max_tokens_is_lowered_to_the_room_that_the_prompt_leaves(max_tokens: Any, most: int) -> None:
    body = {} if max_tokens == "missing" else {"max_tokens": max_tokens}
    assert read(**body).max_tokens == most


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": "text"}, "the prompt must be a list of token ids"),
        ({"prompt": {"prompt_token_ids": []}}, "the prompt must be a list of token ids"),
        ({"prompt": {"prompt_token_ids": [1.5]}}, "the prompt must be a list of token ids"),
        ({"prompt": {"prompt_token_ids": [True]}}, "the prompt must be a list of token ids"),
        ({"prompt": {"prompt_token_ids": [1] * 64}}, "the prompt has 64 tokens and leaves no room for a completion"),
        ({"temprature": 1.0}, "unknown parameter 'temprature'"),
        ({"model": "another"}, "unknown parameter 'model'"),
        ({"stream": True}, "unknown parameter 'stream'"),
        ({"n": "many"}, "n: "),
        ({"max_tokens": "many"}, "max_tokens: "),
    ],
)
def test_a_wrong_request_is_answered_with_its_fault(body: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**body)
    assert message in str(error.value) and "Fix: " in str(error.value)


def test_the_sampled_token_comes_first_and_json_has_a_number_for_each() -> None:
    """VLLMServer takes the first key of each position for the sampled token."""
    entry = lambda logprob: SimpleNamespace(logprob=logprob)  # noqa: E731
    output = SimpleNamespace(
        text="ab", token_ids=[3, 4], finish_reason="stop",
        logprobs=[{9: entry(-0.1), 3: entry(-2.5)}, {4: entry(float("-inf"))}],
    )  # fmt: skip
    result = SimpleNamespace(outputs=[output], prompt_token_ids=[5, 6], prompt_logprobs=[None, {6: entry(-1.0)}])
    serving = object.__new__(_ServingGroups)
    answer = serving.request_output_to_completion_response([result], read(prompt_logprobs=1), "id")  # type: ignore
    assert [list(position[0].items()) for position in answer["logprobs"][0]] == [[(3, -2.5), (9, -0.1)], [(4, -9999.0)]]
    assert (answer["token_ids"], answer["finish_reasons"], answer["text"]) == ([[3, 4]], ["stop"], ["ab"])
    assert answer["prompt_logprobs"] == [{}, {6: -1.0}] and answer["prompt_token_ids"] == [5, 6]
