"""The recipes of environments that train on CPU: their rewards rise, and pass@k of held-out seeds is there."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from real_runs import REPOSITORY, Launch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["server", "colocate"])
@pytest.mark.parametrize("name", ["arithmetic", "verifiers"])
def test_the_reward_rises(launch: Callable[..., Launch], name: str, mode: str) -> None:
    pytest.importorskip("reasoning_gym" if name == "arithmetic" else "verifiers")
    run = launch(str(REPOSITORY / f"recipes/environments/{name}_smoke.yaml"), "--vllm_mode", mode)
    assert run.wait(900) == 0, run.output
    summary = run.summary()
    (result,) = summary["benchmarks"].values()
    # seen over five runs with a server: 0.34 to 0.42 rose to 0.68 to 0.75, and pass@1 was 0.68 to 0.79
    assert summary["initial_reward"] < 0.55 and summary["final_reward"] >= summary["initial_reward"] + 0.15
    assert result["pass@1"] > 0.5 and result["pass@1"] < result["pass@8"] and result["problems"] == 64
    assert max(row["sampling/sampling_logp_difference/mean"] for row in run.rows()) < 1e-4


@pytest.mark.timeout(1500)  # its smoke model is made first, which takes minutes
@pytest.mark.parametrize("mode", ["server", "colocate"])
def test_a_detective_learns_to_play(launch: Callable[..., Launch], mode: str) -> None:
    pytest.importorskip("textarena")
    run = launch(str(REPOSITORY / "recipes/environments/secret_mafia_smoke.yaml"), "--vllm_mode", mode)
    assert run.wait(1300) == 0, run.output
    before, after = (json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines())
    # Seen on two processors with different smoke models, before and after: legal 0.84 to 0.86 and 0.96 to 0.97, reward
    # 0.7 to 0.8 and 1.4 to 1.9, won 0.54 to 0.57 and 0.53 to 0.61, standard error 0.02. Moves that do not look
    # at these games win 0.44, with 0.28 of them legal. Drawn legal moves win 0.54.
    assert before["eval_episodes/legal"] < 0.88 and after["eval_episodes/legal"] > 0.92
    assert after["eval_episodes/won"] > before["eval_episodes/won"] - 0.06
    assert after["eval_reward"] > before["eval_reward"] + 0.3
    assert max(row["sampling/sampling_logp_difference/mean"] for row in run.rows()) < 1e-4
