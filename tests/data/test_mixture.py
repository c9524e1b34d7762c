"""Several datasets as one."""

from __future__ import annotations

import pytest

from grpo_recipes.data import load_eval_prompts
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import ScriptArguments


def rows(letter: str, count: int, **columns) -> list[dict]:
    return [{"problem": f"{letter}{n:03}", "answer": str(n), **columns} for n in range(count)]


def mixture(*entries: dict, **keys) -> dict:
    return {"datasets": list(entries), **keys}


@pytest.fixture
def two(write):
    """Write a.jsonl with 100 rows, and b.jsonl with 50 rows and other column names."""
    other = [{"question": row["problem"], "gold": row["answer"], "level": 3} for row in rows("b", 50, level=3)]
    return write(rows("a", 100, level=1, kind="x"), name="a"), write(other, name="b")


def test_a_mixture_joins_and_shuffles_and_says_where_rows_come_from(load, contents, two):
    first, second = two
    recipe_mixture = mixture({"id": first}, {"id": second, "columns": ["question", "gold", "level"]}, seed=1)
    prompts = load(dataset_mixture=recipe_mixture)
    texts = contents(prompts)
    assert len(texts) == 150 and {text[0] for text in texts[:30]} == {"a", "b"}
    assert texts != sorted(texts)
    by_source = {(text[0], source) for text, source in zip(texts, prompts.dataset["source"], strict=True)}
    assert by_source == {("a", first), ("b", second)}
    assert set(prompts.dataset.column_names) == {"prompt", "answer", "source", "level"}
    assert "not passed to rewards: kind (not in every dataset of the mixture)" in str(prompts)
    assert (
        contents(load(dataset_mixture=recipe_mixture))
        == texts
        != contents(load(dataset_mixture={**recipe_mixture, "seed": 2}))
    )


def test_a_column_source_of_a_datasets_own_is_told_when_it_goes(load, write):
    path = write(rows("a", 3, source="olympiads"))
    prompts = load(dataset_mixture=mixture({"id": path}))
    assert set(prompts.dataset["source"]) == {path}
    assert f"column 'source' of '{path}' replaced by the dataset's id" in str(prompts)


def test_a_weight_is_the_share_of_rows_used_drawn_by_the_seed(load, contents, two):
    first, second = two
    entries = {"id": first, "weight": 0.1}, {"id": second, "columns": ["question", "gold"], "weight": 0.5}
    texts, other_texts = (contents(load(dataset_mixture=mixture(*entries, seed=seed))) for seed in (1, 2))
    assert (sum(text[0] == "a" for text in texts), sum(text[0] == "b" for text in texts)) == (10, 25)
    assert {*texts} != {*other_texts}
    assert {text for text in texts if text[0] == "a"} != {f"a{n:03}" for n in range(10)}
    tiny = load(dataset_mixture=mixture({"id": first, "weight": 0.001}))
    assert len(tiny.dataset) == 1


def test_columns_beyond_the_first_two_are_all_that_is_kept(load, write):
    path = write([{**row, "tests": ["1", "2"]} for row in rows("a", 3, level=1, kind="x")])
    named = load(dataset_mixture=mixture({"id": path, "columns": ["problem", "answer", "tests"]})).dataset
    assert set(named.column_names) == {"prompt", "answer", "source", "tests"} and named["tests"][0] == ["1", "2"]
    unnamed = load(dataset_mixture=mixture({"id": path})).dataset
    assert set(unnamed.column_names) == {"prompt", "answer", "source", "tests", "level", "kind"}


def test_a_column_of_two_types_is_left_out(load, write):
    recipe_mixture = mixture(
        {"id": write(rows("a", 2, level=1), name="a")}, {"id": write(rows("b", 2, level="x"), name="b")}
    )
    assert "level" not in load(dataset_mixture=recipe_mixture).dataset.column_names


def test_csv_and_json_mix(load, write):
    recipe_mixture = mixture({"id": write(rows("a", 2), "csv", "a")}, {"id": write(rows("b", 2), name="b")})
    assert sorted(load(dataset_mixture=recipe_mixture).dataset["answer"]) == ["0", "0", "1", "1"]


def test_duplicates_of_different_datasets_are_dropped(load, write):
    recipe_mixture = mixture({"id": write(rows("a", 5), name="a")}, {"id": write(rows("a", 7), name="b")})
    prompts = load(dataset_mixture=recipe_mixture)
    assert (len(prompts.dataset), prompts.counts.duplicates) == (7, 5)


def test_splits_and_slices_of_entries_are_read(load, contents, two):
    assert len(load(dataset_mixture=mixture({"id": two[0], "split": "train[:20]"})).dataset) == 20


def test_a_missing_column_names_the_dataset(load, two):
    with pytest.raises(
        ConfigError, match=r"dataset_mixture: .*b.jsonl' has no column 'problem'.*question, gold, level"
    ):
        load(dataset_mixture=mixture({"id": two[0]}, {"id": two[1]}))
    with pytest.raises(ConfigError, match=r"has no column 'grade'"):
        load(dataset_mixture=mixture({"id": two[1], "columns": ["question", "gold", "grade"]}))


@pytest.mark.parametrize(("size", "held_out"), [(0.1, 10), (7, 7), (0.001, 1)])
def test_held_out_rows_are_evaluated_on_and_not_trained_on(load, contents, tokenizer, write, size, held_out):
    keys = {"dataset_mixture": mixture({"id": write(rows("a", 100))}, test_split_size=size, seed=5)}
    train = contents(load(**keys))
    args = ScriptArguments(**keys, eval_subsample=1.0)
    test, repeated = (contents(load_eval_prompts(args, tokenizer, seed)) for seed in (0, 0))
    assert (len(train), len(test)) == (100 - held_out, held_out)
    assert {*train}.isdisjoint(test) and {*train, *test} == {f"a{n:03}" for n in range(100)}
    assert test == repeated


def test_a_prompt_with_several_answers_is_never_on_both_sides(load, contents, tokenizer, write):
    problem_rows = [{"problem": f"p{n}", "answer": str(answer)} for n in range(20) for answer in range(5)]
    for seed in range(5):
        keys = {"dataset_mixture": mixture({"id": write(problem_rows)}, test_split_size=0.32, seed=seed)}
        train = contents(load(**keys))
        test = contents(load_eval_prompts(ScriptArguments(**keys, eval_subsample=1.0), tokenizer, 0))
        assert {*train}.isdisjoint(test) and len(train) == 65 and len(test) == 35


def test_holding_out_everything_is_refused(load, two):
    with pytest.raises(ConfigError, match="leaves none to train on"):
        load(dataset_mixture=mixture({"id": two[0]}, test_split_size=100))


def test_max_train_prompts_and_lengths_apply_to_a_mixture(load, contents, two):
    recipe_mixture = mixture({"id": two[0]})
    assert (
        contents(load(dataset_mixture=recipe_mixture, max_train_prompts=9))
        == contents(load(dataset_mixture=recipe_mixture))[:9]
    )
    with pytest.raises(ConfigError, match="raise max_prompt_length"):
        load(dataset_mixture=recipe_mixture, max_prompt_length=2)
