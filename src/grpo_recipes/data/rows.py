"""Read a dataset, wherever it is: the hub, a file, a folder of files, a folder of ``save_to_disk``.

rows = read_rows("openai/gsm8k", "main", "train")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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

from grpo_recipes import smoke
from grpo_recipes.errors import config_error
from grpo_recipes.modebench.dataset import SCHEME, Settings, rows
from grpo_recipes.recipe.configs import DatasetConfig, ScriptArguments
from grpo_recipes.recipe.datafiles import BUILDERS, csv_columns, data_files, has_splits, is_saved, split_name

Rows = Dataset | IterableDataset
# (hub id, configuration, split) -> folder of `save_to_disk` that an earlier `grpo fetch` left, or None.
Fetched = Callable[[str, str | None, str], Path | None]
_COLUMN_KEYS = ("dataset_prompt_column", "dataset_solution_column")


@dataclass(frozen=True)
class DataSource:
    """One dataset of a recipe, and the columns that the recipe reads."""

    id: str  # hub id, file or folder
    config: str | None
    split: str
    prompt: str  # column of the problem
    solution: str  # column of the reference solution
    keys: tuple[str, str] = _COLUMN_KEYS  # recipe keys that name the two columns, for messages
    others: tuple[str, ...] | None = None  # other columns to keep; None keeps all scalars


def train_source(args: ScriptArguments) -> DataSource:
    """Return what ``dataset_name`` names."""
    prompt, solution = (getattr(args, key) for key in _COLUMN_KEYS)
    return DataSource(args.dataset_name, args.dataset_config, args.dataset_train_split, prompt, solution)


def mixture_source(entry: DatasetConfig, args: ScriptArguments) -> DataSource:
    """Return an entry of ``dataset_mixture``: two of its ``columns`` are prompt and solution, the rest are kept."""
    prompt, solution, *others = entry.columns or [getattr(args, key) for key in _COLUMN_KEYS]
    keys, kept = ("dataset_mixture", "dataset_mixture"), tuple(others) if entry.columns else None
    return DataSource(entry.id, entry.config, entry.split, prompt, solution, keys, kept)


def eval_source(args: ScriptArguments) -> DataSource:
    """Return ``eval_dataset_name``, else ``dataset_test_split`` of ``dataset_name``, unless it is one file."""
    first, second = (f"eval_{key}" if getattr(args, f"eval_{key}") else key for key in _COLUMN_KEYS)
    name, config, split = args.eval_dataset_name, args.eval_dataset_config, args.eval_dataset_split
    if not name:
        name, config, split = args.dataset_name, args.dataset_config, args.dataset_test_split
        path = Path(os.path.expanduser(name))
        if path.exists() and not has_splits(path):
            what = f"'{name}' has no split '{split}' to evaluate on"
            raise config_error("eval_strategy", what, "add eval_dataset_name")
    return DataSource(name, config, split, getattr(args, first), getattr(args, second), (first, second))


def read_rows(
    source: str, config: str | None, split: str, streaming: bool = False, fetched: Fetched | None = None
) -> Rows:
    """Read a dataset: a hub id, a local file or a local folder; a ConfigError says why it cannot be read.

    ``split`` may be a slice such as ``train[:10%]``; a single file is whatever split is asked for. A stream is left
    unread, and what ``fetched`` finds on this machine is mapped, never streamed.
    """
    if fetched and (folder := fetched(source, config, split)):
        return load_from_disk(str(folder))
    path = Path(os.path.expanduser(source))
    with reading(source):
        if path.is_dir() and is_saved(path):
            loaded = load_from_disk(str(path))
            parts = loaded if isinstance(loaded, DatasetDict) else {split_name(split): loaded}
            ranges = ReadInstruction.from_spec(split).to_absolute({name: len(part) for name, part in parts.items()})
            return concatenate_datasets([parts[one.splitname].select(range(one.from_, one.to)) for one in ranges])
        options: dict[str, Any] = {"split": split, "streaming": streaming}
        if path.is_dir():
            kind, files = data_files(path)
            return load_dataset(str(path), config, **options, **_text_options(kind, files[0]))
        if not path.is_file():
            return load_dataset(source, config, **options)
        if path.suffix not in BUILDERS:
            raise ValueError(f"not a {', '.join(BUILDERS)} file")
        if config is not None:
            raise ValueError(f"a file has no configuration '{config}'")
        kind, files_of_split = BUILDERS[path.suffix], {split_name(split): str(path)}
        return load_dataset(kind, data_files=files_of_split, **options, **_text_options(kind, path))


def rows_of(source: DataSource, args: ScriptArguments, fetched: Fetched | None = None) -> Rows:
    """Return the rows of a dataset that a recipe names: read, or made for ``modebench:...`` and ``smoke:...``."""
    if source.id.startswith(smoke.SMOKE_SCHEME):
        return Dataset.from_list(smoke.split()[source.split == "test"])
    if not source.id.startswith(SCHEME):
        return read_rows(source.id, source.config, source.split, args.dataset_streaming, fetched)
    settings = Settings.read(lambda key: getattr(args, key))
    return Dataset.from_list(rows(source.id, source.split, settings))


def column_names(rows: Rows) -> list[str]:
    """Return the columns of rows; those of a stream without a schema show in its first row."""
    return rows.column_names or list(next(iter(rows), {}))


def need_columns(source: str, names: list[str], wanted: dict[str, str]) -> None:
    """Refuse a dataset with these columns that lacks one; ``wanted`` has the recipe key that names each."""
    for column, key in wanted.items():
        if column not in names:
            raise config_error(key, f"'{source}' has no column '{column}'", f"write one of {', '.join(names)}")


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Raise a ConfigError with the dataset and the reason, in one line, in place of what ``datasets`` raises."""
    try:
        yield
    except (DatasetsError, OSError, ValueError, RuntimeError, StopIteration) as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        text = " ".join(str(first).split()) or type(first).__name__
        reason = "it has no rows" if isinstance(first, StopIteration) else text[:300] + " ..." * (len(text) > 300)
        fix = "repair the file, or name a dataset, configuration and split that exist"
        if isinstance(error, DatasetNotFoundError):
            fix = "check the id; a private or gated dataset needs HF_TOKEN, and its terms accepted on its page"
        elif isinstance(error, ConnectionError):
            fix = "run grpo fetch RECIPE where there is a network, or name a local file"
        raise config_error(f"'{source}'", f"the dataset cannot be read: {reason}", fix) from error


def _text_options(kind: str, file: Path) -> dict[str, Any]:
    """Return how to read a .csv file. Guessing types makes 7 of the answer 007, and nothing of the answer NA."""
    if kind != "csv":
        return {}
    return {"converters": dict.fromkeys(csv_columns(file), str), "na_filter": False, "keep_default_na": False}
