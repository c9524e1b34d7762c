"""The reward ``code_tests`` in a whole run: programs in the real sandbox, whose reward rises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from real_runs import REPOSITORY, Launch

from grpo_recipes.extensions.code.jail import find_jail_problem

PROBLEM = find_jail_problem()


@pytest.mark.slow
@pytest.mark.skipif(PROBLEM is not None, reason=str(PROBLEM))
def test_a_model_learns_to_write_programs_that_pass_their_tests(launch: Callable[..., Launch]) -> None:
    run = launch(str(REPOSITORY / "recipes/smoke/code.yaml"))
    assert run.wait(900) == 0, run.output
    summary, rows = run.summary(), run.rows()
    assert summary["final_reward"] > summary["initial_reward"] + 0.2  # seen: 0.46 and 0.88
    assert all(row["rewards/no_verdict"] == 0 for row in rows) and rows[-1]["rewards/code_tests/mean"] > 0.6
    run.wait_for_nothing_left()
