"""Two launches of the same second on one machine, both wanting the default ports."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from real_runs import Launch

BRIEF = ("--max_steps", "2", "--prompts_per_step", "4", "--num_generations", "4", "--run_name", "twin")


@pytest.mark.slow
def test_two_launches_of_one_second_both_complete(launch: Callable[..., Launch]) -> None:
    twins = [launch(*BRIEF, folder=name) for name in ("first", "second")]

    for twin in twins:
        assert twin.wait() == 0, twin.output
    ports = [set(json.loads((twin.run_dir / "plan.json").read_text())["ports"].values()) - {None} for twin in twins]
    assert not ports[0] & ports[1]
    assert [len(twin.rows()) for twin in twins] == [2, 2]
