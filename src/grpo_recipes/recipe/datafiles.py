"""Read the head of a dataset in files: its columns, its first rows, how many there are. No torch, no datasets."""

import contextlib
import csv
import glob
import io
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import translate_errors

# Suffix of a data file -> the builder of `datasets` that reads it.
BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
# Live objects of the trainer that a reward in the trainer's process gets in addition to the columns.
LIVE_OBJECTS = ("trainer_state", "log_extra", "log_metric")
ENVIRONMENTS = "environments"  # the column with the environment of each episode
# Column names that TRL's trainer fills itself or gives a meaning of its own, and `answer`, which is ours.
RESERVED_COLUMNS = (
    "prompt", "prompts", "completion", "completions", "completion_ids", "image", "images", "environment", "answer",
    ENVIRONMENTS, *LIVE_OBJECTS,
)  # fmt: skip
_NO_DATA = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_HEAD = 1 << 20  # characters
_CSV_HEAD = 8 << 20  # bytes of a .csv file: the rows of larger files are not counted
_MEDIA = frozenset({"Audio", "BioSequence", "BioStructure", "Image", "Mesh", "Nifti", "Pdf", "Video"})
_FEW = 100  # rows read to find the keys
_MANY = 10_000  # files of a folder that are looked at


@dataclass(frozen=True)
class Head:
    """The beginning of a dataset."""

    columns: list[str]
    rows: list[dict[str, Any]]  # without columns whose values are stored in another form than they are read
    media: frozenset[str] = frozenset()  # columns of images, audio, video or documents


def solution_names(columns: Iterable[str | None], mixture: Mapping[str, Any] | None) -> list[str]:
    """Return the names under which user rewards get ``answer``: ``solution``, and the names of the solution columns.

    Reserved names are left out. ``columns`` are the solution columns of the recipe, and ``mixture`` is its
    ``dataset_mixture``.
    """
    entries = (mixture or {}).get("datasets") or []
    listed = [name for entry in entries for name in (entry.get("columns") or [])[1:2]]
    names = (last_part(name) for name in ["solution", *columns, *listed] if name)
    return [name for name in dict.fromkeys(names) if name not in RESERVED_COLUMNS]


def last_part(column: str) -> str:
    """Return the name under which rewards get a nested column: ``index`` of ``extra_info.index``."""
    return column.rpartition(".")[2]


def split_name(split: str) -> str:
    """Return the plain name in a split: ``train`` of ``train[:10%]``."""
    return re.split(r"\W", split)[0] or split


def is_saved(path: Path) -> bool:
    """Return whether ``Dataset.save_to_disk`` or ``DatasetDict.save_to_disk`` wrote the folder."""
    return any(os.path.isfile(path / name) for name in ("state.json", "dataset_dict.json"))


def has_splits(path: Path) -> bool:
    """Return whether a local dataset has splits: it is a folder, except of a single saved dataset."""
    return path.is_dir() and not (path / "state.json").is_file()


def data_files(folder: Path) -> tuple[str, list[Path]]:
    """Return the kind of a folder's data files, and the files, sorted: of the first 10,000 at most three levels deep.

    Hidden files are left out. Raise ValueError if there are no data files, files of several kinds (.csv and .tsv are
    two), or a character of file patterns in the folder's name.
    """
    paths = itertools.islice(itertools.chain(*(folder.glob(depth) for depth in ("*", "*/*", "*/*/*"))), _MANY)
    data_paths = (path for path in paths if path.suffix in BUILDERS and path.name not in _NO_DATA)
    files = sorted(path for path in data_paths if "/." not in f"/{path.relative_to(folder)}")
    kinds = sorted({BUILDERS[path.suffix] for path in files})
    if glob.has_magic(str(folder)):
        raise ValueError(f"'{folder}' has one of [ ] * ? in its name, which datasets reads as a pattern: rename it")
    kinds = ["csv", "tsv"] if {".csv", ".tsv"} <= {path.suffix for path in files} else kinds
    if not kinds:
        raise ValueError(f"'{folder}' holds no {', '.join(BUILDERS)} file and no saved dataset")
    if len(kinds) > 1:
        raise ValueError(f"'{folder}' holds files of several kinds ({', '.join(kinds)})")
    return kinds[0], files


def columns_of(path: Path, split: str = "train", rows: int = _FEW) -> list[str] | None:
    """Return the columns of a dataset's first rows, or None if the first row is too long to be read.

    Raise ValueError if the file has a fault.
    """
    head = read_head(path, split, rows)
    return head.columns if head else None


def read_head(path: Path, split: str = "train", rows: int = _FEW) -> Head | None:
    """Read the columns and the first ``rows`` rows of a dataset in a file or folder.

    In a folder of data files, only the first file is read. ``split`` selects a split of a saved dataset, and has no
    effect on files. Return None if the first row is too long to be read. Raise ValueError if the file has a fault
    or is not a data file.
    """
    if is_saved(path):
        return _read_saved_head(path, split, rows)
    if path.is_dir():
        return read_head(data_files(path)[1][0], split, rows)
    if path.suffix not in BUILDERS:
        raise ValueError(f"'{path}' is not a {', '.join(BUILDERS)} file")
    if path.stat().st_size == 0:
        raise ValueError(f"'{path}' has no rows")
    if BUILDERS[path.suffix] == "json":
        return _read_json_head(path, rows)
    if BUILDERS[path.suffix] == "csv":
        head, names = list[dict[str, Any]](), csv_columns(path)
        for row in csv_rows(path, _CSV_HEAD):  # the first 8 MiB are searched for faults
            head += [row] if len(head) < rows else []
        return Head(names, head)
    return _read_parquet_head(path, rows)


def count_rows(path: Path, most: int, split: str = "train") -> int | None:
    """Return the number of rows of a dataset, or ``most`` if it has more; None if counting takes long.

    In a folder of files, the rows of all splits are counted together. Raise ValueError if a file has a fault.
    """
    if is_saved(path):
        total = 0
        for batch in _iterate_saved_batches(_find_split_folder(path, split)):
            total += batch.num_rows
            if total >= most:
                return most
        return total
    files = data_files(path)[1] if path.is_dir() else [path]
    total = 0
    for file in files:
        count = _count_file(file, most - total)
        if count is None:
            return None
        total += count
        if total >= most:
            return most
    return total


def _count_file(path: Path, most: int) -> int | None:
    """Return the number of rows of a file, or ``most`` if it has more; None for a long .json file.

    Raise ValueError for a fault in a .csv or .tsv file, and for a .parquet file in another format. The lines of a
    .jsonl file are counted without a check.
    """
    kind = BUILDERS[path.suffix]
    if kind == "parquet":
        return min(most, int(_open_parquet(path).metadata.num_rows))
    if kind == "csv":
        return sum(1 for _ in itertools.islice(csv_rows(path), most))
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        if path.suffix == ".json":
            head = file.read(_HEAD + 1)
            rows = list(itertools.islice(_parse_json_rows(head), most))
            return len(rows) if len(rows) == most or len(head) <= _HEAD else None
        return sum(1 for _ in itertools.islice((line for line in file if not line.isspace()), most))


# --- .csv and .tsv ----------------------------------------------------------------------------------------------------


def separator(path: Path) -> str:
    """Return the character that separates the fields of a file: a tab for .tsv, else a comma."""
    return "\t" if path.suffix == ".tsv" else ","


def csv_columns(path: Path) -> list[str]:
    """Return the fields in the first line of a .csv or .tsv file, [] if it is empty; raise ValueError for a fault."""
    with (
        translate_errors(csv.Error, lambda error: ValueError(f"'{path}' is not a {path.suffix} file ({error})")),
        path.open(encoding="utf-8-sig", errors="replace", newline="") as file,
    ):
        return next(csv.reader(file, delimiter=separator(path)), [])


def csv_rows(path: Path, characters: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a .csv or .tsv file; stop soon after ``characters`` bytes, or at the end if it is None.

    Raise ValueError with the line of a fault, such as a row with too many or too few fields: a reader that accepts such
    a row moves its values into other columns.
    """
    names, line = csv_columns(path), 1
    if twice := [name for name, count in Counter(names).items() if name and count > 1]:
        raise ValueError(f"'{path}':1 has the column '{twice[0]}' twice")

    previous = csv.field_size_limit(sys.maxsize)  # texts have no limit in the reader of `datasets` either
    try:
        with path.open("rb") as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator(path), strict=True)
            for fields in reader:
                if fields and line > 1:
                    if len(fields) != len(names):
                        raise ValueError(f"'{path}':{line} has {len(fields)} fields, the header has {len(names)}")
                    yield dict(zip(names, fields, strict=True))
                line = reader.line_num + 1
                if characters is not None and stream.tell() > characters:
                    return
    except csv.Error as error:
        raise ValueError(f"'{path}':{line} has unbalanced quotes ({error})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"'{path}' is not UTF-8 text ({error.reason})") from None
    finally:
        csv.field_size_limit(previous)


def file_fix(fault: str) -> str:
    """Return the fix, as text for the user, for a fault that ``csv_rows`` raised; an empty text for other faults."""
    if " fields, the header has " in fault or "has unbalanced quotes" in fault:
        return 'put texts that contain separators, quotes or line ends in quotes, as "1, 2" and "say ""1"""'
    if fault.endswith(" twice"):
        return "rename one of the columns"
    return "save the file as UTF-8" if "is not UTF-8 text" in fault else ""


# --- .json and .jsonl -------------------------------------------------------------------------------------------------


def _read_json_head(path: Path, most: int) -> Head | None:
    """Read the columns and first ``most`` rows of a .json or .jsonl file, at most 2**20 characters.

    Return None if these do not contain the whole first row. Raise ValueError if the file does not begin with an object.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        text = file.read(_HEAD)
    rows = list(itertools.islice(_parse_json_rows(text), most))
    if not rows and len(text) < _HEAD:
        raise ValueError(f"'{path}' does not begin with a JSON object")
    return Head(list(dict.fromkeys(name for row in rows for name in row)), rows) if rows else None


def _parse_json_rows(head: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in a text, as lines or in a list, up to the first that is cut off, broken or no object."""
    decoder, between = json.JSONDecoder(), re.compile(r"[\s,]*")
    text, end = head.lstrip().removeprefix("["), 0
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            row, end = decoder.raw_decode(text, between.match(text, end).end())  # type: ignore[union-attr]
            if not isinstance(row, dict):
                return
            yield row


# --- .parquet and saved datasets: pyarrow takes a tenth of a second to import, for those who have such a file ---------


def _open_parquet(path: Path) -> Any:
    """Open a parquet file with pyarrow; raise ValueError if it is not a parquet file."""
    import pyarrow.parquet

    with translate_errors(pyarrow.ArrowInvalid, lambda error: ValueError(f"'{path}' is not a parquet file ({error})")):
        return pyarrow.parquet.ParquetFile(path)


def _read_parquet_head(path: Path, rows: int) -> Head:
    """Read the columns and first ``rows`` rows of a parquet file; raise ValueError if it is not a parquet file."""
    file = _open_parquet(path)
    names, stored = list(file.schema_arrow.names), file.schema_arrow.metadata or {}
    features: Any = {}
    with contextlib.suppress(ValueError, LookupError, TypeError):
        features = json.loads(stored[b"huggingface"])["info"]["features"]
    plain, media = _split_by_type(names, features)
    batch = next(file.iter_batches(batch_size=rows, columns=plain), None) if plain and rows else None
    return Head(names, batch.to_pylist() if batch is not None else [], media)


def _find_split_folder(path: Path, split: str) -> Path:
    """Return the folder of a split in a saved dataset, or ``path`` if it has no splits.

    Raise ValueError if it lacks the split, or its list of splits is damaged.
    """
    if not (path / "dataset_dict.json").is_file():
        return path
    splits = _read_saved_names(path / "dataset_dict.json", "splits")
    if split_name(split) not in splits:
        raise ValueError(f"'{path}' has no split '{split}', only {', '.join(splits)}")
    return path / split_name(split)


def _read_saved_head(path: Path, split: str, rows: int) -> Head:
    """Read the columns and first ``rows`` rows of a saved dataset's split; raise ValueError if it is damaged."""
    folder = _find_split_folder(path, split)
    names, features = list(_read_saved_names(folder / "dataset_info.json", "features")), {}
    with contextlib.suppress(OSError, ValueError):
        features = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))["features"]
    plain, media = _split_by_type(names, features)
    head: list[dict[str, Any]] = []
    for batch in _iterate_saved_batches(folder):
        if batch.num_rows:
            head = batch.slice(0, rows).select(plain).to_pylist()
            break
    return Head(names, head, media)


def _iterate_saved_batches(folder: Path) -> Iterator[Any]:
    """Yield the batches of a saved dataset, up to the first damaged or missing file, which loading reports later."""
    import pyarrow

    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        for entry in json.loads((folder / "state.json").read_text(encoding="utf-8"))["_data_files"]:
            with pyarrow.memory_map(str(folder / entry["filename"])) as source:
                yield from pyarrow.ipc.open_stream(source)


def _split_by_type(names: Iterable[str], features: Mapping[str, Any]) -> tuple[list[str], frozenset[str]]:
    """Return the columns that `datasets` reads as they are stored, and the columns of images, audio or documents.

    ``features`` are the types of columns by name. Columns of the type Json are in neither result.
    """
    kinds = {name: _list_types(feature) for name, feature in features.items()}
    plain = [name for name in names if not kinds.get(name, set()) & {*_MEDIA, "Json"}]
    return plain, frozenset(name for name in kinds if kinds[name] & _MEDIA)


def _list_types(feature: Any) -> set[str]:
    """Return the names of the types in a column, as `datasets` writes them into its files."""
    if isinstance(feature, list):
        return set().union(*map(_list_types, feature))
    if isinstance(feature, dict):
        kind = {str(feature["_type"])} if isinstance(feature.get("_type"), str) else set()
        return kind.union(*map(_list_types, feature.values()))
    return set()


def _read_saved_names(path: Path, key: str) -> list[str]:
    """Return the names under ``key`` in a saved dataset's JSON file; raise ValueError if it is missing or damaged."""
    damaged = ValueError(f"'{path}' is missing or damaged; save the dataset again")
    with translate_errors((OSError, ValueError, LookupError, TypeError), lambda _: damaged):
        return [str(name) for name in json.loads(path.read_text(encoding="utf-8"))[key]]
