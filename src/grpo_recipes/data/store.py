"""Store the prepared prompts of a run in its directory, so that a resumed attempt does not prepare them again.

``<run>/prompts/<name>-<random>`` has the dataset and ``prompts.json``, which is written last. It contains the digests
of the other files, and an identity: a digest of everything that determines the prompts. A folder that is incomplete or
damaged, or has another identity, is not used::

    entry = find_entry(home, "train", identity) or store_dataset(home, "train", identity, dataset, values)
"""

import json
import shutil
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from grpo_recipes.recipe.generated import generated
from grpo_recipes.runs.checkpoints import add_checksum, compute_digest, new_digest
from grpo_recipes.runs.rundir import load_json_mapping, read_json, write_json

_RECORD = "prompts.json"
_PACKAGES = ("datasets", "jinja2", "tokenizers", "transformers")
StoreEntry: TypeAlias = tuple[Path, dict[str, Any]]  # folder of a dataset, and the values that were stored with it


def identify_prompts(run: Path, tokenizer: PreTrainedTokenizerBase, values: Mapping[str, Any]) -> str | None:
    """Return a digest of everything that determines the prompts of a run, or None if that is not known.

    It covers ``values`` (the recipe's), the commits of models and datasets in ``sources.json``, size and time of local
    data files, the tokenizer with its template, and the code with the run's reward files, because rewards decide
    whether rows need a solution. A tokenizer that the library tokenizers can't write as a text has no identity.
    """
    backend, sources = getattr(tokenizer, "backend_tokenizer", None), read_json(run / "sources.json").get("sources")
    if backend is None or not sources:
        return None
    package = Path(__file__).parents[1]
    files = [*sorted(package.rglob("*.py")), *sorted(run.glob("rewards/*.py"))]
    code = [(path.name, compute_digest(path)) for path in files]
    template = tokenizer.chat_template, tokenizer.special_tokens_map, tokenizer.padding_side
    parts = [
        values, sources, [_stat_files(source) for source in sources], backend.to_str(), template, code,
        [version(name) for name in _PACKAGES],
    ]  # fmt: skip
    return new_digest(json.dumps(parts, default=str).encode()).hexdigest()


def _stat_files(source: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files of a local dataset, [] for other sources."""
    if source["kind"] != "dataset" or source["revision"] is not None or generated(source["id"]):
        return []
    path = Path(source["path"])
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def find_entry(home: Path, name: str, identity: str | None) -> StoreEntry | None:
    """Return the folder in ``home`` with this name and identity if all its files are as they were written, or None.

    The identity None has no folder.
    """
    for folder in sorted(home.glob(f"{name}-*")) if identity else []:
        record = load_json_mapping(path.read_bytes()) if (path := folder / _RECORD).is_file() else None
        if record is None or record != add_checksum(record) or record["identity"] != identity:
            continue
        files = {path.name for path in folder.iterdir()} - {_RECORD}
        if files == set(record["digests"]) and record["digests"] == _compute_digests(folder):
            return folder, record["values"]
    return None


def store_dataset(home: Path, name: str, identity: str | None, dataset: Dataset, values: dict[str, Any]) -> StoreEntry:
    """Write a dataset and JSON values to a new folder in ``home``, and return both. Delete earlier ones of this name.

    A kill at any moment leaves no folder with a record but incomplete files.
    """
    home.mkdir(exist_ok=True)
    for earlier in home.glob(f"{name}-*"):
        (earlier / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(earlier)
    folder = home / f"{name}-{uuid.uuid4().hex[:8]}"  # a new name, which no file system cache can contain
    dataset.save_to_disk(folder)
    record = {"identity": identity, "digests": _compute_digests(folder), "values": values}
    write_json(folder / _RECORD, add_checksum(record))
    return folder, values


def _compute_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a folder by their names, without the record."""
    return {path.name: compute_digest(path) for path in sorted(folder.iterdir()) if path.name != _RECORD}
