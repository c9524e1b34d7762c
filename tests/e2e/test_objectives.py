"""Objectives that TRL lacks, through the real launcher and server: each learns the smoke task."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_runs import Launch


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.parametrize(
    "keys",
    [
        {"advantage_estimator": "rloo", "loss_type": "dr_grpo"},
        {"advantage_estimator": "reinforce_plus_plus"},
        {"advantage_estimator": "reinforce_plus_plus_baseline"},
        {"loss_type": "gmpo", "epsilon": 0.4, "num_iterations": 2},
    ],
    ids=lambda keys: next(iter(keys.values())),
)
def test_an_objective_learns_the_smoke_task(launch: Callable[..., Launch], keys: dict[str, object]) -> None:
    run = launch("--save_strategy", "no", *(word for key, value in keys.items() for word in (f"--{key}", str(value))))

    assert run.wait() == 0, run.output

    summary = run.summary()
    assert summary["status"] == "completed" and summary["steps"] == len(run.rows()) == 60
    assert summary["initial_reward"] <= 0.65
    assert summary["final_reward"] >= 0.85
