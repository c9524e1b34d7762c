"""The recipes of environments that train on CPU: their rewards rise, and pass@k of held-out seeds is there."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from real_runs import REPOSITORY, Launch

pytestmark = pytest.mark.slow


# In bench/results/environments.jsonl, runs of a seed have the same or nearly the same rewards in both modes. Without a
# server they take half of the time. test_environments.py runs SecretMafia with a server.
INSIDE = ("--vllm_mode", "colocate")


@pytest.mark.parametrize("name", ["arithmetic", "verifiers"])
def test_the_reward_rises(launch: Callable[..., Launch], name: str) -> None:
    run = launch(find_recipe(name), *INSIDE)
    assert run.wait(900) == 0, run.output
    summary = run.summary()
    (result,) = summary["benchmarks"].values()
    # seen over five runs with a server: 0.34 to 0.42 rose to 0.68 to 0.75, and pass@1 was 0.68 to 0.79
    assert summary["initial_reward"] < 0.55 and summary["final_reward"] >= summary["initial_reward"] + 0.15
    assert result["pass@1"] > 0.5 and result["pass@1"] < result["pass@8"] and result["problems"] == 64
    assert max(row["sampling/sampling_logp_difference/mean"] for row in run.rows()) < 1e-4


@pytest.mark.parametrize("name", ["arithmetic", "verifiers"])
def test_the_recipe_runs_with_a_server(launch: Callable[..., Launch], name: str) -> None:
    sizes = ("--max_steps", "3", "--prompts_per_step", "4", "--per_device_train_batch_size", "64")
    run = launch(find_recipe(name), *sizes, "--benchmark_max_problems", "16")
    assert run.wait(900) == 0, run.output
    rows, (result,) = run.rows(), run.summary()["benchmarks"].values()
    assert len(rows) == 3 and all(row["grad_norm"] > 0 and row["episodes/unscored"] == 0 for row in rows)
    assert max(row["sampling/sampling_logp_difference/mean"] for row in rows) < 1e-4
    assert result["problems"] == 16 and 0 < result["pass@1"] < result["pass@8"]


@pytest.mark.timeout(1900)  # its smoke model is made first, which takes minutes, and steps take 20 seconds
def test_a_detective_learns_to_play(launch: Callable[..., Launch]) -> None:
    run = launch(find_recipe("secret_mafia"), *INSIDE)
    assert run.wait(1700) == 0, run.output
    before, after = (json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines())
    # Seen on two processors with different smoke models, before and after: legal 0.84 to 0.86 and 0.96 to 0.97, reward
    # 0.7 to 0.8 and 1.4 to 1.9, won 0.54 to 0.57 and 0.53 to 0.61, standard error 0.02. Moves that do not look
    # at these games win 0.44, with 0.28 of them legal. Drawn legal moves win 0.54.
    assert before["eval_episodes/legal"] < 0.88 and after["eval_episodes/legal"] > 0.92
    assert after["eval_episodes/won"] > before["eval_episodes/won"] - 0.06
    assert after["eval_reward"] > before["eval_reward"] + 0.3
    assert max(row["sampling/sampling_logp_difference/mean"] for row in run.rows()) < 1e-4


def find_recipe(name: str) -> str:
    """Return the path of an environment's recipe; skip the test if its library is not installed."""
    pytest.importorskip({"arithmetic": "reasoning_gym", "secret_mafia": "textarena"}.get(name, name))
    return str(REPOSITORY / f"recipes/environments/{name}_smoke.yaml")
