"""Download models and datasets at resolved commits. Needs huggingface_hub and datasets, not torch.

Both read HF_HOME, HF_ENDPOINT and the like when they are imported: import this module after those are set.
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

from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.fetch.assets import MODEL, Asset, dataset_folder, record_file, write_record
from grpo_recipes.fetch.hub import EXIT_INTERRUPTED, INTERRUPTED, error_line, how_to_get_access
from grpo_recipes.paths import nearest_existing_folder
from grpo_recipes.process.reports import gigabytes

_STALE_SECONDS = 24 * 3600
_LARGEST_SMALL_FILE = 64 << 20
# The same weights in the formats of other libraries, archives, and pictures for the page.
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
# The first row that fits an error is its message: its class, what is wrong, and the fix.
_REFUSALS: tuple[tuple[Any, str, str], ...] = (
    (errors.GatedRepoError, "{asset} is gated and this account may not read it", "{access}"),
    (
        errors.RepositoryNotFoundError, "the hub has no {asset.kind} '{asset.id}', or it is private",
        f"{_NAME_FIX}; for a private one export HF_TOKEN or run hf auth login",
    ),
    (errors.HFValidationError, "'{asset.id}' is neither here nor the name of a {asset.kind}", _NAME_FIX),
    (
        errors.RevisionNotFoundError, "{asset.kind} '{asset.id}' has no revision '{asset.revision}'",
        "name a branch, tag or commit that exists (model_revision)",
    ),
    (
        _HUB_ERRORS, "cannot fetch {asset} from {hub}: {line}",
        "run it again where the hub is reachable: what came is kept",
    ),
    (
        (ValueError, RuntimeError, FileNotFoundError, datasets.exceptions.DatasetsError),
        "cannot read {asset}: {line}", "correct the name, the config or the split",
    ),
    (
        OSError, "cannot fetch {asset}: {line}",
        "free space or set CACHE_ROOT to a larger file system, then run it again: what came is kept",
    ),
)  # fmt: skip
_FAILURES = (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError, *_HUB_ERRORS)


def commit_of(asset: Asset) -> str:
    """Return the commit an asset's revision means at the hub now; a ConfigError where it may not be read."""
    with translate(_FAILURES, lambda error: _refusal(error, asset)):
        return str(_info(asset).sha)


def fetch(asset: Asset, environment: Mapping[str, str]) -> Asset:
    """Bring an asset at the commit its revision means now, and record it.

    A model's files go to the hub client's own cache, a dataset complete or not at all to ``<CACHE_ROOT>/datasets``.
    A ConfigError says that it does not exist, may not be read, does not fit, or that the hub does not answer.
    """
    with translate(_FAILURES, lambda error: _refusal(error, asset)):
        here = _fetch_model(asset) if asset.kind == MODEL else _fetch_dataset(asset, environment)
        write_record(here, environment)
        return here


def _refusal(error: Exception, asset: Asset) -> ConfigError:
    """Return one line for what the hub answered, that it did not answer, or that its data cannot be read."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, _HUB_ERRORS):
        cause = cause.__cause__ or cause.__context__  # datasets wraps what the hub answered
    is_gated = "gated dataset" in str(error)  # datasets says so without a cause
    fitting = (row for row in _REFUSALS if isinstance(cause or error, row[0]))
    _, what, fix = _REFUSALS[0] if is_gated else next(fitting)
    access = how_to_get_access(asset.id, asset.kind)
    facts = {"asset": asset, "access": access, "hub": constants.ENDPOINT, "line": error_line(error)}
    return config_error(asset.where, what.format(**facts), fix.format(**facts))


def _info(asset: Asset, files_metadata: bool = False) -> Any:
    repo, kind = asset.id, asset.kind
    return HfApi().repo_info(repo, repo_type=kind, revision=asset.revision, files_metadata=files_metadata)


def _found(asset: Asset, info: Any, folder: Path, names: list[str]) -> Asset:
    """Return an asset that has just come, with these files of a folder."""
    licence = getattr(info.card_data, "license", None)
    licence = licence if isinstance(licence, str) else None
    files = {name: (folder / name).stat().st_size for name in names}
    return replace(asset, commit=info.sha, path=str(folder), licence=licence, files=files)


def wanted_files(sizes: Mapping[str, int], code: bool = False) -> list[str]:
    """Return the files to download: safetensors (or pytorch_model*.bin without any), configuration and tokenizer.

    ``sizes`` are the bytes of every file of the repository; its Python files are wanted with ``code``.
    """
    root = [name for name in sizes if "/" not in name or name.startswith("additional_chat_templates/")]
    # consolidated.* and params.json are Mistral's own format, which vLLM would prefer to the one that is trained.
    root = [name for name in root if not name.startswith("consolidated") and name != "params.json"]
    weights = [name for name in root if name.endswith(".safetensors")]
    weights = weights or [name for name in root if name.startswith("pytorch_model") and name.endswith(".bin")]
    unwanted = _NEVER if code else (*_NEVER, ".py")
    small = [name for name in root if sizes[name] <= _LARGEST_SMALL_FILE and not name.endswith(unwanted)]
    return sorted({*weights, *small})


def _fetch_model(asset: Asset) -> Asset:
    info = _info(asset, files_metadata=True)
    names = wanted_files({file.rfilename: file.size or 0 for file in info.siblings or []}, asset.code)
    if not names:
        raise config_error(asset.where, f"{asset} holds no files of a model", "name a repository with weights")
    arguments: dict[str, Any] = {"revision": info.sha, "allow_patterns": [glob.escape(name) for name in names]}
    planned = snapshot_download(asset.id, dry_run=True, **arguments)
    needed = sum(file.file_size or 0 for file in planned if file.will_download)
    there = nearest_existing_folder(Path(constants.HF_HUB_CACHE))
    free = shutil.disk_usage(there).free
    if needed > free:
        what = f"{asset} takes {gigabytes(needed)} more, {there} has {gigabytes(free)} free"
        raise config_error(asset.where, what, "free space, or set CACHE_ROOT or HF_HOME to a larger file system")
    with ExitStack() as after:
        after.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, _end_at_once))
        return _found(asset, info, Path(snapshot_download(asset.id, **arguments)), names)


def _end_at_once(*_: Any) -> None:
    """End this process at Ctrl-C: the threads that download would hold it until their files of many GB are here."""
    print(INTERRUPTED, file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


def _fetch_dataset(asset: Asset, environment: Mapping[str, str]) -> Asset:
    """Save the rows of a dataset aside, unless they are here, then put them in place at once."""
    info = _info(asset)
    folder = dataset_folder(asset, info.sha, environment)
    lock = record_file(replace(asset, revision=info.sha), environment).with_suffix(".lock")
    for parent in (folder.parent, lock.parent):
        parent.mkdir(parents=True, exist_ok=True)
    partial, before = f".{folder.name}.", time.time() - _STALE_SECONDS  # what another fetch is writing is younger
    with ExitStack() as held:
        with suppress(OSError):  # a file system without locks, or a lock of another user
            fcntl.flock(held.enter_context(lock.open("w")), fcntl.LOCK_EX)
            before = math.inf
        if not _is_whole(folder):
            for left in folder.parent.glob(f"{glob.escape(partial)}*"):  # of a fetch that was killed
                if left.stat().st_mtime < before:
                    shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory("", partial, folder.parent, ignore_cleanup_errors=True) as aside:
                _rows(asset, info.sha, f"{aside}/cache").save_to_disk(f"{aside}/rows")
                if not _is_whole(folder):  # else another fetch came first, and its result stays
                    shutil.rmtree(folder, ignore_errors=True)
                    os.rename(f"{aside}/rows", folder)
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    return _found(asset, info, folder, names)


def _is_whole(folder: Path) -> bool:
    """Return whether saved rows can be read: many clusters remove single files that are old."""
    with suppress(OSError, ValueError):  # a file is missing, or cut short
        return datasets.load_from_disk(str(folder)) is not None
    return False


def _rows(asset: Asset, commit: str, cache: str) -> Any:
    """Return the rows of a dataset at a commit; the intermediate files go to ``cache``."""
    arguments: dict[str, Any] = {"split": asset.split, "revision": commit, "cache_dir": cache}
    if asset.limit is None:
        return datasets.load_dataset(asset.id, asset.config, **arguments)
    stream = datasets.load_dataset(asset.id, asset.config, streaming=True, **arguments)

    def first_rows() -> Iterator[dict[str, Any]]:
        yield from stream.take(asset.limit)

    return datasets.Dataset.from_generator(first_rows, features=stream.features, cache_dir=cache)
