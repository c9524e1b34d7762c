"""Objectives that TRL lacks, through the real launcher and server: each learns the smoke task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from real_runs import LEARNS, Launch

from grpo_recipes import smoke


@pytest.mark.slow
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
    run = launch(
        "--save_strategy", "no", *LEARNS, *(word for key, value in keys.items() for word in (f"--{key}", str(value)))
    )

    assert run.wait() == 0, run.output

    summary = run.summary()
    assert summary["status"] == "completed" and summary["steps"] == len(run.rows()) == 30
    assert summary["initial_reward"] <= 0.7
    assert summary["final_reward"] >= 0.85


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_without_rewards(launch: Callable[..., Launch], tmp_path: Path) -> None:
    smoke.make_smoke_task(tmp_path / "teacher", phases=smoke.PHASES[:1])  # trained only on right answers
    flags = ("--teacher_model_name_or_path", str(tmp_path / "teacher/model"), "--reward_weights", "[0.0]")
    run = launch("--save_strategy", "no", "--max_steps", "40", *flags)

    assert run.wait() == 0, run.output

    rows = run.rows()
    accuracy = "rewards/pure_accuracy_math/mean"
    first, last = ({name: fmean(row[name] for row in part) for name in ("teacher_kl", accuracy)}
                   for part in (rows[:3], rows[-5:]))  # fmt: skip
    assert len(rows) == 40 and all(row["reward"] == 0 for row in rows)
    assert first["teacher_kl"] > 0.2 and last["teacher_kl"] < first["teacher_kl"] / 5
    assert first[accuracy] <= 0.65 and last[accuracy] >= 0.85
