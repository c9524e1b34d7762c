"""What was fetched, one small JSON file a piece under ``<CACHE_ROOT>/fetched``. No torch.

A record counts only while every file it lists is there in its full size.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from grpo_recipes.fetch.assets import Piece
from grpo_recipes.paths import cache_root
from grpo_recipes.runs.rundir import write_json


@dataclass(frozen=True)
class Record:
    """A piece that is on this machine.

    Attributes:
        kind: ``model`` or ``dataset``.
        id: hub id.
        config: configuration of the dataset.
        split: split of the dataset.
        limit: only its first rows.
        revision: branch, tag or commit asked for.
        commit: the commit it was resolved to.
        path: folder: a snapshot of the model, or what ``Dataset.save_to_disk`` wrote.
        files: its files with their sizes in bytes.
        bytes: their sum.
        time: when it was fetched, seconds since the epoch.
        licence: as the hub's page names it, None when it does not.
    """

    kind: str
    id: str
    config: str | None
    split: str | None
    limit: int | None
    revision: str
    commit: str
    path: str
    files: dict[str, int]
    bytes: int
    time: float
    licence: str | None = None

    def is_complete(self) -> bool:
        """Whether every file is there in its full size."""
        return all(_size(Path(self.path) / name) == size for name, size in self.files.items())


def make_record(piece: Piece, commit: str, folder: Path, files: Mapping[str, int], licence: str | None) -> Record:
    """The record of a piece that has just come."""
    return Record(
        piece.kind,
        piece.id,
        piece.config,
        piece.split,
        piece.limit,
        piece.revision,
        commit,
        str(folder),
        dict(files),
        sum(files.values()),
        time.time(),
        licence,
    )


def write_record(record: Record, piece: Piece, environment: Mapping[str, str]) -> None:
    """Record a piece under the revision asked for, and under its commit, by which a resumed run looks for it."""
    for revision in (record.commit, record.revision):
        path = record_file(replace(piece, revision=revision), environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(record))


def find_record(piece: Piece, environment: Mapping[str, str]) -> Record | None:
    """The record of a piece that is here, or None."""
    try:
        record = Record(**json.loads(record_file(piece, environment).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # none, or of another version of this package
        return None
    return record if record.is_complete() else None


def record_file(piece: Piece, environment: Mapping[str, str]) -> Path:
    """Where the record of a piece stands."""
    exact = json.dumps([*piece.same, piece.revision, piece.code])
    name = f"{piece.kind}--{slug(piece)}@{_plain(piece.revision)[:12]}-{hashlib.sha256(exact.encode()).hexdigest()[:8]}"
    return cache_root(environment) / "fetched" / f"{name}.json"


def dataset_folder(piece: Piece, commit: str, environment: Mapping[str, str]) -> Path:
    """Where a fetched dataset is saved: ``<CACHE_ROOT>/datasets/<id>--<config>--<split>--<commit>``."""
    return cache_root(environment) / "datasets" / f"{slug(piece)}--{commit[:12]}"


def slug(piece: Piece) -> str:
    """A piece as part of a file name."""
    rows = f"first-{piece.limit}" if piece.limit else None
    return "--".join(_plain(part) for part in (piece.id, piece.config, piece.split, rows) if part)


def folder_files(folder: Path) -> dict[str, int]:
    """Every file below a folder with its size in bytes."""
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def _plain(text: str) -> str:
    """``text`` in a file name; splits like ``train[:10%]`` and ``train[:10]`` stay apart."""
    plain = re.sub(r"[^\w.-]+", "--", text)
    return plain if plain == text.replace("/", "--") else f"{plain}{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
