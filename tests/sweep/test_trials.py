"""The runs of a sweep, and what is wrong with some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import home
from grpo_recipes.sweep.spec import SweepSpec, make_trials, read_axes

MATH = home() / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"


def trials(*words, flags=(), path=MATH, environment=None):
    return make_trials(SweepSpec(Path(path), read_axes(words, flags), flags), environment or {})


def problems(*words, **keys):
    with pytest.raises(ConfigError) as refused:
        trials(*words, **keys)
    return [str(problem) for problem in refused.value.problems]


def test_trials_are_every_combination():
    found = trials("learning_rate=1e-6,3e-6", "seed=1..3", flags=["--max_steps", "9"])
    assert [trial.name for trial in found[:4]] == [
        "learning_rate=1e-6,seed=1", "learning_rate=1e-6,seed=2", "learning_rate=1e-6,seed=3",
        "learning_rate=3e-6,seed=1",
    ]  # fmt: skip
    assert [trial.index for trial in found] == list(range(6))
    assert [(trial.recipe["learning_rate"], trial.recipe["seed"]) for trial in found[2:4]] == [(1e-6, 3), (3e-6, 1)]
    assert {trial.recipe["max_steps"] for trial in found} == {9}


def test_a_value_wins_over_variables():
    assert [trial.recipe["seed"] for trial in trials("seed=1..2", environment={"TRAIN_SEED": "9"})] == [1, 2]


def test_names_are_short_and_unlike():
    prompts = [f"Think {'hard ' * 40}{end}" for end in ("/a", "/b", "!")]
    names = [trial.name for trial in trials(f"system_prompt={','.join(prompts)}", "seed=1..2")]
    assert len(set(names)) == 6
    assert all(len(name) <= 100 and "/" not in name and " " not in name for name in names)
    assert [trial.name for trial in trials('system_prompt="a b","a?b"')] == [
        "0,system_prompt=a-b",
        "1,system_prompt=a-b",
    ]


def test_values_that_are_the_same_are_refused():
    assert "'1e-6' and '0.000001' are the same learning_rate" in problems("learning_rate=1e-6,0.000001")[0]
    assert "'1' and '1.0' are the same seed" in problems("seed=1,1.0,2")[0]
    assert "stands there twice" in problems("seed=1,1,2")[0]
    assert "'seed' has one value" in problems("seed=1")[0]


@pytest.mark.parametrize(
    ("word", "flags", "needed"),
    [
        ("modebench_vertices=4,5", [], "modebench:graph_coloring"),
        ("cosine_max_len=100,200", [], "cosine_length"),
        ("vllm_importance_sampling_clip_max=2,3", ["--use_vllm", "false"], "use_vllm: true"),
        ("eval_max_prompts=8,16", ["--eval_strategy", "no"], "eval_strategy"),
    ],
)
def test_a_key_that_nothing_reads_is_refused(word, flags, needed):
    (problem,) = problems(word, flags=flags)
    assert "changes nothing in any run" in problem and needed in problem


def test_a_key_that_some_runs_read_is_varied():
    words = ("reward_funcs=pure_accuracy_math,cosine_length", "cosine_max_len=100,200")
    assert len(trials(*words, flags=["--reward_weights", "null"])) == 4


def test_problems_of_all_trials_are_told_at_once():
    told = problems("learning_rate=-1,1e-6", "seed=1..2", flags=["--maxent_tau", "0.5"])
    assert len(told) == 2
    assert told[0].startswith("learning_rate=-1,seed=1 and 1 more: --learning_rate: 'learning_rate' is -1.0")
    assert told[1].startswith("--maxent_tau: ")  # of every trial
