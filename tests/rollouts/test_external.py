"""Test the checks of an external server before training, and the client's actions after a sync."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import Recipe
from grpo_recipes.rollouts.external import ExternalClient, connect
from grpo_recipes.weights.transport import BadAnswer

from .fake_openai import FakeServer

RIGHT = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}
RAW = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}


def asked(monkeypatch: pytest.MonkeyPatch, read: Callable[..., Recipe], server_info: Any, **keys: Any) -> list[str]:
    """Connect to a fake server of the recipe's model with this /server_info; return the requested paths."""
    server, addresses = FakeServer("the/model"), list[str]()

    def get(_: Any, url: str, **__: Any) -> Any:
        addresses.append(url.removeprefix(server.url))
        if isinstance(server_info, Exception):
            raise server_info
        return SimpleNamespace(ok=server_info is not None, json=lambda: server_info)

    monkeypatch.setattr(requests.Session, "get", get)
    try:
        recipe = read(**{"model_name_or_path": "the/model", "vllm_server_base_url": server.url, **keys})
        connect(recipe, "/fetched", {})
    finally:
        server.close()
    return addresses


def test_a_server_that_takes_weights_is_taken(monkeypatch: pytest.MonkeyPatch, read: Callable[..., Recipe]) -> None:
    assert asked(monkeypatch, read, RIGHT, temperature=0.7) == ["/server_info"]
    assert asked(monkeypatch, read, RAW) == ["/server_info"]
    off = {"temperature": 0.7, "vllm_importance_sampling_correction": False}
    assert asked(monkeypatch, read, RAW, **off) == ["/server_info"]
    assert asked(monkeypatch, read, None, server_backend="sglang_server") == []


@pytest.mark.parametrize(
    ("server_info", "message"),
    [
        (
            None,
            "can't load new weights. Fix: start it with VLLM_SERVER_DEV_MODE=1",
        ),
        (RAW, "are raw_logprobs, without the temperature. Fix: start it with --logprobs-mode processed_logprobs"),
        ({"vllm_config": None}, "does not say how it was started (TypeError"),
        ({}, "does not say how it was started (KeyError"),
        (requests.ConnectionError("gone"), "does not say how it was started (ConnectionError: gone)"),
    ],
)
def test_another_server_is_refused_with_the_edit(
    monkeypatch: pytest.MonkeyPatch, read: Callable[..., Recipe], server_info: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        asked(monkeypatch, read, server_info, temperature=0.7)
    (problem,) = refused.value.problems
    assert message in str(problem) and "recipe.yaml:" in problem.where


def test_another_model_is_refused_at_the_key(monkeypatch: pytest.MonkeyPatch, read: Callable[..., Recipe]) -> None:
    with pytest.raises(ConfigError, match="serves 'the/model', not 'another/model'") as refused:
        asked(monkeypatch, read, RIGHT, model_name_or_path="another/model")
    assert "recipe.yaml:" in refused.value.problems[0].where


def client(answers: list[bool], backend: str = "vllm_server") -> tuple[Any, list[str]]:
    """Return a client that gets these answers when it empties the cache, and the list of its requested paths."""
    external, paths = ExternalClient.__new__(ExternalClient), list[str]()
    external._args, external.base_url, external.policy_version = SimpleNamespace(server_backend=backend), "", None
    external.stop = SimpleNamespace(may_cut=False)

    def post(path: str, **_: Any) -> dict[str, Any]:
        paths.append(path)
        return {"success": answers[min(len(paths), len(answers)) - 1]}

    external._post, external._make_bad_answer, external._stopping = (
        post,
        lambda path, message: BadAnswer(message),
        False,
    )
    return external, paths


def test_a_cache_that_is_not_emptied_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM answers 200 although a request of another client holds the cache of the previous weights."""
    monkeypatch.setattr("grpo_recipes.weights.connection._RETRY_SECONDS", 0.0)
    emptied, paths = client([False, True])
    emptied.reset_prefix_cache()
    assert paths == ["/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true"]
    not_emptied, _ = client([False])
    with pytest.raises(BadAnswer, match="did not empty its prefix cache"):
        not_emptied.reset_prefix_cache()
    sglang, paths = client([False], "sglang_server")
    sglang.reset_prefix_cache()  # with the load
    assert paths == []
