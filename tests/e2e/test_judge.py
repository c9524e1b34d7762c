"""The reward ``llm_judge`` in a whole run, with a fake judge that fails at random."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_judge import FakeJudge
from real_runs import REPOSITORY, Launch


@pytest.mark.slow
def test_a_model_learns_from_a_judge_that_fails_three_of_ten_times(launch: Callable[..., Launch]) -> None:
    flags = ("--judge_prompt", "Solution: {answer}\nAnswer: {completion}", "--judge_retries", "1")
    with FakeJudge(failing=0.3).running() as judge:
        run = launch(
            str(REPOSITORY / "recipes/examples/judge.yaml"), "--judge_base_url", judge.url, *flags, JUDGE_KEY=judge.key
        )
        assert run.wait(600) == 0, run.output
    rows, summary = run.rows(), run.summary()
    assert summary["final_reward"] > summary["initial_reward"] + 0.2, summary
    # 0.09 of the calls fail. Equal completions share a second one.
    unscored = [row["rewards/no_verdict"] for row in rows]
    assert 0 < sum(unscored) / len(rows) < 0.05, unscored  # seen: 0.01, and 0.07 in the worst step
    run.wait_for_nothing_left()
