"""Check each rule of MaxEnt-GRPO and of its controllers with a wrong recipe and with the corrected recipe."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from golden import compare_messages, golden_files

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import maxent, read_frozen, read_recipe
from grpo_recipes.recipe.check import check, notes
from grpo_recipes.recipe.keys import environment_keys
from grpo_recipes.recipe.registry import OBJECTIVES

LISTWISE = {"maxent_objective": "listwise"}
MLE = {"maxent_objective": "weighted_mle"}
TEMPERED = {"maxent_objective": "tempered"}
ROLLOUTS = {"maxent_target_eff_rollouts": 2.0}
OWN = sorted({key for objective in OBJECTIVES.values() for key in objective.unread})
VALUES = {
    "maxent_length_normalize_policy": False, "maxent_length_normalize_ref": False, "maxent_utility": "advantage",
    "maxent_tau_warmup_steps": 2, "maxent_tau_min": 0.01, "maxent_tau_max": 2.0,
}  # fmt: skip
VALUES |= {"maxent_target_weight_entropy": 1.1, "maxent_target_eff_rollouts": 2.0, "maxent_target_ratio": 2.0}
KAPPA = {"maxent_policy_temperature": 2.0}
PER_TOKEN = LISTWISE | {"maxent_policy_temperature": 0.0}
WIDENED = LISTWISE | {"maxent_policy_spread": 1.0}
NEEDED = {
    **{f"maxent_tau_{name}": ROLLOUTS for name in ("lr", "min", "max", "warmup_steps")},
}  # fmt: skip


@pytest.mark.parametrize("path", golden_files(__file__, "maxent"))
def test_a_broken_rule_is_told_and_the_correction_passes(read, path):
    compare_messages(path, read)


@pytest.mark.parametrize("key", OWN)
def test_a_key_is_right_under_the_objectives_that_read_it_and_refused_under_others(read, key):
    value = VALUES.get(key, 0.01)
    for name, objective in OBJECTIVES.items():
        needed = NEEDED.get(key, {}) if key not in objective.unread else {}
        if (name, key) == ("listwise", "maxent_length_normalize_policy"):
            needed = PER_TOKEN
        problems = check(read(**{"maxent_objective": name, **needed, key: value}), {})
        assert (problems == []) == (key not in objective.unread), name
        assert all(f"'{key}' changes nothing under maxent_objective: {name}" in problem.what for problem in problems)


@pytest.mark.parametrize("name", sorted(name for name in environment_keys() if name.startswith("MAXENT_")))
def test_a_variable_of_maxent_is_its_key_there_and_refused_in_a_grpo_run(read, name):
    key, objective = environment_keys()[name], name == "MAXENT_OBJECTIVE"
    texts = {"MAXENT_OBJECTIVE": "weighted_mle", "MAXENT_LENGTH_NORM_REF": "0"}
    values = {"MAXENT_OBJECTIVE": "weighted_mle", "MAXENT_LENGTH_NORM_REF": False}
    keys = {} if name == "MAXENT_BETA" else {"maxent_beta": 0.5}
    recipe = read([], {name: texts.get(name, "0.125")}, **LISTWISE, **keys)
    assert (recipe[key], recipe.source(key)) == (values.get(name, 0.125), name)
    assert check(recipe, {}) == []
    if not objective:  # the same rule applies to the task
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


@pytest.mark.parametrize(
    ("keys", "ratio", "limit"),
    [
        ({**TEMPERED, "maxent_tau": 0.05}, math.exp(20), "the positive half of MaxRL"),
        (TEMPERED, math.exp(2), None),
        ({**TEMPERED, "maxent_tau": 0}, math.inf, "the positive half of MaxRL"),
        ({**TEMPERED, "maxent_tau": 100}, math.exp(0.01), "this is Dr.GRPO"),
        ({**PER_TOKEN, "max_completion_length": 29}, math.exp(5), None),
        ({**PER_TOKEN, "max_completion_length": 30}, math.exp(5), "this is MaxRL; a value above 0"),
        (
            {**PER_TOKEN, "maxent_tau": 1.0, "max_completion_length": 30},
            math.e,
            "does not make right answers equally likely",
        ),
        (
            {**PER_TOKEN, "maxent_tau": 0.1, "maxent_beta": 0.1, "max_completion_length": 30},
            math.exp(5),
            "equally likely",
        ),
        (
            {**PER_TOKEN, "maxent_length_normalize_policy": False, "max_completion_length": 900},
            math.exp(5),
            None,
        ),
        ({**LISTWISE, "maxent_beta": 10.0}, math.exp(1 / 10.2), "a lower maxent_beta changes that"),
        ({**TEMPERED, "maxent_tau": 10, "maxent_target_ratio": 3.0}, 3.0, None),
        ({**TEMPERED, "maxent_target_eff_rollouts": 2.0}, math.exp(2), None),
        ({**LISTWISE, "max_completion_length": 99}, math.exp(5), None),
        ({**LISTWISE, "max_completion_length": 100}, math.exp(5), "maxent_policy_spread: 1 widens it"),
        ({**LISTWISE, **KAPPA, "max_completion_length": 900}, math.exp(5), "with maxent_policy_temperature 2:"),
        ({**LISTWISE, "max_completion_length": None}, math.exp(5), "(max_completion_length is not set)"),
        ({**WIDENED, "max_completion_length": 900}, math.exp(5), None),
        ({**WIDENED, "maxent_beta": 0.3, "maxent_q_temperature": 0.5}, math.exp(4), None),
        ({**MLE, "maxent_tau": 0.2, "maxent_q_epsilon": 0.1}, (0.6 / 0.4) ** 5, None),
        ({**MLE, "maxent_q_temperature": 1e-3}, math.inf, "training only on right answers"),
        ({**MLE, "maxent_tau": math.inf}, 1.0, "training on the policy's own samples"),
        ({"maxent_objective": "maxrl"}, math.inf, None),
    ],
)
def test_a_recipe_says_how_much_a_right_answer_weighs_and_of_which_method_that_is_the_limit(read, keys, ratio, limit):
    if "maxent_q_epsilon" in keys:  # q of two correct and two wrong answers, with a floor
        right = math.e / (2 * math.e + 2) * 0.6 + 0.1
        ratio = (right / (0.5 - right)) ** 5
    recipe = read(
        **{"maxent_q_epsilon": 0.0, **keys} if keys["maxent_objective"] in ("listwise", "weighted_mle") else keys
    )
    assert maxent.weight_ratio(recipe) == pytest.approx(ratio, rel=1e-9)
    printed = maxent.limit_note(recipe)
    assert printed is None if limit is None else limit in printed
    assert [note for note in notes(recipe) if note == printed] == ([printed] if printed else [])


def test_a_grpo_recipe_is_the_limit_of_nothing(read):
    assert maxent.limit_note(read()) is None
