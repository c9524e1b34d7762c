"""The half of the guard that compares log-probs: what it takes for a proof, and what not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes.trainers.checks import Checks, logprob_tolerance

NAN = math.nan


def difference(server: list[list[float]], mask: list[list[int]], own: float = -1.0, **sampling: Any) -> float | None:
    """Of a trainer whose own log-probs are all ``own``."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda tensor: tensor),
        model=torch.nn.Identity(),
        state=SimpleNamespace(global_step=2),
        args=SimpleNamespace(output_dir="nowhere", fp16=False, learning_rate=1.0, max_grad_norm=1.0),
        **{"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, **sampling},
    )
    output = {
        "old_per_token_logps": torch.full((len(server), len(server[0])), own),
        "sampling_per_token_logps": torch.tensor(server),
        "completion_mask": torch.tensor(mask),
    }
    return Checks(trainer).logprob_difference(output)


@pytest.mark.parametrize(
    ("server", "mask", "expected"),
    [
        ([[-1.0, -1.5]], [[1, 1]], 0.25),
        ([[-1.0, -9.0]], [[1, 0]], 0.0),  # padding does not count
        ([[-1.5, NAN]], [[1, 1]], 0.5),  # one token the server could not score
        ([[-1.5, -1.0]], [[0, 0]], None),  # every completion masked: nothing was proved
    ],
)
def test_the_difference_is_a_mean_over_scored_tokens(server, mask, expected):
    assert difference(server, mask) == expected


def test_a_server_that_scores_nothing_proves_nothing_right():
    assert math.isnan(difference([[NAN, NAN]], [[1, 1]]))


def test_truncated_sampling_is_not_compared():
    assert difference([[-5.0, -5.0]], [[1, 1]], top_p=0.9) == 0.0


@pytest.mark.parametrize(
    ("dtype", "keys", "expected"),
    [
        (torch.float32, {}, 1e-3),
        (torch.bfloat16, {}, 5e-2),
        (torch.float32, {"bf16": True}, 5e-2),  # autocast computes in bfloat16
        (torch.float32, {"weight_guard_tolerance": 0.7}, 0.7),
    ],
)
def test_the_tolerance_follows_the_dtype_unless_the_recipe_names_one(dtype, keys, expected):
    args = SimpleNamespace(**{"weight_guard_tolerance": None, "bf16": False, "fp16": False, **keys})
    trainer = SimpleNamespace(args=args, model=torch.nn.Linear(1, 1, dtype=dtype))
    assert logprob_tolerance(trainer) == expected
