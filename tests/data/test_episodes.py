"""Test the rows of a run that plays episodes: their number, environments and seeds."""

from __future__ import annotations

import json
from collections import Counter

from grpo_recipes.extensions.environments.rows import make_evaluation_rows, make_training_rows
from grpo_recipes.recipe.configs import ScriptArguments


def test_training_and_evaluation_have_no_episode_in_common() -> None:
    args = ScriptArguments(environment="a.py:Game", environment_episodes=500, environment_eval_episodes=200)
    trained, evaluated = make_training_rows(args, seed=1), make_evaluation_rows(args)
    assert (len(trained), len(evaluated)) == (500, 200)
    assert len(set(trained["seed"])) == 500 and not set(trained["seed"]) & set(evaluated["seed"])
    assert all(0 <= seed < 2**31 for seed in [*trained["seed"], *evaluated["seed"]])


def test_the_runs_seed_decides_what_is_trained_on() -> None:
    args = ScriptArguments(environment="a.py:Game")
    first, repeated, other = (make_training_rows(args, seed)["seed"] for seed in (1, 1, 2))
    assert first == repeated != other


def test_a_mixture_has_its_shares_and_arguments() -> None:
    entries = [{"id": "a.py:Game", "weight": 3, "args": {"size": 4}}, {"id": "b.py:Game"}]
    args = ScriptArguments(environment_mixture={"environments": entries}, environment_episodes=40)
    rows = make_training_rows(args, 1)
    assert Counter(rows["environment"]) == {"a.py:Game": 30, "b.py:Game": 10}
    assert {row["environment"]: json.loads(row["arguments"]) for row in rows} == {
        "a.py:Game": {"size": 4}, "b.py:Game": {},
    }  # fmt: skip


def test_equal_rows_start_different_episodes_of_a_trl_environment(load) -> None:
    rows = [{"problem": "a", "answer": "1"}] * 3
    assert len(load(rows).dataset) == 1
    assert len(load(rows, environment="a.py:Game").dataset) == 3


def test_rows_without_solutions_train_if_the_environment_gives_the_only_reward(load) -> None:
    keys = {"environment": "a.py:Game", "reward_funcs": ["environment"]}
    assert load([{"problem": "a"}, {"problem": "b"}], **keys).dataset.column_names == ["prompt"]
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": None}, {"problem": "", "answer": "1"}]
    assert load(rows, **keys).dataset["answer"] == ["1", "", "1"]  # reset may return the prompt
    assert load(rows, **keys | {"reward_funcs": ["environment", "math_verify"]}).dataset["answer"] == ["1"] * 2
