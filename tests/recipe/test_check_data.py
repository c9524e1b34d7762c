"""Check the datasets of a recipe before a run starts."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest
from golden import compare_messages, golden_files

from grpo_recipes.recipe.check import check

RIGHT = '{"problem": "1", "answer": "1"}\n' * 12  # one row for each prompt of a step


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Change to a folder with data files, as at a launch."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(RIGHT)
    (tmp_path / "other.csv").write_text("question,gold,level,prompt\n" + "1,2,3,4\n" * 12)
    dataset = datasets.Dataset.from_list([{"problem": "1", "answer": "1"}] * 12)
    dataset.to_parquet("rows.parquet")
    dataset.save_to_disk("one")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk("both")
    (tmp_path / "empty").mkdir()


def mixture(*entries, **keys):
    return {"dataset_name": None, "dataset_mixture": {"datasets": list(entries), **keys}}


ROWS, OTHER = {"id": "rows.jsonl"}, {"id": "other.csv", "columns": ["question", "gold", "level"]}
STEPS = {"eval_strategy": "steps", "eval_steps": 5}


@pytest.mark.parametrize("path", golden_files(__file__, "data"))
def test_a_wrong_dataset_is_told_and_the_right_one_passes(files, read, path):
    compare_messages(path, read)


def test_every_fault_of_a_mixture_is_told_at_once(files, read):
    problems = check(read(**mixture({"id": "a.csv"}, {"id": "b.csv"}, {}, test_split_size=1.5)), {})
    assert [problem.what.partition(":")[0] for problem in problems[:3]] == [
        f"dataset_mixture.datasets[{n}]" for n in range(3)
    ]
    assert len(problems) == 4


def test_names_that_may_be_of_the_hub_are_not_looked_for(files, read):
    assert check(read(**mixture({"id": "a/b"}, {"id": "squad", "config": "x", "split": "y"})), {}) == []


def test_the_column_of_a_filter_is_looked_up_in_a_local_file(files, read):
    keys = {"dataset_name": "other.csv", "dataset_prompt_column": "question", "dataset_solution_column": "gold"}
    assert check(read(**keys, dataset_filter="level in 1..3"), {}) == []
    (problem,) = check(read(**keys, dataset_filter="levels in 1..3"), {})
    assert problem.what == "dataset_filter: 'other.csv' has no column 'levels'"
    assert problem.fix == "write one of question, gold, level, prompt"
    Path("words.jsonl").write_text('{"problem": "a", "answer": "1"}\n' * 12)
    (problem,) = check(read(dataset_name="words.jsonl", dataset_filter="problem in 1..3"), {})
    assert problem.what == "dataset_filter: column 'problem' of 'words.jsonl' has no number in its first rows"


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
