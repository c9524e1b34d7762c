"""Prompts from files: columns, templates, lengths."""

from __future__ import annotations

import csv
import json

import pytest

datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")

from grpo_recipes import smoke  # noqa: E402
from grpo_recipes.configs import ScriptArguments  # noqa: E402
from grpo_recipes.data import load_prompts  # noqa: E402
from grpo_recipes.errors import Refused  # noqa: E402

ROWS = [{"problem": f"{n}+1=", "answer": f"because\n#### {n + 1}"} for n in range(3)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def tokenizer():
    return smoke.build_tokenizer()


def saved(folder, kind, rows=ROWS):
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        path.write_text(json.dumps(rows))
    elif kind == "csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_every_kind_of_file_gives_the_same_prompts(tmp_path, tokenizer, kind):
    prompts = load_prompts(ScriptArguments(dataset_name=saved(tmp_path, kind)), tokenizer)
    assert set(prompts.dataset.column_names) == {"prompt", "answer"}
    assert prompts.dataset["prompt"][1] == [{"role": "user", "content": "1+1="}]
    assert prompts.dataset["answer"][1] == "because\n#### 2"
    assert (len(prompts.dataset), prompts.read, prompts.dropped) == (3, 3, 0)
    assert prompts.example == "<|user|>0+1=<|im_end|><|assistant|>"


def test_only_what_follows_the_last_marker_is_the_solution(tmp_path, tokenizer):
    rows = [*ROWS, {"problem": "x", "answer": "#### 1 #### 2 "}, {"problem": "y", "answer": "no marker"}]
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl", rows), dataset_solution_marker="####")
    assert load_prompts(args, tokenizer).dataset["answer"][:] == ["1", "2", "3", "2", "no marker"]


def test_a_system_prompt_comes_before_every_prompt(tmp_path, tokenizer):
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl"), system_prompt="Add.")
    prompts = load_prompts(args, tokenizer)
    assert [message["role"] for message in prompts.dataset["prompt"][2]] == ["system", "user"]
    assert prompts.example == "<|system|>Add.<|im_end|><|user|>0+1=<|im_end|><|assistant|>"


def test_prompts_that_are_chats_are_kept_as_they_are(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl", [{"problem": chat, "answer": "4"}]), system_prompt="S")
    (messages,) = load_prompts(args, tokenizer).dataset["prompt"][:]
    assert messages == [{"role": "system", "content": "S"}, *chat]


def test_prompts_longer_than_the_limit_are_dropped_and_counted(tmp_path, tokenizer):
    rows = [{"problem": "x" * length, "answer": "1"} for length in (3, 4, 5, 6)]
    path = saved(tmp_path, "jsonl", rows)
    rendered = len(tokenizer("<|user|>xxxxx<|im_end|><|assistant|>").input_ids)
    assert rendered == 8
    prompts = load_prompts(ScriptArguments(dataset_name=path, max_prompt_length=rendered), tokenizer)
    assert [len(row[0]["content"]) for row in prompts.dataset["prompt"]] == [3, 4, 5]
    assert (prompts.read, prompts.dropped) == (4, 1)
    assert str(prompts) == "3 prompts (4 read, 1 dropped as longer than max_prompt_length)"


@pytest.mark.parametrize("key", ["dataset_prompt_column", "dataset_solution_column"])
def test_a_missing_column_is_refused_with_those_that_exist(tmp_path, tokenizer, key):
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl"), **{key: "question"})
    with pytest.raises(Refused) as refused:
        load_prompts(args, tokenizer)
    (problem,) = refused.value.problems
    assert problem.where == key and "no column 'question'" in problem.what
    assert "problem, answer" in problem.fix


def test_other_columns_can_be_named_and_the_rest_is_left_out(tmp_path, tokenizer):
    rows = [{"question": "1", "gold": 2, "id": 7}]
    args = ScriptArguments(
        dataset_name=saved(tmp_path, "jsonl", rows), dataset_prompt_column="question", dataset_solution_column="gold"
    )
    prompts = load_prompts(args, tokenizer)
    assert prompts.dataset[0] == {"prompt": [{"role": "user", "content": "1"}], "answer": "2"}


@pytest.mark.parametrize(("least", "enough"), [(2, True), (3, True), (4, False)])
def test_too_few_prompts_for_one_step_are_refused(tmp_path, tokenizer, least, enough):
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl"))
    if enough:
        assert len(load_prompts(args, tokenizer, least=least).dataset) == 3
    else:
        with pytest.raises(Refused, match="3 of 3 prompts are left, one step needs 4"):
            load_prompts(args, tokenizer, least=least)


def test_a_limit_that_no_prompt_meets_is_refused(tmp_path, tokenizer):
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl"), max_prompt_length=2)
    with pytest.raises(Refused, match="raise max_prompt_length"):
        load_prompts(args, tokenizer)


def test_a_template_of_the_recipe_replaces_the_tokenizers(tmp_path, tokenizer):
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    args = ScriptArguments(dataset_name=saved(tmp_path, "jsonl"), chat_template=template)
    assert load_prompts(args, tokenizer).example == "[0+1=]"
    assert tokenizer.chat_template == template


def test_a_tokenizer_without_a_template_is_refused(tmp_path, tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(Refused, match="chat_template"):
        load_prompts(ScriptArguments(dataset_name=saved(tmp_path, "jsonl")), tokenizer)
