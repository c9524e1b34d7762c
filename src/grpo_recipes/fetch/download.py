"""Download models and datasets at resolved commits, and record them. Needs huggingface_hub and datasets, not torch.

Both libraries read HF_HOME, HF_ENDPOINT and similar variables at their import: set those before you import this module.
"""

import fcntl
import glob
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import httpx
from huggingface_hub import HfApi, constants, errors, snapshot_download

from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.fetch.assets import MODEL, Asset, get_dataset_folder, get_record_path, write_record
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, INTERRUPTED, explain_access, format_error_line
from grpo_recipes.paths import nearest_existing_folder
from grpo_recipes.process.reports import format_bytes

_STALE_SECONDS = 24 * 3600
_LARGEST_SMALL_FILE = 64 << 20
# Weights in formats of other libraries, archives, and images of the model card.
_NEVER = (
    ".bin", ".pth", ".pt", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".ggml", ".ot", ".tflite",
    ".mlmodel", ".npz", ".zip", ".tar", ".gz", ".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".pdf", ".mp4",
    ".md", ".gitattributes", ".safetensors",
)  # fmt: skip

_HUB_ERRORS = (
    errors.HfHubHTTPError, errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError, errors.HFValidationError,
    httpx.TransportError,
)  # fmt: skip
_NAME_FIX = "correct the name"
# Error classes, fault and fix; the first row that fits an error is used.
_ERROR_TABLE: tuple[tuple[Any, str, str], ...] = (
    (errors.GatedRepoError, "{asset} is gated and this account may not read it", "{access}"),
    (
        errors.RepositoryNotFoundError, "the hub has no {asset.kind} '{asset.id}', or it is private",
        f"{_NAME_FIX}; if it is private, export HF_TOKEN or run hf auth login",
    ),
    (errors.HFValidationError, "'{asset.id}' is neither a local path nor a valid hub id of a {asset.kind}", _NAME_FIX),
    (
        errors.RevisionNotFoundError, "{asset.kind} '{asset.id}' has no revision '{asset.revision}'",
        "set model_revision to an existing branch, tag or commit",
    ),
    (
        _HUB_ERRORS, "cannot fetch {asset} from {hub}: {line}",
        "run it again on a machine that reaches the hub; finished files are kept",
    ),
    (
        (ValueError, RuntimeError, FileNotFoundError, datasets.exceptions.DatasetsError),
        "cannot read {asset}: {line}", "correct the name, the config or the split",
    ),
    (
        OSError, "cannot fetch {asset}: {line}",
        "free space or set CACHE_ROOT to a larger file system, then run it again; finished files are kept",
    ),
)  # fmt: skip
_FAILURES = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *_HUB_ERRORS)


def read_hub_commit(asset: Asset) -> str:
    """Request the current commit of an asset's revision from the hub. Raise ConfigError if that fails."""
    with translate_errors(_FAILURES, lambda error: _describe_hub_error(error, asset)):
        return str(_repository_info(asset).sha)


def fetch(asset: Asset, environment: Mapping[str, str]) -> Asset:
    """Download an asset at the current commit of its revision, record it, and return it with its path and files.

    A model's files go to the hub client's cache. A dataset goes to ``<CACHE_ROOT>/datasets``, complete or not at
    all. Raise ConfigError if it does not exist, may not be read or does not fit, or if the hub does not answer.
    Call it in the main thread: while a model is downloaded, Ctrl-C ends the process at once with exit code 130.
    """
    with translate_errors(_FAILURES, lambda error: _describe_hub_error(error, asset)):
        fetched = _fetch_model(asset) if asset.kind == MODEL else _fetch_dataset(asset, environment)
        write_record(fetched, environment)
        return fetched


def _describe_hub_error(error: Exception, asset: Asset) -> ConfigError:
    """Return the ConfigError, with fault and fix, for an error of the hub or of reading its data."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _HUB_ERRORS):
        cause = cause.__cause__ or cause.__context__  # datasets wraps the hub's answer
    is_gated = "gated dataset" in str(error)  # datasets raises this without a cause
    matching_rows = (row for row in _ERROR_TABLE if isinstance(cause or error, row[0]))
    _, fault, fix = _ERROR_TABLE[0] if is_gated else next(matching_rows)
    access = explain_access(asset.id, asset.kind)
    values = {"asset": asset, "access": access, "hub": constants.ENDPOINT, "line": format_error_line(error)}
    return config_error(asset.where, fault.format(**values), fix.format(**values))


def _repository_info(asset: Asset, files_metadata: bool = False) -> Any:
    """Request the hub's description of an asset's repository at its revision, with file sizes if requested."""
    repo, kind = asset.id, asset.kind
    return HfApi().repo_info(repo, repo_type=kind, revision=asset.revision, files_metadata=files_metadata)


def _add_files(asset: Asset, info: Any, folder: Path, names: list[str]) -> Asset:
    """Return a downloaded asset with its commit, its license, and the sizes of the files ``names`` in a folder."""
    licence = getattr(info.card_data, "license", None)
    licence = licence if isinstance(licence, str) else None
    files = {name: (folder / name).stat().st_size for name in names}
    return replace(asset, commit=info.sha, path=str(folder), licence=licence, files=files)


def choose_files(sizes: Mapping[str, int], code: bool = False) -> list[str]:
    """Choose a model repository's files to download: safetensors (else pytorch_model*.bin), configs and tokenizer.

    ``sizes`` has the bytes of every file of the repository. With ``code``, its Python files are included.
    """
    root = [name for name in sizes if "/" not in name or name.startswith("additional_chat_templates/")]
    # consolidated.* and params.json are in Mistral's format. vLLM would load them instead of the trained weights.
    root = [name for name in root if not name.startswith("consolidated") and name != "params.json"]
    weights = [name for name in root if name.endswith(".safetensors")]
    weights = weights or [name for name in root if name.startswith("pytorch_model") and name.endswith(".bin")]
    unwanted = _NEVER if code else (*_NEVER, ".py")
    small = [name for name in root if sizes[name] <= _LARGEST_SMALL_FILE and not name.endswith(unwanted)]
    return sorted({*weights, *small})


def _fetch_model(asset: Asset) -> Asset:
    """Download the files of a model to the hub client's cache, and return the asset with its path and files.

    Ctrl-C during the download ends the process at once. Raise ConfigError if the repository has no model files, or the
    disk has too little space.
    """
    info = _repository_info(asset, files_metadata=True)
    names = choose_files({file.rfilename: file.size or 0 for file in info.siblings or []}, asset.code)
    if not names:
        raise config_error(asset.where, f"{asset} contains no model files", "use a repository with weights")
    arguments: dict[str, Any] = {"revision": info.sha, "allow_patterns": [glob.escape(name) for name in names]}
    planned = snapshot_download(asset.id, dry_run=True, **arguments)
    needed = sum(file.file_size or 0 for file in planned if file.will_download)
    cache = nearest_existing_folder(Path(constants.HF_HUB_CACHE))
    free = shutil.disk_usage(cache).free
    if needed > free:
        fault = f"{asset} needs {format_bytes(needed)} more, {cache} has {format_bytes(free)} free"
        raise config_error(asset.where, fault, "free space, or set CACHE_ROOT or HF_HOME to a larger file system")
    with ExitStack() as exits:
        exits.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, _exit_at_once))
        return _add_files(asset, info, Path(snapshot_download(asset.id, **arguments)), names)


def _exit_at_once(*_: object) -> None:
    """Print a message and exit at once on Ctrl-C: download threads would first finish their files of many GB."""
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def _fetch_dataset(asset: Asset, environment: Mapping[str, str]) -> Asset:
    """Download a dataset's rows to a temporary folder, rename it, and return the asset with its path and files.

    Nothing is downloaded if the rows are already saved. A lock file lets parallel fetches wait for each other.
    """
    info = _repository_info(asset)
    folder = get_dataset_folder(asset, info.sha, environment)
    lock = get_record_path(replace(asset, revision=info.sha), environment).with_suffix(".lock")
    for parent in (folder.parent, lock.parent):
        parent.mkdir(parents=True, exist_ok=True)
    temporary_prefix = f".{folder.name}."
    stale_before = time.time() - _STALE_SECONDS  # without a lock, younger folders may belong to a running fetch
    with ExitStack() as exits:
        with suppress(OSError):  # a file system without locks, or a lock of another user
            fcntl.flock(exits.enter_context(lock.open("w")), fcntl.LOCK_EX)
            stale_before = math.inf
        if not _is_complete(folder):
            for leftover in folder.parent.glob(f"{glob.escape(temporary_prefix)}*"):  # from a fetch that was killed
                if leftover.stat().st_mtime < stale_before:
                    shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(
                "", temporary_prefix, folder.parent, ignore_cleanup_errors=True
            ) as temporary:
                _load_rows(asset, info.sha, f"{temporary}/cache").save_to_disk(f"{temporary}/rows")
                if not _is_complete(folder):  # otherwise another fetch finished first, and its result stays
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(f"{temporary}/rows", folder)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return _add_files(asset, info, folder, names)


def _is_complete(folder: Path) -> bool:
    """Return whether the saved rows in a folder can be read; many clusters remove single old files."""
    with suppress(OSError, ValueError):  # a file is missing or truncated
        return datasets.load_from_disk(str(folder)) is not None
    return False


def _load_rows(asset: Asset, commit: str, cache: str) -> Any:
    """Return the rows of a dataset at a commit, only the first ``asset.limit`` if it is set.

    Intermediate files go to ``cache``.
    """
    arguments: dict[str, Any] = {"split": asset.split, "revision": commit, "cache_dir": cache}
    if asset.limit is None:
        return datasets.load_dataset(asset.id, asset.config, **arguments)
    stream = datasets.load_dataset(asset.id, asset.config, streaming=True, **arguments)

    def first_rows() -> Iterator[dict[str, Any]]:
        """Yield the first ``asset.limit`` rows."""
        yield from stream.take(asset.limit)

    return datasets.Dataset.from_generator(first_rows, features=stream.features, cache_dir=cache)
