"""Check the first rows of a file. Each test applies the fix and sees the problem gone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from grpo_command import run_python

from grpo_recipes.data import read_rows
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.check import check
from grpo_recipes.recipe.check_data import evaluation_note

CHAT = [{"role": "user", "content": "1+1="}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "2"}]
SHAREGPT = [{"from": "human", "value": "1+1="}, {"from": "gpt", "value": "2"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
VERL = {
    "data_source": "gsm8k", "prompt": CHAT, "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"}, "extra_info": {"split": "train", "index": 0},
}  # fmt: skip


@pytest.fixture
def problems_of(read, tmp_path, monkeypatch):
    """Return the problems of a recipe with a file that repeats this row 12 times."""
    monkeypatch.chdir(tmp_path)

    def problems_of_row(row: dict[str, Any], kind: str = "jsonl", **keys: Any) -> list[Any]:
        path = tmp_path / f"rows.{kind}"
        if kind == "jsonl":
            path.write_text((json.dumps(row) + "\n") * 12)
        else:
            datasets.Dataset.from_list([row] * 12).to_parquet(path)
        return check(read(dataset_name=path.name, **keys), {})

    return problems_of_row


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"conversations": SHAREGPT, "answer": "2"}, {"dataset_prompt_column": "conversations"}, "holds {'from':"),
        ({"conversations": [{"from": "system", "value": "x"}, *SHAREGPT], "answer": "2"},
         {"dataset_prompt_column": "conversations"}, "holds {'from':"),
        ({"problem": ANSWERED, "answer": "2"}, {}, "ends with an assistant's turn"),
        ({"problem": PARTS, "answer": "2"}, {}, "holds content in parts"),
        ({"problem": ["1+1="], "answer": "2"}, {}, "holds a list of texts"),
        ({"problem": {"text": "1+1="}, "answer": "2"}, {}, "expected a text"),
        ({"problem": "1+1=", "answer": ["2"]}, {}, "holds ['2'], expected a text"),
        ({"problem": "1+1=", "answer": {"value": 2, "unit": ""}}, {}, "expected a text"),
        ({"problem": "1+1=", "answer": {"style": "rule", "ground_truth": "2"}}, {}, "expected a text"),
        ({"problem": "1+1=", "gold": "2"}, {}, "has no column 'answer'"),
        ({"problem": "1+1=", "reward_model": {"ground_truth": "2"}}, {}, "has no column 'answer'"),
        (VERL, {"dataset_prompt_column": "prompt", "dataset_solution_column": "reward_model.truth"}, "has no column"),
        ({"problem": "1+1=", "answer": None, "gold": "2"}, {}, "has no solution in the first 12 rows"),
        ({"problem": "1+1=", "answer": " ", "gold": "2"}, {}, "has no solution in the first 12 rows"),
        ({"problem": "", "question": "1+1=", "answer": "2"}, {}, "has no prompt in the first 12 rows"),
    ],
)  # fmt: skip
def test_a_row_of_the_wrong_kind_is_rejected_and_the_fix_works(problems_of, row, keys, message, kind):
    """R4: the fix for a problem of the first rows names a column or a path."""
    (problem,) = problems_of(row, kind, **keys)
    assert message in problem.what
    edit = re.search(r"set (dataset_\w+): ([\w.]+)", problem.fix)
    if edit:
        changed = {edit[1]: edit[2]}
    else:
        key = "dataset_prompt_column" if "prompt" in problem.what else "dataset_solution_column"
        changed = {key: re.search(r"write one of ([\w.]+)", problem.fix)[1]}
    assert problems_of(row, kind, **keys | changed) == []


@pytest.mark.parametrize(
    ("row", "message", "fix"),
    [
        ({"problem": [1, 2, 3], "answer": "2"}, "holds token ids ([1, 2, 3])", "save the text of the prompts"),
        ({"problem": ["a", "b"], "answer": "2"}, "holds a list of texts", "save each prompt as one text"),
        ({"problem": [*ANSWERED, *ANSWERED], "answer": "2"}, "ends with an assistant's turn", "remove the last"),
        ({"problem": [{**CHAT[0], "name": "x"}], "answer": "2"}, "holds {'role'", "remove name from the messages"),
        ({"problem": json.dumps(CHAT), "answer": "2"}, "holds a chat written as text", "list of messages"),
        ({"problem": str(CHAT), "answer": "2"}, "holds a chat written as text", "list of messages"),
        ({"problem": "1+1=", "answer": ["2", "3"]}, "expected a text", "save it as texts"),
        ({"problem": "1+1=", "answer": None}, "has no solution in the first 12 rows", "add a solution to each row"),
    ],
)  # fmt: skip
def test_a_row_that_only_other_data_fixes_is_rejected(problems_of, row, message, fix):
    """R4: integer prompts, several texts, more turns, more keys, a chat as text."""
    (problem,) = problems_of(row)
    assert message in problem.what and fix in problem.fix


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_paths_are_read_in_parquet_of_verls_shape(problems_of, kind):
    """R4: `reward_model.ground_truth` is the solution."""
    keys = {"dataset_prompt_column": "prompt", "dataset_solution_column": "reward_model.ground_truth"}
    assert problems_of(VERL, kind, **keys) == []


def test_rows_of_a_mixture_are_checked_too(read, tmp_path, monkeypatch):
    """R4: the fix names the columns of the entry."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text((json.dumps({"problem": "1", "answer": {"value": 2}}) + "\n") * 12)
    keys = {"dataset_name": None, "dataset_mixture": {"datasets": [{"id": "rows.jsonl"}]}}
    (problem,) = check(read(**keys), {})
    assert problem.fix == "set columns: [problem, answer.value] in dataset_mixture"
    keys["dataset_mixture"]["datasets"][0]["columns"] = ["problem", "answer.value"]
    assert check(read(**keys), {}) == []


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved", "folder"])
def test_fewer_rows_than_a_step_needs_are_rejected_and_the_fix_works(read, tmp_path, monkeypatch, kind):
    """R4: prompts_per_step above the number of rows."""
    monkeypatch.chdir(tmp_path)
    rows = [{"problem": f"{n}", "answer": "1"} for n in range(7)]
    dataset, name = datasets.Dataset.from_list(rows), f"rows.{kind}"
    if kind == "jsonl":
        Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif kind == "json":
        Path(name).write_text(json.dumps(rows))
    elif kind == "csv":
        Path(name).write_text("problem,answer\n" + "".join(f"{n},1\n" for n in range(7)))
    elif kind == "parquet":
        dataset.to_parquet(name)
    elif kind == "saved":
        dataset.save_to_disk(name)
    else:
        Path(name).mkdir()
        dataset.select(range(3)).to_parquet(f"{name}/train-0.parquet")
        dataset.select(range(3, 7)).to_parquet(f"{name}/train-1.parquet")
    (problem,) = check(read(dataset_name=name, prompts_per_step=8), {})
    assert str(problem).endswith(f"one step needs 8 prompts, '{name}' has 7 rows. Fix: set prompts_per_step: 7, "
                                 "or name a larger dataset")  # fmt: skip
    assert check(read(dataset_name=name, prompts_per_step=7), {}) == []


# --- S1: .csv and .tsv ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", "problem,answer\nAdd 0, then 1 =,1\n", ":2 has 3 fields, the header has 2"),
        ("rows.csv", "problem,answer\n1,1\n\n2\n", ":4 has 1 fields, the header has 2"),
        ("rows.csv", 'problem,answer\n"a\nb",1\nc,2,3\n', ":4 has 3 fields, the header has 2"),
        ("rows.csv", 'problem,answer\n"Add 0,1\n"Add 2",3\n', ":2 has unbalanced quotes"),
        ("rows.csv", 'problem,answer\n1,1\n"Add 2,3\n', ":3 has unbalanced quotes"),
        ("rows.csv", "problem,answer,answer\n1,1,2\n", ":1 has the column 'answer' twice"),
        ("rows.tsv", "problem\tanswer\nAdd\t0\t1\n", ":2 has 3 fields, the header has 2"),
        ("rows.tsv", "problem\tanswer\nAdd 0\n", ":2 has 1 fields, the header has 2"),
    ],
)
def test_a_row_with_other_fields_than_the_header_is_rejected(read, tmp_path, monkeypatch, name, content, message):
    """S1: the line number is named before the launch, and by the reader."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(content)
    (problem,) = [problem for problem in check(read(dataset_name=name), {}) if "prompts, '" not in problem.what]
    assert message in problem.what and ("in quotes" in problem.fix or problem.fix == "rename one of the columns")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_rows(name, None, "train")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_rows(name, None, "train", streaming=True)


def test_a_wrong_line_far_behind_the_first_rows_is_rejected(read, tmp_path, monkeypatch):
    """S1: the reader reads every line, and the check reads many."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("problem,answer\n" + "1,1\n" * 5000 + "1,2,3\n")
    (problem,) = check(read(dataset_name="rows.csv"), {})
    assert ":5002 has 3 fields" in problem.what


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize(("name", "tab"), [("rows.csv", ","), ("rows.tsv", "\t")])
def test_quoted_separators_line_ends_and_a_byte_order_mark_are_read(read, tmp_path, monkeypatch, name, tab, mark):
    """S1: quoted text stays one field."""
    monkeypatch.chdir(tmp_path)
    lines = [f"problem{tab}answer", f'"Add 0{tab} then\n""1"" ="{tab}007', f'5" pipe{tab}2'] + [f"3{tab}3"] * 10
    (tmp_path / name).write_text(mark + "\n".join(lines) + "\n", encoding="utf-8")
    assert check(read(dataset_name=name), {}) == []
    rows = read_rows(name, None, "train")
    assert rows.column_names == ["problem", "answer"] and len(rows) == 12
    assert rows[0] == {"problem": f'Add 0{tab} then\n"1" =', "answer": "007"} and rows[1]["problem"] == '5" pipe'


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        ("problem;answer\n1;1\n", "save the file with commas: its fields are separated by semicolons"),
        ("problem\tanswer\n1\t1\n", "rename the file to .tsv: its fields are separated by tabs"),
    ],
)
def test_another_separator_is_named(read, tmp_path, monkeypatch, content, fix):
    """S1: a file with a single column that contains every field."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text(content + content.splitlines()[1] * 11)
    assert fix in [problem.fix for problem in check(read(dataset_name="rows.csv", prompts_per_step=1), {})]


def test_a_file_in_another_encoding_is_rejected(read, tmp_path, monkeypatch):
    """S1: the reader needs UTF-8."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_bytes("problem,answer\nété,1\n".encode("latin-1"))
    problem = check(read(dataset_name="rows.csv", prompts_per_step=1), {})[0]
    assert "is not UTF-8 text" in problem.what and problem.fix == "save the file as UTF-8"


# --- S12, and the time of a check -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        ({}, "evaluation: 40 of 40 rows of 'held.jsonl' (eval_max_prompts 1000)"),
        ({"eval_max_prompts": 10}, "evaluation: 10 of more than 10 rows of 'held.jsonl' (eval_max_prompts 10)"),
        ({"eval_subsample": 0.1}, "evaluation: 4 of 40 rows of 'held.jsonl' (eval_max_prompts 1000, eval_sub"),
        ({"eval_strategy": "no"}, ""),
    ],
)  # fmt: skip
def test_check_prints_how_many_rows_an_evaluation_takes(read, tmp_path, monkeypatch, keys, note):
    """S12: all held-out rows by default."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "held.jsonl").write_text('{"problem": "1", "answer": "1"}\n' * 40)
    options = {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset_name": "held.jsonl"} | keys
    if options["eval_strategy"] == "no":
        options = {}
    assert evaluation_note(read(**options)).startswith(note) and bool(note) == bool(evaluation_note(read(**options)))


def test_the_held_out_rows_of_a_mixture_are_named(read, tmp_path, monkeypatch):
    """M20: check and the log name them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"problem": "{n}", "answer": "1"}}\n' for n in range(40)))
    mixture = {"datasets": [{"id": "rows.jsonl"}], "test_split_size": 0.1}
    keys = {"dataset_name": None, "dataset_mixture": mixture, "eval_strategy": "steps", "eval_steps": 5}
    assert "the held-out rows of the mixture (test_split_size 0.1), at most 1000" in evaluation_note(read(**keys))


def test_a_check_of_a_large_file_reads_its_first_rows(tmp_path):
    """R4: the first rows of a large file are enough."""
    row = json.dumps({"problem": "x" * 1000, "answer": "1", "extra": {"index": 1}})
    (tmp_path / "rows.jsonl").write_text((row + "\n") * 100_000)
    recipe = {"dataset_name": "rows.jsonl", "model_name_or_path": "a/b", "reward_funcs": ["math_verify"]}
    recipe |= {"prompts_per_step": 8, "num_generations": 4, "max_steps": 1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    code = (
        "from pathlib import Path; from grpo_recipes.cli import main; code = main(['check', 'recipe.yaml'])\n"
        "print(Path('/proc/self/io').read_text().split()[1]); raise SystemExit(code)"  # the bytes that it has read
    )
    done = run_python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 20_000_000 < (tmp_path / "rows.jsonl").stat().st_size
