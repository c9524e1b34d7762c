"""Store the prepared prompts of a run in its directory, so that a resumed attempt does not prepare them again.

``<run>/prompts/<name>-<random>`` has the dataset and ``prompts.json``, which is written last. It contains the digests
of the other files, and an identity: a digest of everything that determines the prompts. A folder that is incomplete,
damaged or unreadable, or has another identity, is not used::

    entry = find_entry(home, "train", identity)
    folder = store_dataset(home, "train", identity, dataset, values)
"""

import contextlib
import json
import shutil
import uuid
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.generated import generated
from grpo_recipes.recipe.solutions import reads_solutions
from grpo_recipes.recipe.user_code import find_copy, source_path
from grpo_recipes.runs.checkpoints import add_checksum, compute_digest, new_digest
from grpo_recipes.runs.rundir import load_json_mapping, read_json, write_json

_RECORD = "prompts.json"
_CACHE = "cache-"  # begins the names of files that ``datasets`` adds
_PACKAGES = ("datasets", "jinja2", "tokenizers", "transformers")
# Digests of this package's code as it is imported: the files may change while the trainers wait for the server.
_CODE = [compute_digest(path) for path in sorted(Path(__file__).parents[1].rglob("*.py"))]


def identify_prompts(run: Path, args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, values: Any) -> str | None:
    """Return a digest of everything that determines the prompts of a run, or None if that is not known.

    It covers ``values`` (the recipe's), the commits of models and datasets in ``sources.json``, size and time of local
    data files, the tokenizer with its template, and the code with the files of the user's rewards, because rewards
    decide whether rows need a solution. It is not known without ``sources.json``, if a file can't be read, and for a
    tokenizer that the library tokenizers can't write as a text.
    """
    backend, sources = getattr(tokenizer, "backend_tokenizer", None), read_json(run / "sources.json").get("sources")
    if backend is None or not sources:
        return None
    lookup = vars(args).get
    rewards = [find_copy(spec, run) or source_path(spec) for spec in args.reward_funcs if ":" in spec]
    # A resumed run requests the recorded commit instead of a branch, maybe on a machine with other folders.
    commits = [{**source, "revision": None, "path": None, "licence": None} for source in sources]
    template = tokenizer.chat_template, tokenizer.special_tokens_map
    packages = [version(name) for name in _PACKAGES]
    try:
        parts = json.loads(backend.to_str()) | {"truncation": None, "padding": None}  # each call sets these two
    except Exception:  # tokenizers raises no other class for parts in Python
        return None
    with contextlib.suppress(OSError):
        code = [_CODE, *(compute_digest(path) for path in filter(None, rewards))]
        files = [_stat_files(source) for source in sources]
        content = [values, commits, files, reads_solutions(lookup), parts, template, packages, code]
        return new_digest(json.dumps(content, default=str).encode()).hexdigest()
    return None


def _stat_files(source: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Return name, size and time of the files of a local dataset, [] for other sources."""
    if source["kind"] != "dataset" or source["revision"] is not None or generated(source["id"]):
        return []
    path = Path(source["path"])
    files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def find_entry(home: Path, name: str, identity: str | None) -> tuple[Path, dict[str, Any]] | None:
    """Return the folder in ``home`` with this name and identity, and the values that were stored with it.

    Return None without such a folder, if its files have changed, and for the identity None.
    """
    for folder in sorted(home.glob(f"{name}-*")) if identity else []:
        record = load_json_mapping(folder / _RECORD) or {}
        if record.get("identity") == identity and record == add_checksum(record):
            with contextlib.suppress(OSError):
                if record["digests"] == _compute_digests(folder):
                    return folder, record["values"]
    return None


def store_dataset(home: Path, name: str, identity: str | None, dataset: Dataset, values: dict[str, Any]) -> Path:
    """Write a dataset and JSON values to a new folder in ``home``, and return it. Delete earlier ones of this name.

    The record is written last, so a kill at any moment leaves no incomplete folder with a record. Raise OSError if
    writing fails.
    """
    home.mkdir(exist_ok=True)
    for earlier in home.glob(f"{name}-*"):
        (earlier / _RECORD).unlink(missing_ok=True)
        shutil.rmtree(earlier, ignore_errors=True)
    folder = home / f"{name}-{uuid.uuid4().hex[:8]}"  # a new name, which no file system cache can contain
    try:
        dataset.save_to_disk(folder)
        record = {"identity": identity, "digests": _compute_digests(folder), "values": values}
        write_json(folder / _RECORD, add_checksum(record))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _compute_digests(folder: Path) -> dict[str, str]:
    """Return the digests of the files in a folder by their names, without the record and what ``datasets`` adds later.

    ``datasets`` caches the results of its ``map`` and ``filter`` next to the files of a dataset, for all ranks.
    """
    files = (path for path in sorted(folder.iterdir()) if path.name != _RECORD and not path.name.startswith(_CACHE))
    return {path.name: compute_digest(path) for path in files}
