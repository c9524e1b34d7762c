"""Scored groups as environments post them."""

from __future__ import annotations

from typing import Any

from grpo_recipes.extensions.atropos.group import UNTRAINED, Group

PROMPT = [4, 11, 16]


def group(size: int = 2, first: int = 20, **changes: Any) -> Group:
    """Build a valid group: completions with 1, 2, ... tokens that count up from ``first``, and scores 0, 1, ..."""
    completions = [[first + row + at for at in range(row + 1)] for row in range(size)]
    values: dict[str, Any] = {
        "tokens": [PROMPT + completion for completion in completions],
        "masks": [[UNTRAINED] * len(PROMPT) + completion for completion in completions],
        "scores": [float(row) for row in range(size)],
        "inference_logprobs": [[1.0] * len(PROMPT) + [-0.5] * len(completion) for completion in completions],
        "overrides": [{} for _ in completions],
    }
    return Group(**{**values, **changes})


def of_version(version: int, **changes: Any) -> Group:
    """Build a valid group sampled by a policy version; its first completion starts with 20 plus the version."""
    return group(first=20 + version, generation_params={"policy_version": version}, **changes)
