"""Datasets in files: which kinds there are, and the columns of one, read from its head. No torch, no datasets."""

import contextlib
import csv
import glob
import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import translate

# Suffix of a data file -> the builder of `datasets` that reads it.
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
# Live objects of the trainer, which it hands a reward in its own process beside the columns.
LIVE_OBJECTS = ("trainer_state", "log_extra", "log_metric", "environments")
# Column names that TRL's trainer fills itself or gives a meaning of its own, and `answer`, which is ours.
RESERVED_COLUMNS = (
    "prompt", "prompts", "completion", "completions", "completion_ids", "image", "images", "environment", "answer",
    *LIVE_OBJECTS,
)  # fmt: skip
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_HEAD = 1 << 20  # characters
_FEW = 100  # rows whose keys are looked at
_MANY = 10_000  # files of a folder that are looked at


def solution_names(columns: Iterable[str | None], mixture: Mapping[str, Any] | None) -> list[str]:
    """Return the names under which rewards of the user's get ``answer``: those of its columns, and ``solution``."""
    entries = (mixture or {}).get("datasets") or []
    listed = [name for entry in entries for name in (entry.get("columns") or [])[1:2]]
    return [name for name in dict.fromkeys(["solution", *columns, *listed]) if name and name not in RESERVED_COLUMNS]


def split_name(split: str) -> str:
    """Return the plain name in a split: ``train`` of ``train[:10%]``."""
    return re.split(r"\W", split)[0] or split


def is_saved(path: Path) -> bool:
    """Return whether ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote the folder."""
    return any(os.path.isfile(path / name) for name in ("state.json", "dataset_dict.json"))


def has_splits(path: Path) -> bool:
    """Return whether a local file or folder has splits."""
    return path.is_dir() and not (path / "state.json").is_file()


def data_files(folder: Path) -> tuple[str, list[Path]]:
    """Return the kind of a folder's data files, and the files, three levels deep; ValueError unless it is one kind."""
    found = itertools.islice(itertools.chain(*(folder.glob(depth) for depth in ("*", "*/*", "*/*/*"))), _MANY)
    wanted = (path for path in found if path.suffix in BUILDERS and path.name not in _NO_DATA)
    files = sorted(path for path in wanted if "/." not in f"/{path.relative_to(folder)}")
    kinds = sorted({BUILDERS[path.suffix] for path in files})
    if glob.has_magic(str(folder)):
        raise ValueError(f"'{folder}' has one of [ ] * ? in its name, which datasets reads as a pattern: rename it")
    if not kinds:
        raise ValueError(f"'{folder}' holds no {', '.join(BUILDERS)} file and no saved dataset")
    if len(kinds) > 1:
        raise ValueError(f"'{folder}' holds files of several kinds ({', '.join(kinds)})")
    return kinds[0], files


def columns_of(path: Path, split: str = "train", rows: int = _FEW) -> list[str] | None:
    """Return the columns of a dataset's head, None where that shows no whole row; ValueError for anything else."""
    if is_saved(path):
        if (path / "dataset_dict.json").is_file():
            splits = _saved_part(path / "dataset_dict.json", "splits")
            if split_name(split) not in splits:
                raise ValueError(f"'{path}' has no split '{split}', only {', '.join(splits)}")
            path = path / split_name(split)
        return _saved_part(path / "dataset_info.json", "features")
    if path.is_dir():
        return columns_of(data_files(path)[1][0])
    if path.suffix not in BUILDERS:
        raise ValueError(f"'{path}' is not a {', '.join(BUILDERS)} file")
    if path.stat().st_size == 0:
        raise ValueError(f"'{path}' has no rows")
    if BUILDERS[path.suffix] == "json":
        return _json_columns(path, rows)
    if path.suffix == ".csv":
        return csv_columns(path)
    import pyarrow.parquet  # a tenth of a second, for those who have such a file

    with translate(pyarrow.ArrowInvalid, lambda error: ValueError(f"'{path}' is not a parquet file ({error})")):
        return list(pyarrow.parquet.read_schema(path).names)


def csv_columns(path: Path) -> list[str]:
    """Return the first line of a .csv file."""
    with (
        translate(csv.Error, lambda error: ValueError(f"'{path}' is not a .csv file ({error})")),
        path.open(encoding="utf-8-sig", errors="replace", newline="") as file,
    ):
        return next(csv.reader(file), [])


def _json_columns(path: Path, most: int) -> list[str] | None:
    """Read JSON objects one after the other, as lines or in a list, up to the first that is broken."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        head = file.read(_HEAD)
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    text, end = head.lstrip().removeprefix("["), 0
    names: dict[str, None] = {}
    rows = 0
    with contextlib.suppress(ValueError, RecursionError):
        while rows < most:
            row, end = decoder.raw_decode(text, between.match(text, end).end())  # type: ignore[union-attr]
            if not isinstance(row, dict):
                break
            names |= dict.fromkeys(row)
            rows += 1
    if not rows and len(head) < _HEAD:
        raise ValueError(f"'{path}' does not begin with a JSON object")
    return list(names) if rows else None  # a first row may be longer than what is read here


def _saved_part(path: Path, key: str) -> list[str]:
    damaged = ValueError(f"'{path}' is missing or damaged; save the dataset again")
    with translate((OSError, ValueError, LookupError, TypeError), lambda _: damaged):
        return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))[key]]
