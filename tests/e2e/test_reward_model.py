"""A reward model in a whole run: the launch finds it, and its scores are in the metrics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import Launch
from trainers.tiny_training import save_reward_model


@pytest.mark.slow
def test_a_reward_model_scores_a_run(launch: Callable[..., Launch], tmp_path: Path) -> None:
    save_reward_model(tmp_path / "scorer")
    words = ("--use_vllm", "false", "--prompts_per_step", "4", "--num_generations", "4", "--save_steps", "1")
    run = launch(*words, "--max_steps", "3", "--reward_funcs", "pure_accuracy_math", "./scorer")
    assert run.wait(600) == 0, run.output
    rows = run.rows()
    assert len(rows) == 3 and len({row["rewards/scorer/mean"] for row in rows}) > 1
    assert all(row["rewards/scorer/std"] > 0 for row in rows)
