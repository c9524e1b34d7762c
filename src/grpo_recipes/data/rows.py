"""Rows of a dataset wherever it is: the hub, a file, a folder of files, a folder of ``save_to_disk``.

    rows = read_rows("openai/gsm8k", "main", "train", columns=["question", "answer"], limit=100)

Everything that reads a dataset does so here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import (
    Dataset,
    DatasetDict,
    IterableDataset,
    ReadInstruction,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from grpo_recipes.data.sources import Source
from grpo_recipes.errors import config_error
from grpo_recipes.modebench.dataset import SCHEME, Settings, TooFew, rows
from grpo_recipes.recipe.check_data import too_few
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.datafiles import BUILDERS, csv_columns, data_files, folder_kind, is_saved, split_name

Rows = Dataset | IterableDataset
# (hub id, configuration, split) -> folder of `save_to_disk` that an earlier `grpo fetch` left, or None.
Fetched = Callable[[str, str | None, str], Path | None]


def read_rows(
    source: str,
    config: str | None,
    split: str,
    columns: Iterable[str] | None = None,
    streaming: bool = False,
    limit: int | None = None,
    fetched: Fetched | None = None,
    revision: str | None = None,
) -> Dataset:
    """Read a dataset.

    Args:
        source: hub id, local file or local folder.
        config: its configuration.
        split: its split, slices such as ``train[:10%]`` included; a single file is whatever split is asked for.
        columns: those to keep, all by default.
        streaming: read no more of it than ``limit`` takes.
        limit: only the first rows.
        fetched: looked up first.
        revision: branch, tag or commit of a hub dataset.

    Raises:
        ConfigError: it cannot be read, or lacks a column.
    """
    if streaming and limit is None:
        raise ValueError("a stream is read to a limit")
    rows = open_rows(source, config, split, streaming, fetched, revision)
    if columns is not None:
        need_columns(source, column_names(rows), {column: "columns" for column in columns})
        rows = rows.select_columns(list(columns))
    if isinstance(rows, IterableDataset):
        with told(source):
            return Dataset.from_list(list(rows.take(limit)), features=rows.features)
    return rows if limit is None else rows.select(range(min(limit, len(rows))))


def open_rows(
    source: str,
    config: str | None,
    split: str,
    streaming: bool = False,
    fetched: Fetched | None = None,
    revision: str | None = None,
) -> Rows:
    """As ``read_rows``, with a stream left unread. What is on this machine is mapped, never streamed from the hub.

    Raises:
        ConfigError: it cannot be read.
    """
    folder = fetched(source, config, split) if fetched else None
    if folder is not None:
        return load_from_disk(str(folder))
    path = Path(os.path.expanduser(source))
    with told(source):
        if path.is_dir() and is_saved(path):
            return _saved(path, split)
        if path.is_file():
            return _load_file(path, config, split, streaming)
        if path.is_dir():
            options = _options(folder_kind(path), data_files(path)[0])
            return load_dataset(str(path), config, split=split, streaming=streaming, **options)
        return load_dataset(source, config, split=split, streaming=streaming, revision=revision)


def rows_of(source: Source, args: ScriptArguments, fetched: Fetched | None = None) -> Rows:
    """The rows of a dataset that a recipe names: opened, or made where it is ``modebench:...``.

    Args:
        source: the dataset.
        args: ``dataset_streaming``, and the keys ``modebench_*``.
        fetched: as in ``read_rows``.

    Raises:
        ConfigError: it cannot be read, or there are too few problems of the kind asked for.
    """
    if not source.id.startswith(SCHEME):
        return open_rows(source.id, source.config, source.split, args.dataset_streaming, fetched)
    settings = Settings.read(lambda key: getattr(args, key))
    try:
        return Dataset.from_list(rows(source.id, source.split, settings))
    except TooFew as error:
        key, what, fix = too_few(settings, error.found)
        raise config_error(key, what, fix) from error


def column_names(rows: Rows) -> list[str]:
    """Columns of rows, of a stream whose columns nobody wrote down by its first row."""
    return rows.column_names or list(next(iter(rows), {}))


def need_columns(source: str, names: list[str], wanted: dict[str, str]) -> None:
    """See that columns are there.

    Args:
        source: the dataset.
        names: its columns.
        wanted: column -> the recipe key that names it.

    Raises:
        ConfigError: one is missing; the message lists those that exist.
    """
    for column, key in wanted.items():
        if column not in names:
            raise config_error(key, f"'{source}' has no column '{column}'", f"write one of {', '.join(names)}")


@contextmanager
def told(source: str) -> Iterator[None]:
    """Say which dataset cannot be read and why, in one line.

    Raises:
        ConfigError: in place of what ``datasets`` raises.
    """
    try:
        yield
    except (DatasetsError, OSError, ValueError, RuntimeError, StopIteration) as error:
        raise config_error(f"'{source}'", f"the dataset cannot be read: {_reason(error)}", _fix(error)) from error


def _saved(path: Path, split: str) -> Dataset:
    loaded = load_from_disk(str(path))
    parts = loaded if isinstance(loaded, DatasetDict) else {split_name(split): loaded}
    ranges = ReadInstruction.from_spec(split).to_absolute({name: len(part) for name, part in parts.items()})
    return concatenate_datasets([parts[one.splitname].select(range(one.from_, one.to)) for one in ranges])


def _load_file(path: Path, config: str | None, split: str, streaming: bool) -> Rows:
    if path.suffix not in BUILDERS:
        raise ValueError(f"not a {', '.join(BUILDERS)} file")
    if config is not None:
        raise ValueError(f"a file has no configuration '{config}'")
    kind = BUILDERS[path.suffix]
    files = {split_name(split): str(path)}
    return load_dataset(kind, data_files=files, split=split, streaming=streaming, **_options(kind, path))


def _options(kind: str, file: Path) -> dict[str, Any]:
    """A .csv file has no types. Guessing them makes 7 of the answer 007, and nothing of the answer NA."""
    if kind != "csv":
        return {}
    return {"converters": dict.fromkeys(csv_columns(file), str), "na_filter": False, "keep_default_na": False}


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, StopIteration):
        return "it has no rows"
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."


def _fix(error: BaseException) -> str:
    if isinstance(error, DatasetNotFoundError):
        return "check the id; a private or gated dataset wants HF_TOKEN, and its terms accepted on its page"
    if isinstance(error, ConnectionError):
        return "run grpo fetch RECIPE where there is a network, or name a local file"
    return "mend the file, or name a dataset, configuration and split that exist"
