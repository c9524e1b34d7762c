"""The plan of a run with overlap_generation: it is marked off-policy, and the server needs a separate device."""

from __future__ import annotations

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.plan.plan import format_plan

NOTE = "one step off-policy: the server samples the next generation while the trainers update"


def test_the_plan_says_that_a_run_is_one_step_off_policy(planned):
    plan = planned(overlap_generation=True)
    assert NOTE in plan.notes and NOTE in format_plan(plan)
    assert NOTE not in planned().notes


def test_one_gpu_has_no_room_for_both(planned):
    with pytest.raises(ConfigError, match="overlap_generation needs a second GPU for the server"):
        planned(gpus=("0",), overlap_generation=True)
    assert planned(gpus=("0",)).mode == "colocate"
