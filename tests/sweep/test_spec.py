"""What is read of ``key=values``, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_recipes.errors import ConfigError
from grpo_recipes.sweep.spec import read_axes


def values(word: str) -> list[str]:
    (axis,) = read_axes([word], [])
    return list(axis.values)


@pytest.mark.parametrize(
    ("word", "found"),
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
def test_values_are_read(word, found):
    assert values(word) == found


def test_other_names_of_a_key_are_that_key():
    (axis,) = read_axes(["gen-temperature=0.7,1.0"], [])
    assert axis.key == "temperature"


@pytest.mark.parametrize(
    ("word", "what", "fix"),
    [
        ("sed=1,2", "unknown key 'sed'", "write 'seed'"),
        ("foo", "is not key=value,value", "e.g. seed=1..3"),
        ("seed=", "has an empty value", "between commas"),
        ("seed=1,,2", "has an empty value", "between commas"),
        ("seed=1..", "'1..' is not a range", "seed=1..3"),
        ("seed=..3", "'..3' is not a range", "seed=1..3"),
        ("seed=1..3..5", "is not a range", "seed=1..3"),
        ("temperature=0.5..1.5", "is not a range of whole numbers", "temperature=1..3"),
        ("seed=3..1", "runs backwards", "write seed=1..3"),
        ("seed=1..100000", "more than 1,000 values", "fewer"),
        ('system_prompt="a', "quotes", "quote a whole value"),
        ("system_prompt=a\nb", "line ends", "quote a whole value"),
        ("run_name=a,b", "the sweep's to set", "--name"),
        ("run_root=a,b", "the sweep's to set", "--run_root"),
        ("output_dir=a,b", "not a recipe's to set", "run_root"),
        ("clip_range=0.1,0.2", "obsolete", "epsilon"),
        ("report_to=none,wandb", "changes nothing in what is learned", "--report_to"),
        ("save_steps=5,10", "changes nothing in what is learned", "--save_steps"),
    ],
)
def test_what_cannot_be_varied_is_refused_with_the_edit(word, what, fix):
    with pytest.raises(ConfigError) as refused:
        read_axes([word], [])
    (problem,) = refused.value.problems
    assert what in problem.what and fix in problem.fix


def test_a_key_is_given_once():
    with pytest.raises(ConfigError, match="swept twice"):
        read_axes(["beta=0,1", "init_kl_coeff=2,3"], [])
    for flags in (["--seed", "7"], ["--seed=7"]):
        with pytest.raises(ConfigError, match="--seed is given too"):
            read_axes(["seed=1..2"], flags)


def test_everything_wrong_is_told_at_once():
    with pytest.raises(ConfigError) as refused:
        read_axes(["seed=3..1", "sed=1,2", "beta=1.."], [])
    assert len(refused.value.problems) == 3


def test_a_sweep_has_trials_but_not_too_many():
    assert len(read_axes(["seed=1..40", "max_steps=1..25"], [])) == 2
    with pytest.raises(ConfigError, match="1,040 runs are more than 1,000"):
        read_axes(["seed=1..40", "max_steps=1..26"], [])
    with pytest.raises(ConfigError, match="nothing is varied"):
        read_axes([], [])


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        assert read_axes([f"seed={text}"], [])[0].values
    except ConfigError as refused:
        assert refused.problems
