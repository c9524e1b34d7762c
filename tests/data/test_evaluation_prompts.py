"""The prompts that training is evaluated on."""

from __future__ import annotations

import datasets
import pytest

from grpo_recipes.data import load_eval_prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import ScriptArguments

TEN = [{"problem": f"p{n}", "answer": str(n)} for n in range(10)]


@pytest.fixture
def load_eval(tokenizer, write):
    def load_it(seed=0, **keys):
        keys = {"dataset_name": write(name="train"), **keys}
        return load_eval_prompts(ScriptArguments(**keys), tokenizer, seed)

    return load_it


def big(write, count=1319):
    return write([{"problem": f"p{n}", "answer": str(n)} for n in range(count)], name="test")


def test_all_rows_are_taken_up_to_the_limit(load_eval, write):
    """S12: every held-out row is evaluated by default, at most eval_max_prompts."""
    prompts = load_eval(eval_dataset_name=big(write, 40))
    assert str(prompts).startswith("evaluating on 40 of 40 rows (eval_max_prompts 1000)")
    assert str(load_eval(eval_dataset_name=big(write))).startswith("evaluating on 1000 of 1319 rows")


def test_a_tenth_is_drawn_by_the_seed_and_the_size_is_printed(load_eval, write, contents):
    name = big(write)
    first, repeated, other = (load_eval(seed, eval_dataset_name=name, eval_subsample=0.1) for seed in (1, 1, 2))
    assert str(first).startswith("evaluating on 132 of 1319 rows (eval_max_prompts 1000, eval_subsample 0.1)")
    assert len(first.dataset) == 132
    assert contents(first) == contents(repeated)
    assert {*contents(first)} != {*contents(other)}


@pytest.mark.parametrize(("subsample", "most", "expected"), [(1.0, 1000, 1000), (1.0, 20, 20), (0.0001, 1000, 1)])
def test_the_size_has_a_largest_and_a_smallest(load_eval, write, subsample, most, expected):
    prompts = load_eval(eval_dataset_name=big(write), eval_subsample=subsample, eval_max_prompts=most)
    assert len(prompts.dataset) == expected


def test_what_is_too_long_is_made_up_for_by_others(load_eval, write, contents):
    rows = [{"problem": "x" * (1 + 50 * (n % 2)), "answer": str(n)} for n in range(100)]
    prompts = load_eval(eval_dataset_name=write(rows, name="test"), max_prompt_length=20, eval_subsample=0.1)
    assert contents(prompts) == ["x"] * 10 and prompts.counts.too_long > 0


def test_columns_of_its_own_replace_those_of_training(load_eval, write, contents):
    name = write([{"q": "1", "a": "2", "problem": "3", "answer": "4"}], name="test")
    assert contents(load_eval(eval_dataset_name=name)) == ["3"]
    prompts = load_eval(eval_dataset_name=name, eval_dataset_prompt_column="q", eval_dataset_solution_column="a")
    assert (contents(prompts), prompts.dataset["answer"][:]) == (["1"], ["2"])
    with pytest.raises(ConfigError, match=r"eval_dataset_solution_column: .*no column 'gold'"):
        load_eval(eval_dataset_name=name, eval_dataset_solution_column="gold")


def test_system_prompt_and_marker_are_those_of_training(load_eval, write):
    name = write([{"problem": "1", "answer": "x #### 2"}], name="test")
    prompts = load_eval(eval_dataset_name=name, system_prompt="S", dataset_solution_marker="####")
    assert prompts.dataset["prompt"][0][0] == {"role": "system", "content": "S"}
    assert prompts.dataset["answer"][:] == ["2"]


def test_without_a_set_of_its_own_the_test_split_is_taken(load_eval, tmp_path, contents):
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(TEN[:8]), "held": datasets.Dataset.from_list(TEN[8:])}
    )
    splits.save_to_disk(tmp_path / "both")
    keys = {"dataset_name": str(tmp_path / "both"), "eval_subsample": 1.0}
    assert sorted(contents(load_eval(**keys, dataset_test_split="held"))) == ["p8", "p9"]
    with pytest.raises(ConfigError, match="test"):
        load_eval(**keys)


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_a_single_file_has_no_test_split(load_eval, write, kind):
    with pytest.raises(ConfigError, match=r"has no split 'test' to evaluate on.*add eval_dataset_name"):
        load_eval(dataset_name=write(TEN, kind, "only"))


def test_a_split_and_a_configuration_of_its_own_are_read(load_eval, write, contents):
    name = write(TEN, name="test")
    assert sorted(contents(load_eval(eval_dataset_name=name, eval_dataset_split="test[:2]", eval_subsample=1.0))) == [
        "p0",
        "p1",
    ]
    with pytest.raises(ConfigError, match="no configuration 'main'"):
        load_eval(eval_dataset_name=name, eval_dataset_config="main")


def test_a_mixture_that_holds_nothing_out_is_refused(load_eval, write):
    with pytest.raises(ConfigError, match="test_split_size"):
        load_eval(dataset_name=None, dataset_mixture={"datasets": [{"id": write(TEN)}]})


def test_a_set_of_its_own_comes_before_the_mixtures(load_eval, write, contents):
    mixture = {"datasets": [{"id": write(TEN)}], "test_split_size": 2}
    name = write([{"problem": "own", "answer": "1"}], name="test")
    assert contents(load_eval(dataset_name=None, dataset_mixture=mixture, eval_dataset_name=name)) == ["own"]


def test_a_stream_is_read_as_far_as_the_largest_size_needs(load_eval, write, contents):
    keys = {"eval_dataset_name": big(write), "dataset_streaming": True, "max_train_prompts": 5}
    prompts = load_eval(**keys, eval_max_prompts=10, eval_subsample=0.5)
    assert len(prompts.dataset) == 10 and {*contents(prompts)} <= {f"p{n}" for n in range(20)}


def test_nothing_left_to_evaluate_on_is_refused(load_eval, write):
    with pytest.raises(ConfigError, match="no evaluation prompt is left"):
        load_eval(eval_dataset_name=write(TEN, name="test"), max_prompt_length=1)
