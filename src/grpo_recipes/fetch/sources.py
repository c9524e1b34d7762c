"""Which model and data a run uses: commits of what came from the hub, fingerprints of what lies here. No torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.fetch.assets import MODEL, Piece, local_pieces_of, pieces_of
from grpo_recipes.fetch.records import Record, find_record
from grpo_recipes.modebench.dataset import SCHEME as MODEBENCH_SCHEME
from grpo_recipes.modebench.dataset import Settings
from grpo_recipes.recipe import Recipe
from grpo_recipes.runs.digests import rewriting
from grpo_recipes.runs.rundir import Run, read_json, write_json
from grpo_recipes.smoke import SMOKE_SCHEME, smoke_folder

Lookup = Callable[[str, str | None, str], Path | None]
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """One model or dataset of a run.

    Attributes:
        kind: ``model`` (its tokenizer included) or ``dataset``.
        id: as the recipe names it.
        config: configuration of the dataset.
        split: split of the dataset.
        limit: only its first rows.
        revision: branch, tag or commit asked for; None for what lies here.
        commit: the commit used; for what lies here a fingerprint of names, sizes and small files.
        path: where it is; of what is made on the spot the current folder.
        licence: as the hub names it.
    """

    kind: str
    id: str
    config: str | None
    split: str | None
    limit: int | None
    revision: str | None
    commit: str
    path: str
    licence: str | None = None

    @property
    def from_hub(self) -> bool:
        """Whether it came from the hub."""
        return self.revision is not None

    @property
    def same(self) -> tuple[Any, ...]:
        """As ``Piece.same``."""
        return (self.kind, self.id, self.config, self.split, self.limit)


@dataclass(frozen=True)
class Sources:
    """Everything a run reads, and what of it is missing.

    Attributes:
        found: models and datasets that are here.
        missing: pieces of the hub that are not.
    """

    found: list[Source]
    missing: list[Piece]

    @property
    def model(self) -> Source | None:
        """The model trained and served."""
        return next((source for source in self.found if source.kind == MODEL), None)

    def offline_variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables that keep a run off the network once everything is here; HF_HUB_OFFLINE=0 of the user stands."""
        if self.missing or "HF_HUB_OFFLINE" in environment:
            return {}
        return {name: "1" for name in _OFFLINE}

    def notes(self) -> list[str]:
        """What a plan says of them."""
        here = [f"{one.kind} {one.id} at {one.commit[:12]}, fetched" for one in self.found if one.from_hub]
        return here + [f"{piece} is not here yet: launch fetches it, or grpo fetch does" for piece in self.missing]

    def as_json(self) -> list[dict[str, Any]]:
        """The sources as plain data."""
        return [asdict(source) for source in self.found]


def find_sources(
    recipe: Recipe, environment: Mapping[str, str], recorded: list[dict[str, Any]] | None = None
) -> Sources:
    """Look for everything a recipe reads on this machine; nothing is downloaded.

    Args:
        recipe: the recipe.
        environment: variables of the user, for the caches.
        recorded: sources of the run that is resumed: its commits are looked for, whatever came later.

    Raises:
        ConfigError: a local file or folder does not exist.
    """
    found, missing = local_sources(recipe, environment), []
    for piece in wanted_pieces(recipe, recorded):
        record = find_record(piece, environment)
        if record is None:
            missing.append(piece)
        else:
            found.append(_from_record(record, piece.revision))
    return Sources(found, missing)


def wanted_pieces(recipe: Recipe, recorded: list[dict[str, Any]] | None = None) -> list[Piece]:
    """The pieces of the hub a run reads, those that ``recorded`` names at its commits."""
    commits = {source.same: source.commit for source in map(_source, recorded or []) if source.from_hub}
    return [replace(piece, revision=commits.get(piece.same, piece.revision)) for piece in pieces_of(recipe)]


def local_sources(recipe: Recipe, environment: Mapping[str, str]) -> list[Source]:
    """What a run reads that lies on this machine."""
    return [_local(piece, recipe, environment) for piece in local_pieces_of(recipe)]


def changed_sources(now: Sources, recorded: list[dict[str, Any]] | None) -> str | None:
    """What lies here and is no longer what the run began with, or None."""
    before = {source.same: source.commit for source in map(_source, recorded or []) if not source.from_hub}
    for source in now.found:
        if not source.from_hub and before.get(source.same, source.commit) != source.commit:
            return f"the {source.kind} '{source.id}' is not what the run began with"
    return None


def record_sources(run: Run, sources: Sources) -> None:
    """Leave in the run directory which commits it uses, made once, and where its trainers find them now."""
    with rewriting(run.folder):
        if "sources" not in run.identity:
            run.identity["sources"] = sources.as_json()
            write_json(run.folder / "run.json", run.identity)
        write_json(run.folder / "sources.json", {"sources": sources.as_json()})


def fetched_sets(folder: Path) -> Lookup:
    """The datasets of a run that were fetched.

    Args:
        folder: the run directory.

    Returns:
        ``lookup(id, config, split)``: the folder to ``datasets.load_from_disk``, or None when it is not of the hub.
    """
    content = read_json(folder / "sources.json") or {"sources": []}
    paths = {
        (entry["id"], entry["config"], entry["split"]): Path(entry["path"])
        for entry in content["sources"]
        if entry["kind"] != MODEL and entry["revision"]
    }
    return lambda name, config, split: paths.get((name, config, split))


def _source(entry: dict[str, Any]) -> Source:
    return Source(**entry)


def _from_record(record: Record, revision: str) -> Source:
    names = (record.kind, record.id, record.config, record.split, record.limit)
    return Source(*names, revision, record.commit, record.path, record.licence)


def _local(piece: Piece, recipe: Recipe, environment: Mapping[str, str]) -> Source:
    if piece.id.startswith(SMOKE_SCHEME):
        path = smoke_folder(piece.id, environment)
        mark = path.name
    elif piece.id.startswith(MODEBENCH_SCHEME):
        path = Path()  # made on the spot
        mark = Settings.read(recipe.__getitem__).fingerprint(piece.id)
    else:
        path = Path(os.path.expanduser(piece.id)).absolute()
        if not path.exists():
            raise config_error(piece.where, f"no file or folder '{piece.id}'", "name an existing one, or a hub id")
        mark = fingerprint(path)
    return Source(piece.kind, piece.id, piece.config, piece.split, piece.limit, None, mark, str(path))


def fingerprint(path: Path) -> str:
    """A short hash of a file or folder that is cheap for weights of any size.

    Of a folder and those in it, but for hidden ones: names and sizes, and the content of small JSON files
    (``config.json``, the index of the shards). Of a file: its size, and the first and last MiB.
    """
    digest = hashlib.sha256()
    files = sorted(one for one in path.rglob("*") if _counts(one, path)) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path) if path.is_dir() else ''} {size}\n".encode())
        if file == path or (file.suffix == ".json" and size <= _EDGE_BYTES):
            digest.update(_edges(file, size))
    return digest.hexdigest()[:16]


def _counts(file: Path, folder: Path) -> bool:
    return file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts)


def _edges(file: Path, size: int) -> bytes:
    with file.open("rb") as stream:
        head = stream.read(_EDGE_BYTES)
        stream.seek(max(len(head), size - _EDGE_BYTES))
        return head + stream.read()
