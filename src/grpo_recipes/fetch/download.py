"""Downloading models and datasets at resolved commits. Needs huggingface_hub and datasets, not torch.

Both read HF_HOME, HF_ENDPOINT and the like when they are imported: import this module after those are set.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.fetch.assets import MODEL, Piece
from grpo_recipes.fetch.files import wanted_files
from grpo_recipes.fetch.gated import how_to_get_access
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, INTERRUPTED, human
from grpo_recipes.fetch.records import Record, dataset_folder, folder_files, make_record, write_record
from grpo_recipes.secrets import masked

_STALE_SECONDS = 24 * 3600
_HUB_ERRORS = (
    HfHubHTTPError, httpx.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError, HFValidationError
)  # fmt: skip


def commit_of(piece: Piece) -> str:
    """The commit a piece's revision stands for at the hub now.

    Raises:
        ConfigError: there is no such repository or revision, or it may not be read.
    """
    return str(_info(piece, HfApi(), files_metadata=False).sha)


def fetch(piece: Piece, environment: Mapping[str, str]) -> Record:
    """Bring a piece at the commit its revision stands for now, and record it.

    A model's files go to the hub client's own cache; what is there already is not downloaded again. A dataset is saved
    under ``<CACHE_ROOT>/datasets``, and appears there complete or not at all.

    Raises:
        ConfigError: it does not exist, may not be read, does not fit on the disk, or the hub does not answer.
    """
    bring = _fetch_model if piece.kind == MODEL else _fetch_dataset
    try:
        record = bring(piece, environment)
    except _HUB_ERRORS as error:
        raise _refusal(error, piece) from None
    except OSError as error:
        fix = "free space or set CACHE_ROOT to a larger file system, then run it again: what came is kept"
        raise config_error(piece.where, f"cannot fetch {piece}: {_line(error)}", fix) from None
    write_record(record, piece, environment)
    return record


def _info(piece: Piece, api: HfApi, files_metadata: bool) -> Any:
    try:
        return api.repo_info(piece.id, repo_type=piece.kind, revision=piece.revision, files_metadata=files_metadata)
    except _HUB_ERRORS as error:
        raise _refusal(error, piece) from None


def _licence(info: Any) -> str | None:
    licence = getattr(info.card_data, "license", None)
    return licence if isinstance(licence, str) else None


def _fetch_model(piece: Piece, _: Mapping[str, str]) -> Record:
    info = _info(piece, HfApi(), files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    names = wanted_files(sizes, piece.code)
    if not names:
        raise config_error(piece.where, f"{piece} holds no files of a model", "name a repository with weights")
    arguments: dict[str, Any] = {"revision": info.sha, "allow_patterns": [glob.escape(name) for name in names]}
    planned = snapshot_download(piece.id, dry_run=True, **arguments)
    needed = sum(file.file_size or 0 for file in planned if file.will_download)
    _need_space(piece, Path(constants.HF_HUB_CACHE), needed)
    with _ctrl_c_ends_at_once():
        folder = Path(snapshot_download(piece.id, **arguments))
    return make_record(
        piece, info.sha, folder, {name: (folder / name).stat().st_size for name in names}, _licence(info)
    )


@contextmanager
def _ctrl_c_ends_at_once() -> Iterator[None]:
    """Without it the threads that download are waited for, which takes as long as a file of many GB does."""

    def end(*_: Any) -> None:
        print(INTERRUPTED, file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _need_space(piece: Piece, folder: Path, needed: int) -> None:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        what = f"{piece} takes {human(needed)} more, {there} has {human(free)} free"
        raise config_error(piece.where, what, "free space, or set CACHE_ROOT or HF_HOME to a larger file system")


def _fetch_dataset(piece: Piece, environment: Mapping[str, str]) -> Record:
    info = _info(piece, HfApi(), files_metadata=False)
    folder = dataset_folder(piece, info.sha, environment)
    if not _is_whole(folder):
        _save_rows(piece, info.sha, folder)
    return make_record(piece, info.sha, folder, folder_files(folder), _licence(info))


def _is_whole(folder: Path) -> bool:
    """Whether saved rows can be read: many clusters remove single files that are old."""
    import datasets

    try:
        datasets.load_from_disk(str(folder))
    except (OSError, ValueError):  # a file is missing, or cut short
        return False
    return True


def _save_rows(piece: Piece, commit: str, folder: Path) -> None:
    """Write the rows aside, then put them in place at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        _rows(piece, commit, partial / "cache").save_to_disk(partial / "rows")
        _put(partial / "rows", folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(rows: Path, folder: Path) -> None:
    try:
        os.rename(rows, folder)
    except OSError:
        if _is_whole(folder):  # another fetch has come first: its result stands
            return
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(rows, folder)


def _remove_stale(folder: Path) -> None:
    """Remove what fetches of this dataset left that were killed more than a day ago."""
    for left in folder.parent.glob(f".{glob.escape(folder.name)}.*"):
        if time.time() - left.stat().st_mtime > _STALE_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _rows(piece: Piece, commit: str, cache: Path) -> Any:
    """The rows of a dataset at a commit; the intermediate files go to ``cache``."""
    import datasets

    arguments: dict[str, Any] = {"split": piece.split, "revision": commit, "cache_dir": str(cache)}
    try:
        if piece.limit is None:
            return datasets.load_dataset(piece.id, piece.config, **arguments)
        stream = datasets.load_dataset(piece.id, piece.config, streaming=True, **arguments)

        def first_rows() -> Iterator[dict[str, Any]]:
            yield from stream.take(piece.limit)

        return datasets.Dataset.from_generator(first_rows, features=stream.features, cache_dir=str(cache))
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError, FileNotFoundError) as error:
        raise _dataset_refusal(error, piece) from None


def _dataset_refusal(error: Exception, piece: Piece) -> ConfigError:
    """What keeps a dataset from being read: its licence, or its name, configuration, split or format."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)  # type: ignore[arg-type]
    for cause in causes:
        if isinstance(cause, _HUB_ERRORS):
            return _refusal(cause, piece)
    if "gated" in str(error):
        return config_error(piece.where, f"{piece} is gated", how_to_get_access(piece.id, piece.kind))
    return config_error(
        piece.where, f"cannot read {piece}: {_line(error)}", "correct the name, the config or the split"
    )


def _refusal(error: Exception, piece: Piece) -> ConfigError:
    """One line for what the hub answered, or did not."""
    if isinstance(error, GatedRepoError):
        what = f"{piece} is gated and this account may not read it"
        return config_error(piece.where, what, how_to_get_access(piece.id, piece.kind))
    if isinstance(error, RepositoryNotFoundError):
        what = f"the hub has no {piece.kind} '{piece.id}', or it is private"
        return config_error(
            piece.where, what, "correct the name; for a private one export HF_TOKEN or run hf auth login"
        )
    if isinstance(error, HFValidationError):
        return config_error(
            piece.where, f"'{piece.id}' is neither here nor the name of a {piece.kind}", "correct the name"
        )
    if isinstance(error, RevisionNotFoundError):
        what = f"{piece.kind} '{piece.id}' has no revision '{piece.revision}'"
        return config_error(piece.where, what, "name a branch, tag or commit that exists (model_revision)")
    fix = "run it again where the hub is reachable: what came is kept"
    return config_error(piece.where, f"cannot fetch {piece} from {constants.ENDPOINT}: {_line(error)}", fix)


def _line(error: Exception) -> str:
    return masked(" ".join(str(error).split())[:300]).rstrip(".") or type(error).__name__
