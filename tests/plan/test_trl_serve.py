"""Every flag that the launcher passes to `trl vllm-serve` reaches vLLM through TRL's parser."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable

import pytest

from grpo_recipes.plan.commands import server_command
from grpo_recipes.recipe import Recipe


def test_trl_hands_every_flag_on_to_vllm(read: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.scripts.vllm_serve import build_command, make_parser

    recipe = read(dtype="bfloat16", vllm_tensor_parallel_size=2, model_revision="abc", trust_remote_code=True)
    equivalent = server_command(recipe, "a/model", "served", "127.0.0.1", 8001, "cuda")
    installed = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.31.0" if name == "vllm" else installed(name))
    argv = server_command(recipe, "a/model", "served", "127.0.0.1", 8001, "cuda")
    assert argv[1] == "vllm-serve"

    arguments, remaining = make_parser().parse_args_and_config(argv[2:], return_remaining_strings=True)
    command = build_command(arguments, remaining)

    assert command[command.index("serve") + 1] == "a/model"
    flags = equivalent[equivalent.index("--model") + 2 :]
    for flag, value in zip(flags, [*flags[1:], "--"], strict=True):
        if flag.startswith("--"):
            assert flag in command, flag
            if not value.startswith("--"):
                assert (flag, value) in itertools.pairwise(command)  # a flag may occur twice
