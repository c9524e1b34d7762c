"""Records of what was fetched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_recipes.fetch.assets import Wanted, dataset_folder, find_record, make_record, record_file, write_record

COMMIT = "0123456789abcdef" * 2 + "01234567"
ROWS = Wanted(kind="dataset", id="ada/rows", where="recipe.yaml:3", config="main", split="train")


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {"CACHE_ROOT": str(tmp_path / "cache")}


def fetched(folder: Path, environment: dict[str, str], asset: Wanted = ROWS) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "data.arrow").write_bytes(b"rows")
    write_record(make_record(asset, COMMIT, folder, {"data.arrow": 4}, None), asset, environment)


def test_a_record_is_found_under_its_revision_and_its_commit(tmp_path: Path, environment: dict[str, str]) -> None:
    assert find_record(ROWS, environment) is None
    fetched(tmp_path / "rows", environment)
    for revision in ("main", COMMIT):
        record = find_record(replace(ROWS, revision=revision), environment)
        assert record is not None
        assert (record.commit, record.path, record.bytes) == (COMMIT, str(tmp_path / "rows"), 4)
    for other in (replace(ROWS, revision="v2"), replace(ROWS, split="test"), replace(ROWS, config=None)):
        assert find_record(other, environment) is None


@pytest.mark.parametrize("damage", ["missing", "short", "folder"])
def test_a_record_counts_only_while_its_files_are_whole(
    tmp_path: Path, environment: dict[str, str], damage: str
) -> None:
    fetched(tmp_path / "rows", environment)
    file = tmp_path / "rows" / "data.arrow"
    if damage == "missing":
        file.unlink()
    elif damage == "short":
        file.write_bytes(b"ro")
    else:
        (tmp_path / "rows").rename(tmp_path / "elsewhere")
    assert find_record(ROWS, environment) is None


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"kind": "dataset"}', '{"of": "another version"}'])
def test_a_record_that_cannot_be_read_is_none(tmp_path: Path, environment: dict[str, str], content: str) -> None:
    fetched(tmp_path / "rows", environment)
    record_file(ROWS, environment).write_text(content)
    assert find_record(ROWS, environment) is None


def test_datasets_have_folders_of_their_own(environment: dict[str, str], tmp_path: Path) -> None:
    datasets = tmp_path / "cache" / "datasets"
    assert dataset_folder(ROWS, COMMIT, environment) == datasets / "ada--rows--main--train--0123456789ab"
    assets = [
        *(replace(ROWS, split=split) for split in ("train", "test", "train[:10]", "train[:10%]", "train[10:]")),
        replace(ROWS, limit=10),
        replace(ROWS, config=None),
    ]
    assert len({dataset_folder(asset, COMMIT, environment) for asset in assets}) == len(assets)
    assert len({record_file(asset, environment) for asset in assets}) == len(assets)
