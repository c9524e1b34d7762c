"""Columns of a file by its head, without torch or datasets."""

from __future__ import annotations

import json
import subprocess
import sys

import datasets
import pytest

from grpo_recipes.recipe.datafiles import columns_of, has_splits, split_name


def test_columns_of_every_kind_are_those_that_datasets_reads(tmp_path):
    rows = [{"problem": "1", "answer": "2", "level": 3}]
    dataset = datasets.Dataset.from_list(rows)
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]) + "\n")
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=2))
    (tmp_path / "lines.json").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[0]) + "\n")
    (tmp_path / "a.csv").write_text("problem,answer,level\n1,2,3\n")
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "both")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.jsonl").write_text(json.dumps(rows[0]) + "\n")
    for path in tmp_path.iterdir():
        assert columns_of(path) == ["problem", "answer", "level"], path


def test_a_column_that_later_rows_alone_have_is_known(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"problem": "1"}\n\n{"problem": "1", "answer": "2"}\n{"broken": \n')
    assert columns_of(path) == ["problem", "answer"]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path):
    for name, content in {"rows.csv": "problem,answer\n", "rows.jsonl": '{"problem": "1", "answer": "2"}\n'}.items():
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert columns_of(tmp_path / name) == ["problem", "answer"]


def test_a_first_row_longer_than_the_head_says_nothing(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "x" * (1 << 20), "answer": "1"}) + "\n")
    assert columns_of(path) is None


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", "not json\n", "does not begin with a JSON object"),
        ("rows.json", "[1, 2]", "does not begin with a JSON object"),
        ("rows.jsonl", "", "has no rows"),
        ("rows.parquet", "text", "is not a parquet file"),
        ("rows.txt", "1\n", "is not a .json, .jsonl, .csv, .tsv, .parquet file"),
    ],
)
def test_what_is_no_dataset_is_told(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        columns_of(tmp_path / name)


def test_a_folder_holds_one_kind_of_file(tmp_path):
    with pytest.raises(ValueError, match=r"holds no \.json"):
        columns_of(tmp_path)
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "a.csv").write_text("problem\n")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert columns_of(tmp_path) == ["problem"]
    (tmp_path / "b.jsonl").write_text('{"problem": "1"}\n')
    with pytest.raises(ValueError, match=r"several kinds \(csv, json\)"):
        columns_of(tmp_path)


def test_splits_are_told_from_another_in_folders(tmp_path):
    dataset = datasets.Dataset.from_list([{"a": 1}])
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "both")
    (tmp_path / "file.csv").write_text("a\n")
    assert [has_splits(tmp_path / name) for name in ("one", "both", "file.csv")] == [False, True, False]
    with pytest.raises(ValueError, match=r"has no split 'test\[:3\]', only train"):
        columns_of(tmp_path / "both", "test[:3]")
    assert [split_name(split) for split in ("train", "train[:10%]", "a+b")] == ["train", "train", "a"]


def test_only_a_parquet_file_costs_an_import(tmp_path):
    (tmp_path / "a.csv").write_text("a\n")
    code = (
        "import sys; from pathlib import Path; from grpo_recipes.recipe import check, datafiles; "
        f"datafiles.columns_of(Path({str(tmp_path / 'a.csv')!r})); "
        "print([name for name in ('torch', 'datasets', 'pyarrow', 'transformers') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_data_nested_too_deeply_to_read_is_told(tmp_path, name):
    (tmp_path / name).write_text('{"a":' * 5000)
    with pytest.raises(ValueError, match="does not begin with a JSON object"):
        columns_of(tmp_path / name)


def test_a_first_line_longer_than_csv_allows_is_told(tmp_path):
    (tmp_path / "rows.csv").write_text('"' + "x" * 300_000 + '",b\n')
    with pytest.raises(ValueError, match=r"'.*rows\.csv' is not a \.csv file \(field larger than field limit"):
        columns_of(tmp_path / "rows.csv")


@pytest.mark.parametrize("content", [b"[]", b"{bad", b'{"features": null}', b"\xff\xfe", None])
def test_a_saved_dataset_that_is_damaged_is_told(tmp_path, content):
    datasets.Dataset.from_list([{"a": 1}]).save_to_disk(tmp_path / "saved")
    info = tmp_path / "saved" / "dataset_info.json"
    info.unlink()
    if content is not None:
        info.write_bytes(content)
    with pytest.raises(ValueError, match=r"'.*dataset_info\.json' is missing or damaged; save the dataset again"):
        columns_of(tmp_path / "saved")


def test_a_saved_dataset_without_its_splits_is_told(tmp_path):
    (tmp_path / "dataset_dict.json").write_text("{}")
    with pytest.raises(ValueError, match=r"'.*dataset_dict\.json' is missing or damaged"):
        columns_of(tmp_path)
