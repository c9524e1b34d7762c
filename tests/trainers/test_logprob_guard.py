"""The half of the guard that compares log-probs: what it takes for a proof, and what not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_recipes.trainers.grpo import GRPOTrainer

NAN = math.nan


def difference(server: list[list[float]], mask: list[list[int]], **sampling: Any) -> float | None:
    """Of a trainer whose own log-probs are all -1."""
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(gather=lambda tensor: tensor),
        **{"top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, **sampling},
    )
    output = {
        "old_per_token_logps": torch.full((len(server), len(server[0])), -1.0),
        "sampling_per_token_logps": torch.tensor(server),
        "completion_mask": torch.tensor(mask),
    }
    return GRPOTrainer._logprob_difference(trainer, output)  # type: ignore[arg-type]


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
