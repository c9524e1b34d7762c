"""``vllm_args``: flags of the locked vLLM, as argv words, with and without TRL's wrapper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.commands import server_command
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.keys import passed_catalogue
from grpo_recipes.recipe.vllm_flags import KEY, OWNED_FLAGS, flag_words

EXAMPLES: dict[str, Any] = {
    "bool": False, "int": 7, "float": 0.5, "str": "text", "dict": {"a": 1}, "any": {"a": [1]},
    "list[str]": ["a", "b"], "list[int]": [1, 2],
}  # fmt: skip
FLAGS = passed_catalogue()[KEY][""]


def example(name: str) -> Any:
    """Return a valid value of a flag."""
    entry = FLAGS[name]
    if choices := entry.get("choices"):
        return choices[:1] if entry["type"].startswith("list[") else choices[0]
    return EXAMPLES[entry["type"]]


def test_words_of_each_kind_of_value() -> None:
    values = {
        "max_num_batched_tokens": 4096, "enable_prefix_caching": False, "enable_expert_parallel": True,
        "compilation_config": {"mode": 0}, "cudagraph_capture_sizes": [1, 2], "kv_cache_dtype": "fp8",
        "speculative_config": {"method": "ngram"}, "block_size": None,
    }  # fmt: skip
    assert flag_words(values) == [
        "--max-num-batched-tokens", "4096", "--no-enable-prefix-caching", "--enable-expert-parallel",
        "--compilation-config", '{"mode": 0}', "--cudagraph-capture-sizes", "1", "2", "--kv-cache-dtype", "fp8",
        "--speculative-config", '{"method": "ngram"}',
    ]  # fmt: skip
    assert flag_words(None) == []


def test_the_servers_command_ends_with_them(read: Callable[..., Recipe]) -> None:
    recipe = read(vllm_args={"max_num_batched_tokens": 4096})
    assert server_command(recipe, "m", "n", "127.0.0.1", 8000, "cuda")[-2:] == ["--max-num-batched-tokens", "4096"]


def test_the_launchers_own_flags_are_not_offered(read: Callable[..., Recipe]) -> None:
    keys = {"vllm_tensor_parallel_size": 2, "model_revision": "abc", "trust_remote_code": True, "seed_server": True}
    argv = server_command(read(vllm_enforce_eager=True, **keys), "m", "n", "127.0.0.1", 8000, "cuda", 64)
    assert {word[2:].replace("-", "_") for word in argv if word.startswith("--")} <= set(OWNED_FLAGS)
    assert not set(FLAGS) & set(OWNED_FLAGS)


def test_trls_wrapper_hands_every_flag_on() -> None:
    """TRL's parser knows some of vLLM's flags, and must not take one for a prefix of its own."""
    from trl.scripts.vllm_serve import build_command, make_parser

    for name in FLAGS:
        value = example(name)
        words = flag_words({name: value})
        parser = make_parser()
        arguments, extra = parser.parse_args_and_config(["--model", "m", *words], return_remaining_strings=True)
        command = build_command(arguments, extra)
        position = len(command) - 1 - command[::-1].index(words[0])
        assert command[position : position + len(words)] == words, name


def test_a_single_gpu_would_run_no_server(planned: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="vllm_args needs a vLLM server"):
        planned(gpus=("0",), vllm_args={"max_num_batched_tokens": 4096})


def test_chunked_prefill_is_rejected_on_cpu(planned: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="remove enable_chunked_prefill"):
        planned(device="cpu", vllm_args={"enable_chunked_prefill": True})


def test_a_second_api_server_is_rejected(planned: Callable[..., Any]) -> None:
    """vLLM gives it the same port, so the middleware of one process would miss the syncs that the other serves."""
    with pytest.raises(ConfigError, match="each process would count only its own requests and syncs"):
        planned(vllm_args={"api_server_count": 2})
