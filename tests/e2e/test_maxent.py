"""MaxEnt-GRPO through the real launcher and server: the smoke task with one variable, and with two processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from documented import documented
from real_runs import LEARNS, REPOSITORY, Launch

METRICS = {
    f"maxent/{name}"
    for name in (
        "tau", "beta", "weight_entropy", "weight_entropy_min", "weight_entropy_max", "eff_rollouts", "incorrect_mass",
        "target_ratio",
    )
}  # fmt: skip


@pytest.mark.slow
def test_one_variable_trains_the_smoke_task_by_maxent(launch: Callable[..., Launch]) -> None:
    words = documented("MAXENT=1 bash training.sh", {"training.sh": str(REPOSITORY / "training.sh")})
    run = launch(command=[*words, *LEARNS], ENV_DIR=sys.prefix)
    run.wait_for_step(1)
    assert any("maxent-grpo.py" in " ".join(process.cmdline()) for process in run.processes())

    assert run.wait() == 0, run.output

    summary, rows = run.summary(), run.rows()
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert plan["task"] == "maxent" and plan["recipe"].endswith("recipes/smoke/maxent.yaml")
    assert plan["entry"] == "src/maxent-grpo.py"
    assert summary["status"] == "completed" and summary["steps"] == len(rows) == 30
    assert summary["initial_reward"] <= 0.7
    assert summary["final_reward"] >= 0.85
    assert all(row.keys() >= {"maxent/tau", "maxent/beta", "maxent/incorrect_mass"} for row in rows)
    of_groups = [row for row in rows if row.keys() >= METRICS]  # a step may have no group with right and wrong
    assert len(of_groups) > 20
    assert all(0 <= row["maxent/weight_entropy_min"] <= row["maxent/weight_entropy"] for row in of_groups)


@pytest.mark.slow
def test_two_processes_weigh_by_the_reference_through_the_server(launch: Callable[..., Launch]) -> None:
    run = launch(
        str(REPOSITORY / "recipes/smoke/maxent.yaml"),
        "--num_processes", "2", "--max_steps", "3", "--prompts_per_step", "8", "--num_generations", "8",
        "--maxent_objective", "listwise", "--maxent_beta", "0.5", "--run_name", "listwise",
    )  # fmt: skip

    assert run.wait() == 0, run.output

    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["grad_norm"] > 0 and row["maxent/beta"] == 0.5 for row in rows)
    assert all(1 < row["maxent/eff_rollouts"] < 8 for row in rows)
    # No KL in the loss, though a reference is there; and the server sampled with the trainer's weights.
    assert all("kl" not in row and row["sampling/sampling_logp_difference/mean"] < 1e-4 for row in rows)
