"""A real server: our compact answer has the ids and log-probs of vLLM's answer, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import requests
from one_by_one import Bench
from safetensors.numpy import load
from trl.generation.vllm_client import VLLMClient

from grpo_recipes.server.wire import COMPLETIONS_PATH

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [6, 12]]
COMPLETIONS, TOKENS = 4, 40
SAMPLING = {"n": COMPLETIONS, "max_tokens": TOKENS, "temperature": 0.7, "top_p": 0.9}
STOPPED = {"max_tokens": TOKENS, "generation_kwargs": {"stop": ["<"], "ignore_eos": True}}


class FakeWatcher:
    """Records every answer of a session."""

    def __init__(self, session: requests.Session):
        self.answers: list[requests.Response] = []
        session.hooks["response"].append(lambda answer, *_, **__: self.answers.append(answer))

    def of(self, path: str) -> list[requests.Response]:
        return [answer for answer in self.answers if answer.request.path_url == path]


def generate_twice(client: Any, prompt: list[int], seed: int, **sampling: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Generate the same completions through our endpoint and TRL's client, each with an empty cache."""
    extra = {"seed": seed, **sampling.pop("generation_kwargs", {})}
    client.reset_prefix_cache()
    arrays = client.generate_seeded([prompt], [seed], generation_kwargs=extra, **sampling)
    client.reset_prefix_cache()
    return arrays, VLLMClient.generate(client, [prompt], generation_kwargs=extra, **sampling)


@pytest.mark.slow
def test_ids_and_one_log_prob_a_token_travel_and_are_those_of_vllms_own_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path).joined(monkeypatch)
    with bench.server() as url:
        client = bench.client(url, seed=None)
        watcher = FakeWatcher(client.session)
        for seed, prompt in enumerate(PROMPTS):
            answer, trl_answer = generate_twice(client, prompt, seed, **SAMPLING)
            assert answer == {name: trl_answer[name] for name in answer}  # log-probs as floats: to the last bit
        answer, trl_answer = generate_twice(client, PROMPTS[0], 5, **STOPPED)  # the server searches for a stop text
        assert answer["completion_ids"] == trl_answer["completion_ids"] and len(answer["completion_ids"][0]) < TOKENS

        for response, trl_response in zip(watcher.of(COMPLETIONS_PATH), watcher.of("/v1/completions"), strict=True):
            arrays, choices = load(response.content), json.loads(trl_response.content)["choices"]
            tokens = sum(len(choice["token_ids"]) for choice in choices)
            assert {name: array.shape for name, array in arrays.items()} == {
                "lengths": (len(choices),), "ids": (tokens,), "logprobs": (tokens,)
            }  # fmt: skip
            assert len(response.content) <= 8 * tokens + 4 * len(choices) + 300

        client.generate_seeded(PROMPTS, [1, 2, 3], logprobs=None, **SAMPLING)
        assert all("logprobs" not in load(answer.content) for answer in watcher.of(COMPLETIONS_PATH)[-len(PROMPTS) :])
        wrong = client.session.post(f"{url}{COMPLETIONS_PATH}", json={"model": "another", "prompt": [5]})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (404, "NotFoundError")
        assert requests.post(f"{url}{COMPLETIONS_PATH}", json={"prompt": [5]}, timeout=10).status_code == 401
