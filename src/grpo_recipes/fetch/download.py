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
from grpo_recipes.fetch.assets import MODEL, Record, Wanted, dataset_folder, make_record, write_record
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, INTERRUPTED, how_to_get_access
from grpo_recipes.paths import existing
from grpo_recipes.process.reports import gigabytes
from grpo_recipes.secrets import masked

_STALE_SECONDS = 24 * 3600
_HUB_ERRORS = (
    HfHubHTTPError, httpx.TransportError, OfflineModeIsEnabled, LocalEntryNotFoundError, HFValidationError
)  # fmt: skip

_LARGEST_SMALL_FILE = 64 << 20
# The same weights in the formats of other libraries, archives, and pictures for the page.
_NEVER = (
    ".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".ot", ".tflite",
    ".mlmodel", ".npz", ".zip", ".tar", ".gz", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".mp4",
    ".md", ".gitattributes",
)  # fmt: skip
_FOLDERS = ("additional_chat_templates/",)


def commit_of(asset: Wanted) -> str:
    """Return the commit an asset's revision stands for at the hub now.

    Raises:
        ConfigError: there is no such repository or revision, or it may not be read.
    """
    try:
        return str(_info(asset).sha)
    except _HUB_ERRORS as error:
        raise _refusal(error, asset) from None


def fetch(asset: Wanted, environment: Mapping[str, str]) -> Record:
    """Bring an asset at the commit its revision stands for now, and record it.

    A model's files go to the hub client's own cache; what is there already is not downloaded again. A dataset is saved
    under ``<CACHE_ROOT>/datasets``, and appears there complete or not at all.

    Raises:
        ConfigError: it does not exist, may not be read, does not fit on the disk, or the hub does not answer.
    """
    bring = _fetch_model if asset.kind == MODEL else _fetch_dataset
    try:
        record = bring(asset, environment)
    except _HUB_ERRORS as error:
        raise _refusal(error, asset) from None
    except OSError as error:
        fix = "free space or set CACHE_ROOT to a larger file system, then run it again: what came is kept"
        raise config_error(asset.where, f"cannot fetch {asset}: {_line(error)}", fix) from None
    write_record(record, asset, environment)
    return record


def _info(asset: Wanted, files_metadata: bool = False) -> Any:
    repo, kind = asset.id, asset.kind
    return HfApi().repo_info(repo, repo_type=kind, revision=asset.revision, files_metadata=files_metadata)


def _licence(info: Any) -> str | None:
    licence = getattr(info.card_data, "license", None)
    return licence if isinstance(licence, str) else None


def wanted_files(sizes: Mapping[str, int], code: bool = False) -> list[str]:
    """Return the files to download: safetensors (or pytorch_model*.bin without any), configuration and tokenizer.

    Args:
        sizes: every file of the repository with its size in bytes.
        code: whether its Python files are wanted (trust_remote_code).
    """
    root = [name for name in sizes if "/" not in name or name.startswith(_FOLDERS)]
    weights = [name for name in root if name.endswith(".safetensors") and not name.startswith("consolidated")]
    if not weights:
        weights = [name for name in root if name.startswith("pytorch_model") and name.endswith(".bin")]
    small = [name for name in root if _is_small_part(name, sizes[name], code)]
    return sorted({*weights, *small})


def _is_small_part(name: str, size: int, code: bool) -> bool:
    if name.endswith(_NEVER) or name.endswith(".safetensors") or size > _LARGEST_SMALL_FILE:
        return False
    # params.json and consolidated.* are Mistral's own format, which vLLM would prefer to the one that is trained.
    if name == "params.json" or name.startswith("consolidated"):
        return False
    return code or not name.endswith(".py")


def _fetch_model(asset: Wanted, _: Mapping[str, str]) -> Record:
    info = _info(asset, files_metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    names = wanted_files(sizes, asset.code)
    if not names:
        raise config_error(asset.where, f"{asset} holds no files of a model", "name a repository with weights")
    arguments: dict[str, Any] = {"revision": info.sha, "allow_patterns": [glob.escape(name) for name in names]}
    planned = snapshot_download(asset.id, dry_run=True, **arguments)
    needed = sum(file.file_size or 0 for file in planned if file.will_download)
    _need_space(asset, Path(constants.HF_HUB_CACHE), needed)
    with _ctrl_c_ends_at_once():
        folder = Path(snapshot_download(asset.id, **arguments))
    files = {name: (folder / name).stat().st_size for name in names}
    return make_record(asset, info.sha, folder, files, _licence(info))


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


def _need_space(asset: Wanted, folder: Path, needed: int) -> None:
    there = existing(folder)
    free = shutil.disk_usage(there).free
    if needed > free:
        what = f"{asset} takes {gigabytes(needed)} more, {there} has {gigabytes(free)} free"
        raise config_error(asset.where, what, "free space, or set CACHE_ROOT or HF_HOME to a larger file system")


def _fetch_dataset(asset: Wanted, environment: Mapping[str, str]) -> Record:
    info = _info(asset)
    folder = dataset_folder(asset, info.sha, environment)
    if not _is_whole(folder):
        _save_rows(asset, info.sha, folder)
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    return make_record(asset, info.sha, folder, files, _licence(info))


def _is_whole(folder: Path) -> bool:
    """Whether saved rows can be read: many clusters remove single files that are old."""
    import datasets

    try:
        datasets.load_from_disk(str(folder))
    except (OSError, ValueError):  # a file is missing, or cut short
        return False
    return True


def _save_rows(asset: Wanted, commit: str, folder: Path) -> None:
    """Write the rows aside, then put them in place at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(folder)
    partial = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        _rows(asset, commit, partial / "cache").save_to_disk(partial / "rows")
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


def _rows(asset: Wanted, commit: str, cache: Path) -> Any:
    """Return the rows of a dataset at a commit; the intermediate files go to ``cache``."""
    import datasets

    arguments: dict[str, Any] = {"split": asset.split, "revision": commit, "cache_dir": str(cache)}
    try:
        if asset.limit is None:
            return datasets.load_dataset(asset.id, asset.config, **arguments)
        stream = datasets.load_dataset(asset.id, asset.config, streaming=True, **arguments)

        def first_rows() -> Iterator[dict[str, Any]]:
            yield from stream.take(asset.limit)

        return datasets.Dataset.from_generator(first_rows, features=stream.features, cache_dir=str(cache))
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError, FileNotFoundError) as error:
        raise _dataset_refusal(error, asset) from None


def _dataset_refusal(error: Exception, asset: Wanted) -> ConfigError:
    """Return what keeps a dataset from being read: its licence, or its name, configuration, split or format."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, _HUB_ERRORS):
            return _refusal(cause, asset)
        cause = cause.__cause__ or cause.__context__
    what, fix = f"cannot read {asset}: {_line(error)}", "correct the name, the config or the split"
    if "gated" in str(error):
        what, fix = f"{asset} is gated", how_to_get_access(asset.id, asset.kind)
    return config_error(asset.where, what, fix)


def _refusal(error: Exception, asset: Wanted) -> ConfigError:
    """Return one line for what the hub answered, or did not."""
    what = f"cannot fetch {asset} from {constants.ENDPOINT}: {_line(error)}"
    fix = "run it again where the hub is reachable: what came is kept"
    if isinstance(error, GatedRepoError):
        what = f"{asset} is gated and this account may not read it"
        fix = how_to_get_access(asset.id, asset.kind)
    elif isinstance(error, RepositoryNotFoundError):
        what = f"the hub has no {asset.kind} '{asset.id}', or it is private"
        fix = "correct the name; for a private one export HF_TOKEN or run hf auth login"
    elif isinstance(error, HFValidationError):
        what, fix = f"'{asset.id}' is neither here nor the name of a {asset.kind}", "correct the name"
    elif isinstance(error, RevisionNotFoundError):
        what = f"{asset.kind} '{asset.id}' has no revision '{asset.revision}'"
        fix = "name a branch, tag or commit that exists (model_revision)"
    return config_error(asset.where, what, fix)


def _line(error: Exception) -> str:
    return masked(" ".join(str(error).split())[:300]).rstrip(".") or type(error).__name__
