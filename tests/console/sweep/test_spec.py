"""``key=values`` arguments: parsing, the trials they create, and rejected values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_recipes.console.sweep.spec import SweepSpec, make_trials, read_axes
from grpo_recipes.errors import ConfigError
from grpo_recipes.paths import find_code_root

MATH = find_code_root() / "recipes/Qwen2.5-1.5B-Instruct/grpo/config_math.yaml"


def values(word: str) -> list[str]:
    (texts,) = read_axes([word], []).values()
    return texts


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("learning_rate=1e-6,3e-6", ["1e-6", "3e-6"]),
        ("seed=1..3", ["1", "2", "3"]),
        ("seed=1..2,7", ["1", "2", "7"]),
        ("beta=-1..1", ["-1", "0", "1"]),
        ("loss_type=grpo, dapo", ["grpo", "dapo"]),
        ('reward_weights="1,0.5","0.5,1"', ["1,0.5", "0.5,1"]),
        ("system_prompt=a..b,c=d", ["a..b", "c=d"]),
        ("max-steps=1,2", ["1", "2"]),
        ('generation_kwargs={"a": 1},{a: 2}', ['{"a": 1}', "{a: 2}"]),
    ],
)
def test_values_are_read(word, expected):
    assert values(word) == expected


def test_other_names_of_a_key_are_that_key():
    assert read_axes(["gen-temperature=0.7,1.0"], []) == {"temperature": ["0.7", "1.0"]}


@pytest.mark.parametrize(
    ("word", "cause", "fix"),
    [
        ("sed=1,2", "unknown key 'sed'", "write 'seed'"),
        ("foo", "expected key=value,value", "e.g. seed=1..3"),
        ("seed=", "has an empty value", "between commas"),
        ("seed=1,,2", "has an empty value", "between commas"),
        ("seed=1..", "'1..' is not a range", "seed=1..3"),
        ("seed=..3", "'..3' is not a range", "seed=1..3"),
        ("seed=1..3..5", "is not a range", "seed=1..3"),
        ("temperature=0.5..1.5", "is not a range of whole numbers", "temperature=1..3"),
        ("seed=3..1", "is reversed", "use seed=1..3"),
        ("seed=1..100000", "more than 1,000 values", "fewer"),
        ('system_prompt="a', "quotes", "quote a whole value"),
        ("system_prompt=a\nb", "line ends", "quote a whole value"),
        ("run_name=a,b", "is set by the sweep", "--name"),
        ("run_root=a,b", "is set by the sweep", "--run_root"),
        ("output_dir=a,b", "cannot be set in a recipe", "run_root"),
        ("clip_range=0.1,0.2", "not a key here", "epsilon"),
        ("report_to=none,wandb", "does not change the training", "--report_to"),
        ("save_steps=5,10", "does not change the training", "--save_steps"),
    ],
)
def test_what_cannot_be_varied_is_refused_with_the_edit(word, cause, fix):
    with pytest.raises(ConfigError) as refused:
        read_axes([word], [])
    (problem,) = refused.value.problems
    assert cause in problem.what and fix in problem.fix


def test_a_key_is_given_once():
    with pytest.raises(ConfigError, match="swept twice"):
        read_axes(["beta=0,1", "init_kl_coeff=2,3"], [])
    for flags in (["--seed", "7"], ["--seed=7"]):
        with pytest.raises(ConfigError, match="can't be combined with --seed"):
            read_axes(["seed=1..2"], flags)


def test_everything_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        read_axes(["seed=3..1", "sed=1,2", "beta=1.."], [])
    assert len(refused.value.problems) == 3


def test_a_sweep_has_trials_but_not_too_many():
    assert len(read_axes(["seed=1..40", "max_steps=1..25"], [])) == 2
    with pytest.raises(ConfigError, match="1,040 runs are more than 1,000"):
        read_axes(["seed=1..40", "max_steps=1..26"], [])
    with pytest.raises(ConfigError, match="no key is varied"):
        read_axes([], [])


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        assert read_axes([f"seed={text}"], [])["seed"]
    except ConfigError as refused:
        assert refused.problems


def trials(*words, flags=(), path=MATH, environment=None):
    return make_trials(SweepSpec(str(path), read_axes(words, flags), flags), environment or {}, "cpu")


def problems(*words, **keys):
    with pytest.raises(ConfigError) as refused:
        trials(*words, **keys)
    return [str(problem) for problem in refused.value.problems]


def test_trials_are_every_combination():
    combinations = trials("learning_rate=1e-6,3e-6", "seed=1..3", flags=["--max_steps", "9"])
    assert [trial.name for trial in combinations[:4]] == [
        "learning_rate=1e-6,seed=1", "learning_rate=1e-6,seed=2", "learning_rate=1e-6,seed=3",
        "learning_rate=3e-6,seed=1",
    ]  # fmt: skip
    assert [trial.index for trial in combinations] == list(range(6))
    assert [(trial.recipe["learning_rate"], trial.recipe["seed"]) for trial in combinations[2:4]] == [
        (1e-6, 3),
        (3e-6, 1),
    ]
    assert {trial.recipe["max_steps"] for trial in combinations} == {9}


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
    assert "'1' and '1' are the same seed" in problems("seed=1,1,2")[0]
    assert "'seed' has only one value" in problems("seed=1")[0]


@pytest.mark.parametrize(
    ("word", "flags", "needed"),
    [
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
    assert told[0].startswith("learning_rate=-1,seed=1 and 1 more: --learning_rate: ")
    assert told[1].startswith("--maxent_tau: ")  # the problem concerns every trial
