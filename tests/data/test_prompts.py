"""Training prompts: columns, system prompt, templates, lengths, counts, streams."""

from __future__ import annotations

import json
import os
from pathlib import Path

import datasets
import pytest
from trl import TrlParser

from grpo_recipes.data import load_prompts
from grpo_recipes.data.prompts import Renderer
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import CONFIGS, ScriptArguments

CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
SYSTEM = {"role": "system", "content": "Theirs."}


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
def test_every_kind_of_file_gives_the_same_prompts(write, load, kind):
    prompts = load(dataset_name=write(kind=kind))
    assert set(prompts.dataset.column_names) == {"prompt", "answer"}
    assert prompts.dataset["prompt"][1] == [{"role": "user", "content": "1+1="}]
    assert prompts.dataset["answer"][1] == "because\n#### 2"
    assert (len(prompts.dataset), prompts.counts.read, prompts.counts.too_long) == (3, 3, 0)
    assert prompts.example == "<|user|>0+1=<|im_end|><|assistant|>"


def test_only_what_follows_the_last_marker_is_the_solution(load):
    rows = [{"problem": "a", "answer": "#### 1 #### 2 "}, {"problem": "b", "answer": "no marker"}]
    prompts = load(rows, dataset_solution_marker="####")
    assert prompts.dataset["answer"][:] == ["2", "no marker"]
    assert "1 without dataset_solution_marker in the solution" in str(prompts)


def test_a_system_prompt_comes_before_every_prompt(load):
    prompts = load(system_prompt="Add.")
    assert [message["role"] for message in prompts.dataset["prompt"][2]] == ["system", "user"]
    assert prompts.example == "<|system|>Add.<|im_end|><|user|>0+1=<|im_end|><|assistant|>"


def test_prompts_that_are_chats_are_kept_as_they_are(load):
    prompts = load([{"problem": CHAT, "answer": "4"}], system_prompt="S")
    assert prompts.dataset["prompt"][:] == [[{"role": "system", "content": "S"}, *CHAT]]


def test_a_chats_own_system_message_stays_and_is_counted(load):
    rows = [{"problem": [SYSTEM, *CHAT], "answer": "4"}, {"problem": CHAT, "answer": "4"}]
    prompts = load(rows, system_prompt="Ours.")
    assert [messages[0]["content"] for messages in prompts.dataset["prompt"]] == ["Theirs.", "Ours."]
    assert "1 with their own system message" in str(prompts)
    assert "system message" not in str(load(rows))


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (CHAT[:2], "ends with an assistant's turn"),
        ([{"role": "user", "content": "1", "name": "bob"}], "remove name from the messages"),
        ([{"speaker": "user", "content": "1"}], "save messages {role, content} with two texts"),
        (["1", "2"], "holds a list of texts"),
        ({"role": "user"}, "expected a text"),
    ],
)
def test_a_chat_that_is_no_prompt_is_refused(load, chat, message):
    with pytest.raises(ConfigError, match=message) as refused:
        load([{"problem": chat, "answer": "4"}])
    assert refused.value.problems[0].where == "dataset_prompt_column"


def test_prompts_longer_than_the_limit_are_dropped_and_counted(load, tokenizer, contents):
    rows = [{"problem": "x" * length, "answer": "1"} for length in (3, 4, 5, 6)]
    rendered = len(tokenizer("<|user|>xxxxx<|im_end|><|assistant|>").input_ids)
    assert rendered == 8
    prompts = load(rows, max_prompt_length=rendered)
    assert [len(text) for text in contents(prompts)] == [3, 4, 5]
    assert (prompts.counts.read, prompts.counts.too_long) == (4, 1)
    expected = "3 prompts (4 read, 1 dropped as longer than max_prompt_length); longest prompt 8 tokens"
    assert str(prompts) == expected


def test_what_the_template_is_given_counts_too(write, tokenizer):
    tokenizer.chat_template = "{{ messages[0]['content'] }}{% if long %}, and this too{% endif %}"
    args = ScriptArguments(dataset_name=write(), max_prompt_length=8)
    assert len(load_prompts(args, tokenizer).dataset) == 3
    with pytest.raises(ConfigError, match="0 of 3 prompts are left"):
        load_prompts(args, tokenizer, template_kwargs={"long": True})


@pytest.mark.parametrize("empty", [None, "", "  "])
@pytest.mark.parametrize("column", ["problem", "answer"])
def test_rows_without_a_prompt_or_a_solution_are_dropped_and_counted(load, contents, column, empty):
    rows = [{"problem": "a", "answer": "1"}, {"problem": "b", "answer": "2"}, {"problem": "c", "answer": "0"}]
    rows[1][column] = empty
    prompts = load(rows)
    assert contents(prompts) == ["a", "c"]
    assert prompts.counts.empty == 1 and "1 without a prompt or a solution dropped" in str(prompts)


def test_equal_rows_are_dropped_and_another_answer_is_kept_and_counted(load):
    rows = [{"problem": p, "answer": a} for p, a in [("a", "1"), ("a", "1"), ("a", "2"), ("b", "1"), ("a", "1")]]
    prompts = load(rows)
    assert prompts.dataset["answer"][:] == ["1", "2", "1"]
    assert (prompts.counts.duplicates, prompts.counts.other_answers) == (2, 1)
    assert "2 equal to an earlier prompt and answer dropped" in str(prompts)
    assert "1 with the prompt of an earlier one and another answer kept" in str(prompts)


@pytest.mark.parametrize(
    ("answers", "texts"),
    [
        ([7, 0], ["7", "0"]),
        ([7, 2.5], ["7", "2.5"]),  # one column of floats to JSON
        ([7, "x"], ["7", "x"]),
        ([True, False], ["true", "false"]),
    ],
)
def test_solutions_that_are_no_texts_become_what_was_written(load, answers, texts):
    prompts = load([{"problem": str(n), "answer": answer} for n, answer in enumerate(answers)])
    assert prompts.dataset["answer"][:] == texts


def test_a_csv_file_is_read_as_texts(load, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('problem,answer,level\n1+1,007,3\n"x, y",NA,\nz,,4\n')
    prompts = load(dataset_name=str(path))
    assert prompts.dataset["answer"][:] == ["007", "NA"]
    assert prompts.dataset["level"][:] == ["3", ""]
    assert prompts.counts.empty == 1


def test_a_solution_that_json_made_a_date_is_refused(load):
    with pytest.raises(ConfigError, match="expected a text"):
        load([{"problem": "When?", "answer": "2020-01-01"}])


@pytest.mark.parametrize("key", ["dataset_prompt_column", "dataset_solution_column"])
def test_a_missing_column_is_refused_with_those_that_exist(load, key):
    with pytest.raises(ConfigError) as refused:
        load(**{key: "question"})
    (problem,) = refused.value.problems
    assert problem.where == key and "no column 'question'" in problem.what
    assert "problem, answer" in problem.fix


def test_other_columns_are_kept_for_rewards_except_reserved_names(load):
    rows = [
        {"question": "1", "gold": 2, "level": 7, "source": "book", "easy": True, "prompt": "p", "answer": "raw"}
        | {"completion_ids": 1, "tags": ["a", "b"]}
    ]
    prompts = load(rows, dataset_prompt_column="question", dataset_solution_column="gold")
    assert prompts.dataset[0] == {
        "prompt": [{"role": "user", "content": "1"}],
        "answer": "2",
        "level": 7,
        "source": "book",
        "easy": True,
        "tags": ["a", "b"],
    }
    reserved = "prompt (reserved name), answer (reserved name), completion_ids (reserved name)"
    assert f"columns not passed to rewards: {reserved}" in str(prompts)


@pytest.mark.parametrize(("least", "enough"), [(2, True), (3, True), (4, False)])
def test_too_few_prompts_for_one_step_are_refused(load, least, enough):
    if enough:
        assert len(load(least=least).dataset) == 3
    else:
        with pytest.raises(ConfigError, match="3 of 3 prompts are left, one step needs 4"):
            load(least=least)


def test_a_limit_that_no_prompt_meets_is_refused(load):
    with pytest.raises(ConfigError, match=r"3 longer than max_prompt_length\. Fix: raise"):
        load(max_prompt_length=2)


def test_max_train_prompts_takes_the_first_usable_of_a_shuffle_by_the_seed(load, contents):
    rows = [{"problem": f"p{n:02}", "answer": "1" if n % 2 else ""} for n in range(40)]
    first, repeated, other = (load(rows, max_train_prompts=10, seed=seed) for seed in (1, 1, 2))
    assert len(contents(first)) == 10 and all(int(text[1:]) % 2 for text in contents(first))
    assert contents(first) == contents(repeated) != contents(other)
    assert contents(first) != sorted(contents(first))
    assert "the first 10 of the shuffle by the seed" in str(first)
    assert len(load(rows, max_train_prompts=30).dataset) == 20


def test_too_few_rows_are_not_blamed_on_a_limit(load):
    with pytest.raises(ConfigError, match="lower prompts_per_step, or name a larger dataset"):
        load(max_prompt_length=100, least=4)


def test_too_small_a_max_train_prompts_is_told(load):
    with pytest.raises(ConfigError, match="raise max_train_prompts or lower prompts_per_step"):
        load(max_train_prompts=2, least=3)


def broken_at_its_end(path: Path) -> str:
    """14 MB of rows, more than the 10 MB that are read at a time, the last of them no JSON."""
    rows = (json.dumps({"problem": f"p{n:05}", "answer": "1" if n else "", "padding": "x" * 2800}) for n in range(5000))
    path.write_text("\n".join(rows) + '\n{"problem": broken\n')
    return str(path)


def test_a_stream_is_read_no_further_than_it_must(load, contents, tmp_path):
    name = broken_at_its_end(tmp_path / "rows.jsonl")
    prompts = load(dataset_name=name, dataset_streaming=True, max_train_prompts=5)
    assert contents(prompts) == ["p00001", "p00002", "p00003", "p00004", "p00005"]
    assert prompts.counts.read == 10 and "the first 5 of the stream" in str(prompts)
    with pytest.raises(ConfigError, match=r"rows.jsonl.*cannot be read: JSON parse error"):
        load(dataset_name=name, max_train_prompts=5)


def test_a_stream_that_breaks_before_it_gave_enough_is_refused(load, tmp_path):
    name = broken_at_its_end(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"rows.jsonl.*cannot be read: JSON parse error"):
        load(dataset_name=name, dataset_streaming=True, max_train_prompts=5001)


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "saved"])
def test_every_kind_of_file_is_a_stream(write, load, kind):
    rows = [{"problem": str(n), "answer": str(n), "level": n} for n in range(9)]
    prompts = load(dataset_name=write(rows, kind), dataset_streaming=True, max_train_prompts=4)
    assert prompts.dataset["answer"][:] == ["0", "1", "2", "3"]
    assert prompts.dataset["level"][:] == ([str(n) for n in range(4)] if kind == "csv" else [0, 1, 2, 3])


def test_what_was_fetched_is_read_in_place_of_the_hub(write, tokenizer, tmp_path):
    folder = tmp_path / "fetched"
    datasets.Dataset.from_list([{"problem": "here", "answer": "1"}]).save_to_disk(folder)
    requests = []

    def fetched(*source):
        requests.append(source)
        return folder

    args = ScriptArguments(dataset_name="some/set", dataset_config="main", dataset_train_split="train[:9]")
    prompts = load_prompts(args, tokenizer, fetched=fetched)
    assert prompts.dataset["prompt"][0][0]["content"] == "here"
    assert requests == [("some/set", "main", "train[:9]")]
    mixture = {"datasets": [{"id": "other/set", "split": "extra"}]}
    load_prompts(ScriptArguments(dataset_mixture=mixture), tokenizer, fetched=fetched)
    assert requests[1:] == [("other/set", None, "extra")]


def test_the_trainer_gets_data_keys_as_the_recipe_has_them(tmp_path, write, tokenizer):
    path, frozen = tmp_path / "recipe.yaml", tmp_path / "frozen.yaml"
    path.write_text(
        "model_name_or_path: a/b\nmax_train_prompts: 2\n"
        f"dataset_mixture:\n  seed: '3'\n  datasets:\n    - {{id: {write()}, weight: 0.7}}\n"
    )
    frozen.write_text(read_recipe(path).as_yaml())
    parser = TrlParser(CONFIGS, allow_abbrev=False)
    arguments = ["--config", str(frozen), "--output_dir", str(tmp_path / "out"), "--use_cpu", "--bf16", "false"]
    script_args, _, _ = parser.parse_args_and_config(arguments)
    prompts = load_prompts(script_args, tokenizer)
    assert (prompts.counts.read, len(prompts.dataset)) == (2, 2)


def test_columns_that_are_left_out_are_not_decoded(load, tmp_path):
    text = datasets.Value("string")
    features = datasets.Features({"problem": text, "answer": text, "picture": datasets.Image()})
    rows = {"problem": ["1"], "answer": ["2"], "picture": [{"bytes": b"no picture", "path": None}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "pictures")
    prompts = load(dataset_name=str(tmp_path / "pictures"))
    assert prompts.dataset.column_names == ["prompt", "answer"]
    assert "columns not passed to rewards: picture (media)" in str(prompts)


@pytest.mark.parametrize("setting", ["false", None])
def test_prompts_are_tokenized_on_all_cores_and_the_setting_returns(load, monkeypatch, setting):
    if setting is None:
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    else:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", setting)
    settings = []
    ids = Renderer.ids
    monkeypatch.setattr(
        Renderer, "ids",
        lambda *args: settings.append(os.environ.get("TOKENIZERS_PARALLELISM")) or ids(*args),
    )  # fmt: skip
    load()
    assert settings == ["true"] and os.environ.get("TOKENIZERS_PARALLELISM") == setting
