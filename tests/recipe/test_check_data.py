"""What is told of the datasets of a recipe before anything is started."""

from __future__ import annotations

import datasets
import pytest

from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.check import check

RIGHT = '{"problem": "1", "answer": "1"}\n' * 12  # as many as a step of the right recipe needs prompts


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder of the launch, with data in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(RIGHT)
    (tmp_path / "other.csv").write_text("question,gold,level,prompt\n" + "1,2,3,4\n" * 12)
    made = datasets.Dataset.from_list([{"problem": "1", "answer": "1"}] * 12)
    made.to_parquet("rows.parquet")
    made.save_to_disk("one")
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk("both")
    (tmp_path / "empty").mkdir()


def mixture(*entries, **keys):
    return {"dataset_name": None, "dataset_mixture": {"datasets": list(entries), **keys}}


def faults(read, keys):
    """What the types of the keys tell, or else the rules."""
    try:
        return check(read(**keys), {})
    except ConfigError as refused:
        return refused.problems


ROWS, OTHER = {"id": "rows.jsonl"}, {"id": "other.csv", "columns": ["question", "gold", "level"]}
STEPS = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ({"dataset_name": "rows.json"}, {"dataset_name": "rows.jsonl"}, "no file 'rows.json'"),
        ({"dataset_name": "rows.parquet", "dataset_prompt_column": "q"}, {"dataset_name": "rows.parquet"},
         "'rows.parquet' has no column 'q'. Fix: write one of problem, answer"),
        ({"dataset_name": "other.csv", "dataset_prompt_column": "question"},
         {"dataset_name": "other.csv", "dataset_prompt_column": "question", "dataset_solution_column": "gold"},
         "'other.csv' has no column 'answer'. Fix: write one of question, gold, level, prompt"),
        ({"dataset_name": "empty"}, {"dataset_name": "one"}, "'empty' holds no .json"),
        ({"dataset_name": "both", "dataset_train_split": "all"}, {"dataset_name": "both"}, "has no split 'all'"),
        ({"dataset_name": "rows.jsonl", "dataset_config": "main"}, {"dataset_name": "a/b", "dataset_config": "main"},
         "has no configuration 'main'"),
        ({"dataset_mixture": {"datasets": [ROWS]}}, mixture(ROWS), "dataset_mixture and dataset_name are both given"),
        (mixture(), mixture({"id": "a/b"}), "names no datasets"),
        (mixture({"weight": 0.5}), mixture(ROWS | {"weight": 0.5}), "datasets[0]: has no id"),
        (mixture(ROWS | {"weight": 2}), mixture(ROWS | {"weight": 1}), "weight' is 2.0, above 1.0"),
        (mixture(ROWS, {"id": "no.csv"}), mixture(ROWS, OTHER), "datasets[1]: no file 'no.csv'"),
        (mixture(ROWS, OTHER | {"columns": ["question", "answer"]}), mixture(ROWS, OTHER),
         "datasets[1]: 'other.csv' has no column 'answer'. Fix: write one of question, gold, level, prompt"),
        (mixture(OTHER | {"columns": ["question"]}), mixture(OTHER | {"columns": ["question", "gold"]}),
         "datasets[0]: columns are ['question']"),
        (mixture(OTHER | {"columns": "question"}), mixture(OTHER), "datasets[0]: columns are ['question']"),
        (mixture(OTHER | {"columns": ["question", "gold", "prompt"]}), mixture(OTHER), "reserves the column name"),
        (mixture({"id": "smoke:sums"}), {"dataset_name": "smoke:sums"}, "'smoke:sums' cannot be mixed"),
        (mixture(ROWS, test_split_size=1.5), mixture(ROWS, test_split_size=2), "test_split_size is 1.5"),
        (mixture(ROWS, test_split_size=0), mixture(ROWS, test_split_size=0.1), "test_split_size is 0"),
        ({"dataset_name": "smoke:mafia"}, {"dataset_name": "smoke:sums"}, "no built-in 'smoke:mafia'"),
        ({"dataset_streaming": True}, {"dataset_streaming": True, "max_train_prompts": 9}, "would read the stream"),
        (mixture(ROWS) | {"dataset_streaming": True, "max_train_prompts": 9}, mixture(ROWS), "can be streamed"),
        (STEPS | {"dataset_name": "rows.jsonl"}, STEPS | {"dataset_name": "rows.jsonl", "eval_dataset_name": "one"},
         "'rows.jsonl' has no split 'test' to evaluate on. Fix: add eval_dataset_name"),
        (STEPS | {"dataset_name": "one"}, STEPS | {"dataset_name": "both"}, "'one' has no split 'test'"),
        (STEPS | {"dataset_name": "both", "dataset_test_split": "held"}, STEPS | {"dataset_name": "both"},
         "has no split 'held', only train, test"),
        (STEPS | {"dataset_name": "smoke:sums"},
         STEPS | {"dataset_name": "smoke:sums", "eval_dataset_name": "smoke:sums"},
         "add eval_dataset_name: smoke:sums"),
        (STEPS | mixture(ROWS), STEPS | mixture(ROWS, test_split_size=0.1), "nothing is held out"),
        (STEPS | {"eval_dataset_name": "no.jsonl"}, {"eval_dataset_name": "no.jsonl"}, "no file 'no.jsonl'"),
        (STEPS | {"eval_dataset_name": "rows.jsonl", "eval_dataset_prompt_column": "q"},
         STEPS | {"eval_dataset_name": "rows.jsonl"}, "'rows.jsonl' has no column 'q'"),
    ],
)  # fmt: skip
def test_a_wrong_dataset_is_told_and_the_right_one_passes(files, read, wrong, right, said):
    assert faults(read, right) == []
    (problem,) = faults(read, wrong)
    assert said in str(problem)
    assert problem.where.startswith("recipe.yaml")


def test_every_fault_of_a_mixture_is_told_at_once(files, read):
    problems = check(read(**mixture({"id": "a.csv"}, {"id": "b.csv"}, {}, test_split_size=1.5)), {})
    assert [problem.what.partition(":")[0] for problem in problems[:3]] == [
        f"dataset_mixture.datasets[{n}]" for n in range(3)
    ]
    assert len(problems) == 4


def test_names_that_may_be_of_the_hub_are_not_looked_for(files, read):
    assert check(read(**mixture({"id": "a/b"}, {"id": "squad", "config": "x", "split": "y"})), {}) == []


def test_a_mixture_plans_without_a_dataset_name(files, read, planned):
    plan = planned(recipe=read(**mixture(ROWS)))
    assert plan.dataset is None
    assert "--dataset_name" not in plan.process("trainer").argv


def test_a_smoke_run_is_evaluated_on_its_held_out_sums(read, planned):
    names = {"dataset_name": "smoke:sums", "eval_dataset_name": "smoke:sums", "model_name_or_path": "smoke:sums"}
    argv = planned(recipe=read(**STEPS, **names)).process("trainer").argv
    train, test = (argv[argv.index(f"--{key}") + 1] for key in ("dataset_name", "eval_dataset_name"))
    assert train.endswith("/train.jsonl") and test == train.replace("train.jsonl", "test.jsonl")


@pytest.mark.parametrize("column", ["image", "completion", "environment"])
def test_a_reserved_column_that_a_reward_needs_is_named(files, read, tmp_path, column):
    """R2: the message names the column, and its fix works."""
    (tmp_path / "rows.jsonl").write_text(f'{{"problem": "1", "answer": "1", "{column}": "x"}}\n' * 12)
    (tmp_path / "seen.py").write_text(f"def score(completions, {column}):\n    return [0.0]\n")
    keys = {"dataset_name": "rows.jsonl", "reward_funcs": ["seen.py:score"]}
    (problem,) = check(read(**keys), {})
    assert f"needs '{column}', a column that is not passed to rewards (reserved name)" in problem.what
    (tmp_path / "rows.jsonl").write_text(f'{{"problem": "1", "answer": "1", "my_{column}": "x"}}\n' * 12)
    (tmp_path / "seen.py").write_text(f"def score(completions, my_{column}):\n    return [0.0]\n")
    assert check(read(**keys), {}) == []
