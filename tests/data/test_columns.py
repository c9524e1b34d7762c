"""R2: columns of every plain kind reach rewards, as in TRL."""

from __future__ import annotations

import datasets
import pytest

from grpo_recipes.data.prompts import load_first_problems
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rewards.probe import probe_rewards

TESTS = [{"input": ["1", "2"], "output": "3"}]
NESTED = {"nums": [3, 5], "choices": ["a", "b"], "test_cases": TESTS, "extra_info": {"index": 4, "split": "train"}}
PLAIN = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "add"}], "level": 2, "easy": True}
ROWS = [{"problem": f"{n}+1=", "answer": str(n + 1)} | NESTED | PLAIN for n in range(3)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_lists_and_dictionaries_reach_rewards(load, write, kind, streaming):
    """R2: nested columns have the values of the file."""
    keys = {"dataset_streaming": True, "max_train_prompts": 3} if streaming else {}
    prompts = load(dataset_name=write(ROWS, kind), **keys)
    row = prompts.dataset[0]
    assert {name: row[name] for name in NESTED | PLAIN} == NESTED | PLAIN
    assert "not passed" not in str(prompts)


def test_rows_with_different_keys_and_kinds_reach_rewards(load):
    """R2: JSON rows with different dictionaries keep their keys."""
    rows = [{"problem": f"{n}+1=", "answer": "1", "info": {f"key{n}": n}, "mixed": [1, "a"]} for n in range(2)]
    rows_by_prompt = {row["prompt"][0]["content"]: row for row in load(rows).dataset}
    assert [rows_by_prompt[f"{n}+1="]["info"] for n in range(2)] == [{"key0": 0}, {"key1": 1}]
    assert rows_by_prompt["0+1="]["mixed"] == [1, "a"]


def test_class_labels_dates_and_large_lists_reach_rewards(load, tmp_path):
    """R2: a type that only parquet or the hub has is passed too."""
    text = datasets.Value("large_string")
    features = datasets.Features(
        {"problem": text, "answer": text, "label": datasets.ClassLabel(names=["no", "yes"])}
        | {"tags": datasets.LargeList(text), "day": datasets.Value("date32")}
    )
    rows = {"problem": ["1"], "answer": ["2"], "label": [1], "tags": [["a"]], "day": [None]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    row = load(dataset_name=str(tmp_path / "rows.parquet")).dataset[0]
    assert (row["label"], row["tags"], row["day"]) == (1, ["a"], None)


def test_a_picture_inside_a_dictionary_is_left_out_and_named(load, tmp_path):
    """R2: media is not decoded at any depth of a row."""
    text = datasets.Value("string")
    features = datasets.Features({"problem": text, "answer": text, "extra": {"picture": datasets.Image()}})
    rows = {"problem": ["1"], "answer": ["2"], "extra": [{"picture": {"bytes": b"no picture", "path": None}}]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "pictures")
    prompts = load(dataset_name=str(tmp_path / "pictures"))
    assert "columns not passed to rewards: extra (media)" in str(prompts)


def test_a_mixture_passes_nested_columns_that_all_datasets_have(load, write):
    """R2: a struct with the same fields everywhere is passed, another one is named."""
    first_rows = [{"problem": "a", "answer": "1", "nums": [1], "info": {"a": 1}}]
    second_rows = [{"problem": "b", "answer": "1", "nums": [2], "info": {"b": 1}}]
    entries = [{"id": write(first_rows, name="one")}, {"id": write(second_rows, name="other")}]
    prompts = load(dataset_mixture={"datasets": entries})
    assert sorted(row["nums"] for row in prompts.dataset) == [[1], [2]]
    assert "columns not passed to rewards: info (not in every dataset of the mixture)" in str(prompts)


@pytest.mark.parametrize("isolation", ["completion", "none"])
def test_a_reward_computes_with_lists_and_dictionaries(read, write, tmp_path, monkeypatch, isolation):
    """R2: Countdown's numbers and verl's extra_info arrive as Python lists and dictionaries, also in a child."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "countdown.py").write_text(
        "def score(completions, answer, nums, test_cases, extra_info, **columns):\n"
        "    assert all(sum(row) == 8 for row in nums) and all(row['index'] == 4 for row in extra_info)\n"
        "    assert all(cases[0]['input'] == ['1', '2'] for cases in test_cases)\n"
        "    return [float(f'<answer>{a}</' in c[-1]['content']) for c, a in zip(completions, answer)]\n"
    )
    recipe = read(dataset_name=write(ROWS), reward_funcs=["countdown.py:score"], reward_isolation=isolation)
    (result,) = probe_rewards(recipe, *_sample(recipe))
    assert (result.right_mean, result.wrong_mean, result.no_verdict) == (1.0, 0.0, 0)


@pytest.mark.parametrize("isolation", ["completion", "none"])
@pytest.mark.parametrize("code", ["completions, image", "completions, **columns"])
def test_the_error_names_the_column_that_is_left_out(read, write, tmp_path, monkeypatch, isolation, code):
    """R2: a reward that needs a left-out column fails with the reason for it."""
    monkeypatch.chdir(tmp_path)
    body = "columns['image']" if "columns" in code else "image"
    (tmp_path / "seen.py").write_text(f"def score({code}):\n    return [1.0 for _ in {body}]\n")
    rows = [{**row, "image": "a"} for row in ROWS]
    recipe = read(dataset_name=write(rows), reward_funcs=["seen.py:score"], reward_isolation=isolation)
    message = "column 'image' is not passed to rewards: reserved name"
    if isolation == "none":
        with pytest.raises(Exception, match=message):
            probe_rewards(recipe, *_sample(recipe))
    else:
        (result,) = probe_rewards(recipe, *_sample(recipe))
        assert message in result.faults[0][0]


def _sample(recipe):
    args = ScriptArguments(**{key: recipe[key] for key in ("dataset_name",)})
    rows, counts = load_first_problems(args, 3)
    return rows, counts.left_out


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_of_verls_shape_is_read_as_it_is(load, write, kind, streaming):
    """R4: nested paths name the solution, and all other columns reach rewards."""
    row = {"data_source": "gsm8k", "prompt": [{"role": "user", "content": "1+1="}], "ability": "math"}
    row |= {"reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0}}
    keys = {"dataset_streaming": True, "max_train_prompts": 1} if streaming else {}
    columns = {"dataset_prompt_column": "prompt", "dataset_solution_column": "reward_model.ground_truth"}
    (loaded,) = load(dataset_name=write([row], kind), **columns, **keys).dataset
    other_columns = {name: row[name] for name in ("data_source", "ability", "reward_model", "extra_info")}
    assert loaded == {"prompt": row["prompt"], "answer": "2", **other_columns}


def test_a_mixture_names_nested_columns(load, write):
    """R4: the columns of a mixture may be paths. An extra path reaches rewards under its last part."""
    row = {"chat": [{"from": "human", "value": "1+1="}], "gold": {"value": 2}, "info": {"index": 7}}
    entry = {"id": write([row]), "columns": ["chat.0.value", "gold.value", "info.index"]}
    (loaded,) = load(dataset_mixture={"datasets": [entry]}).dataset
    assert (loaded["prompt"][0]["content"], loaded["answer"], loaded["index"]) == ("1+1=", "2", 7)


def test_preparation_rejects_a_message_that_disappears_in_a_late_row(load):
    """S3: each sequence of roles is rendered, wherever it first occurs."""
    lost = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "1"}]
    rows = [{"problem": [{"role": "user", "content": str(n)}], "answer": "1"} for n in range(1500)]
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert len(load(rows, chat_template=template).dataset) == 1500
    with pytest.raises(ConfigError, match=r"leaves out the developer message of a prompt\. Fix: rename the role"):
        load([*rows, {"problem": lost, "answer": "1"}], chat_template=template)
