"""Reading a dataset, and the one line that is said when it cannot be read."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from grpo_recipes.data import read_rows
from grpo_recipes.data.problems import list_columns, require_columns
from grpo_recipes.errors import ConfigError
from grpo_recipes.recipe.datafiles import data_files

TEN = [{"problem": str(n), "answer": str(n), "level": n} for n in range(10)]


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "saved"])
@pytest.mark.parametrize("streaming", [False, True])
def test_every_kind_is_read_whole_or_as_a_stream(write, kind, streaming):
    rows = read_rows(write(TEN, kind), None, "train", streaming=streaming)
    assert isinstance(rows, datasets.IterableDataset) == (streaming and kind != "saved")
    assert list_columns(rows) == ["problem", "answer", "level"]
    assert [row["answer"] for row in rows] == [str(n) for n in range(10)]


def test_a_missing_column_names_those_that_exist(write):
    with pytest.raises(ConfigError, match=r"has no column 'gold'.*problem, answer, level"):
        require_columns("rows", read_rows(write(TEN), None, "train").features, {"problem": "key", "gold": "key"})


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
def test_a_single_file_is_any_split_and_can_be_sliced(write, kind):
    path = write(TEN, kind)
    assert len(read_rows(path, None, "test")) == 10
    assert read_rows(path, None, "train[2:4]")["problem"][:] == ["2", "3"]
    assert len(read_rows(path, None, "train[:50%]")) == 5


def test_a_folder_of_files_has_the_splits_of_their_names(write, tmp_path):
    for name, rows in {"train-0": TEN[:4], "train-1": TEN[4:7], "test": TEN[7:]}.items():
        write(rows, "parquet", f"folder/{name}")
    folder = str(tmp_path / "folder")
    assert sorted(read_rows(folder, None, "train")["level"]) == list(range(7))
    assert read_rows(folder, None, "test")["level"][:] == [7, 8, 9]
    with pytest.raises(ConfigError, match=r'Unknown split "validation". Should be one of'):
        read_rows(folder, None, "validation")


def test_a_folder_of_csv_files_is_read_as_texts_too(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in "ab":
        (tmp_path / "folder" / f"{name}.csv").write_text("problem,answer\n1,007\n")
    assert read_rows(str(tmp_path / "folder"), None, "train")["answer"][:] == ["007", "007"]


def test_a_saved_dictionary_has_its_own_splits(tmp_path):
    parts = {"train": TEN[:6], "test": TEN[6:]}
    splits = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    splits.save_to_disk(tmp_path / "saved")
    path = str(tmp_path / "saved")
    assert read_rows(path, None, "test")["level"][:] == [6, 7, 8, 9]
    assert len(read_rows(path, None, "train+test[:1]")) == 7
    with pytest.raises(ConfigError, match="validation"):
        read_rows(path, None, "validation")


def test_a_file_that_changed_is_read_anew(write):
    assert len(read_rows(write(TEN), None, "train")) == 10
    assert len(read_rows(write(TEN[:4]), None, "train")) == 4


def broken(folder: Path, name: str, content: str | None) -> str:
    path = folder / name
    if content is None:
        path.mkdir()
        (path / "a.csv").write_text("problem,answer\n1,2\n")
        (path / "b.jsonl").write_text('{"problem": "1", "answer": "2"}\n')
    else:
        path.write_text(content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"problem": "1", "answer": "1"}\n{"problem": \n', "JSON parse error"),
        ("rows.jsonl", "", "it has no rows"),
        ("rows.csv", 'problem,answer\n1,2\n1,2,3,"', "rows.csv"),
        ("rows.parquet", "no parquet at all", "rows.parquet"),
        ("rows.txt", "1 2\n", "not a .json, .jsonl, .csv, .tsv, .parquet file"),
        ("folder", None, r"several kinds \(csv, json\)"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(tmp_path, name, content, message):
    with pytest.raises(ConfigError, match=message) as refused:
        read_rows(broken(tmp_path, name, content), None, "train")
    assert "\n" not in str(refused.value) and name in str(refused.value)


def test_a_file_has_no_configuration(write):
    with pytest.raises(ConfigError, match="no configuration 'main'"):
        read_rows(write(TEN), "main", "train")


def test_without_a_network_the_fix_names_fetch(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="grpo fetch RECIPE") as refused:
        read_rows("openai/gsm8k", "main", "train")
    assert refused.value.problems[0].where == "'openai/gsm8k'"


def test_brackets_in_the_name_of_a_file_are_no_pattern(tmp_path):
    """M9: ``a[1].jsonl`` "has no rows", because datasets reads the name as a pattern."""
    path = tmp_path / "a[1]*.jsonl"
    path.write_text('{"problem": "1 + 1", "answer": "2"}\n')
    assert len(read_rows(str(path), None, "train")) == 1
    folder = tmp_path / "b[1]"
    folder.mkdir()
    path.rename(folder / "a.jsonl")
    with pytest.raises(ValueError, match="reads as a pattern: rename it"):
        data_files(folder)
