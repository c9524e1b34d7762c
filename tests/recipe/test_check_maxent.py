"""Each rule of MaxEnt-GRPO's keys and of the controllers with a recipe that breaks it and the corrected one."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import read_frozen, read_recipe
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.keys import ENVIRONMENT_KEYS
from grpo_recipes.recipe.registry import OBJECTIVES

LISTWISE = {"maxent_objective": "listwise"}
MLE = {"maxent_objective": "weighted_mle"}
TEMPERED = {"maxent_objective": "tempered"}
ROLLOUTS = {"maxent_target_eff_rollouts": 2.0}
OWN = sorted({key for objective in OBJECTIVES.values() for key in objective.unread})
VALUES = {"maxent_length_normalize_policy": False, "maxent_length_normalize_ref": False, "maxent_utility": "advantage"}


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ({"maxent_tau": 0.1}, {"maxent_tau": 0.1, **LISTWISE}, "'maxent_tau' changes nothing in a GRPO run"),
        ({**LISTWISE, "loss_type": "dr_grpo"}, {**LISTWISE, "loss_type": "grpo"}, "whose loss_type is grpo"),
        (
            {**LISTWISE, "loss_type": "grpo", "maxent_length_normalize_policy": False},
            {**LISTWISE, "loss_type": "dr_grpo", "maxent_length_normalize_policy": False},
            "whose loss_type is dr_grpo",
        ),
        ({**TEMPERED, "loss_type": "grpo"}, {**TEMPERED, "loss_type": "dr_grpo"}, "whose loss_type is dr_grpo"),
        ({**MLE, "scale_rewards": "batch"}, {**MLE, "scale_rewards": "none"}, "whose scale_rewards is none"),
        (
            {**TEMPERED, "multi_objective_aggregation": "normalize_then_sum"},
            {**TEMPERED, "multi_objective_aggregation": "sum_then_normalize"},
            "whose multi_objective_aggregation is sum_then_normalize",
        ),
        ({**LISTWISE, "maxent_q_epsilon": 0.25}, {**LISTWISE, "maxent_q_epsilon": 0.249}, "not below 1 / num_gen"),
        ({**MLE, "maxent_q_epsilon": 0.2, "num_generations": 8}, {**MLE, "maxent_q_epsilon": 0.2}, "(0.125)"),
        ({**LISTWISE, "maxent_tau": 0}, {**LISTWISE, "maxent_tau": 0, "maxent_beta": 1}, "are both 0"),
        ({**MLE, "maxent_tau": 0.0}, {**MLE, "maxent_tau": math.inf}, "are both 0"),
        (
            {**MLE, "maxent_length_normalize_ref": False},
            {**MLE, "maxent_length_normalize_ref": False, "maxent_beta": 0.5},
            "changes nothing with maxent_beta 0",
        ),
        (
            {**TEMPERED, **ROLLOUTS, "maxent_target_weight_entropy": 1.0},
            {**TEMPERED, "maxent_target_weight_entropy": 1.0},
            "are both given",
        ),
        ({**TEMPERED, "maxent_tau_min": 0.01}, {**TEMPERED, **ROLLOUTS, "maxent_tau_min": 0.01}, "without a target"),
        ({**TEMPERED, "maxent_tau_max": 2}, {**TEMPERED, **ROLLOUTS, "maxent_tau_max": 2}, "without a target"),
        ({**LISTWISE, "maxent_tau_lr": 2}, {**LISTWISE, **ROLLOUTS, "maxent_tau_lr": 2}, "without a target"),
        (
            {**LISTWISE, "maxent_tau_warmup_steps": 2},
            {**LISTWISE, **ROLLOUTS, "maxent_tau_warmup_steps": 2},
            "without a target",
        ),
        ({**TEMPERED, **ROLLOUTS, "maxent_tau": 0}, {**TEMPERED, "maxent_tau": 0}, "tau starts at 0, outside of"),
        (
            {**TEMPERED, **ROLLOUTS, "maxent_tau": math.inf},
            {**TEMPERED, "maxent_tau": math.inf},
            "tau starts at inf",
        ),
        (
            {**TEMPERED, **ROLLOUTS, "maxent_tau_min": 3, "maxent_tau_max": 2},
            {**TEMPERED, **ROLLOUTS, "maxent_tau_min": 0.5, "maxent_tau_max": 2, "maxent_tau": 1},
            "is above maxent_tau_max 2",
        ),
        (
            {**TEMPERED, **ROLLOUTS, "maxent_tau": 3, "maxent_tau_max": 2},
            {**TEMPERED, **ROLLOUTS, "maxent_tau": 2, "maxent_tau_max": 2},
            "tau starts at 3, outside",
        ),
        (
            {**TEMPERED, "maxent_target_weight_entropy": 1.39},
            {**TEMPERED, "maxent_target_weight_entropy": 1.38},
            "log(num_generations) (1.38629), that of equal weights",
        ),
        (
            {**TEMPERED, "maxent_target_eff_rollouts": 4.5},
            {**TEMPERED, "maxent_target_eff_rollouts": 4},
            "num_generations (4), that of equal weights",
        ),
        (
            {**TEMPERED, "maxent_target_weight_entropy": 0},
            {**TEMPERED, "maxent_target_weight_entropy": 0.01},
            "maxent_target_weight_entropy 0 is not between 0, that of all weight",
        ),
        (
            {**TEMPERED, "maxent_target_eff_rollouts": 1},
            {**TEMPERED, "maxent_target_eff_rollouts": 1.01},
            "maxent_target_eff_rollouts 1 is not between 1, that of all weight",
        ),
        ({"kl_target": 0.1}, {"kl_target": 0.1, "beta": 0.04}, "there is no KL to hold"),
        ({"kl_target": 0.1, **LISTWISE, "maxent_beta": 1}, {"kl_target": 0.1, **LISTWISE, "beta": 0.1}, "is no KL"),
        ({"kl_horizon": 9, "beta": 1}, {"kl_horizon": 9, "beta": 1, "kl_target": 0.1}, "without kl_target"),
        (
            {"kl_ctl_step_size": 0.5, "beta": 1},
            {"kl_ctl_step_size": 0.5, "beta": 1, "kl_target": 1},
            "without kl_target",
        ),
        ({"sync_ref_model": True}, {"sync_ref_model": True, "beta": 0.1}, "sync: beta is 0"),
        (
            {**LISTWISE, "sync_ref_model": True},
            {**LISTWISE, "sync_ref_model": True, "maxent_beta": 1},
            "sync: beta and maxent_beta are 0",
        ),
        ({**TEMPERED, "sync_ref_model": True}, {**TEMPERED, "sync_ref_model": True, "beta": 1}, "sync: beta is 0"),
    ],
)
def test_a_broken_rule_is_told_and_the_correction_passes(read, wrong, right, said):
    (problem,) = check(read(**wrong), {})
    assert said in str(problem)
    assert problem.where.startswith("recipe.yaml") and problem.fix
    assert check(read(**right), {}) == []


@pytest.mark.parametrize("key", OWN)
def test_a_key_is_right_under_the_objectives_that_read_it_and_refused_under_others(read, key):
    value = VALUES.get(key, 0.01)
    for name, objective in OBJECTIVES.items():
        needed = {"maxent_beta": 1.0} if key == "maxent_length_normalize_ref" and objective.targets_q else {}
        problems = check(read(maxent_objective=name, **{**needed, key: value}), {})
        assert (problems == []) == (key not in objective.unread), name
        assert all(f"'{key}' changes nothing under maxent_objective: {name}" in problem.what for problem in problems)


@pytest.mark.parametrize("name", sorted(name for name in ENVIRONMENT_KEYS if name.startswith("MAXENT_")))
def test_a_variable_of_maxent_is_its_key_there_and_refused_in_a_grpo_run(read, name):
    key, objective = ENVIRONMENT_KEYS[name], name == "MAXENT_OBJECTIVE"
    texts = {"MAXENT_OBJECTIVE": "weighted_mle", "MAXENT_LENGTH_NORM_REF": "0"}
    values = {"MAXENT_OBJECTIVE": "weighted_mle", "MAXENT_LENGTH_NORM_REF": False}
    keys = {} if name == "MAXENT_BETA" else {"maxent_beta": 0.5}
    recipe = read([], {name: texts.get(name, "0.125")}, **LISTWISE, **keys)
    assert (recipe[key], recipe.source(key)) == (values.get(name, 0.125), name)
    assert check(recipe, {}) == []
    if not objective:  # whose rule is that of the task
        (problem,) = check(read([], {name: texts.get(name, "0.125")}), {})
        assert problem.where == name and f"'{key}' changes nothing" in problem.what
        assert problem.fix.startswith(f"unset {name}, or make it a MaxEnt run")


def test_all_is_told_at_once(read):
    recipe = read(
        **TEMPERED, maxent_beta=1, loss_type="grpo", scale_rewards="group", maxent_tau_lr=1, kl_horizon=9,
        sync_ref_model=True,
    )  # fmt: skip
    assert len(check(recipe, {})) == 6


@pytest.mark.parametrize("written", [".inf", "inf", ".Inf", "+.inf", "Infinity", "'inf'"])
def test_tau_may_be_infinite_wherever_it_is_written(read, tmp_path, written):
    path, frozen = tmp_path / "mine.yaml", tmp_path / "frozen.yaml"
    text = written.strip("'")
    path.write_text(f"maxent_tau: {written}\n")
    assert read_recipe(path)["maxent_tau"] == math.inf
    frozen.write_text(read_recipe(path).as_yaml())
    assert read_frozen(frozen)["maxent_tau"] == math.inf
    for recipe in (read(["--maxent_tau", text]), read([f"--maxent-tau={text}"]), read([], {"MAXENT_TAU": text})):
        assert recipe["maxent_tau"] == math.inf


@pytest.mark.parametrize("written", ["-.inf", "-inf", ".nan", "nan", "infinite"])
def test_no_other_word_is_a_tau(tmp_path: Path, written: str, read):
    path = tmp_path / "mine.yaml"
    path.write_text(f"maxent_tau: {written}\n")
    for attempt in (lambda: read_recipe(path), lambda: read([f"--maxent_tau={written}"])):
        with pytest.raises(ConfigError, match="maxent_tau"):
            attempt()
