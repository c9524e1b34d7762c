"""What a recipe needs: models and datasets of the hub, those that lie on this machine, and records of what was fetched.

A record is one small JSON file an asset under ``<CACHE_ROOT>/fetched``. It counts only while every file it lists is
there in its full size. No torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_recipes.modebench.dataset import SCHEME as MODEBENCH_SCHEME
from grpo_recipes.paths import cache_root
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import BUILDERS
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.smoke import SMOKE_SCHEME

MODEL, DATASET = "model", "dataset"
_SPARE = 2  # rows of a stream for each prompt kept: some are dropped as too long, or seen before


@dataclass(frozen=True, kw_only=True)
class Asset:
    """A model with its tokenizer, or one split of a dataset."""

    kind: str  # model or dataset
    id: str  # hub id, or a local file or folder
    config: str | None = None  # configuration of the dataset
    split: str | None = None
    limit: int | None = None  # only its first rows (a streamed dataset)

    def __str__(self) -> str:
        rows = f"first {self.limit:,} rows" if self.limit else None
        inside = ", ".join(part for part in (self.config, self.split, rows) if part)
        return f"{self.kind} {self.id}" + (f" ({inside})" if inside else "")

    @property
    def name(self) -> dict[str, Any]:
        """Return the fields that make it the same asset at another revision."""
        return {"kind": self.kind, "id": self.id, "config": self.config, "split": self.split, "limit": self.limit}

    @property
    def same(self) -> tuple[Any, ...]:
        """Return ``name`` as a key."""
        return tuple(self.name.values())


@dataclass(frozen=True, kw_only=True)
class Wanted(Asset):
    """An asset that a recipe names."""

    where: str  # the recipe's line that names it
    revision: str = "main"  # branch, tag or commit asked for
    code: bool = False  # whether Python files of the model's repository belong to it (trust_remote_code)


@dataclass(frozen=True, kw_only=True)
class Source(Asset):
    """An asset that a run uses, where it lies on this machine."""

    revision: str | None  # branch, tag or commit asked for; None for what did not come from the hub
    commit: str  # the commit used; of local files a fingerprint of names, sizes and small files
    path: str  # where it is; of what is made on the spot the current folder
    licence: str | None = None  # as the hub's page names it

    @property
    def from_hub(self) -> bool:
        """Return whether it came from the hub."""
        return self.revision is not None


@dataclass(frozen=True, kw_only=True)
class Record(Source):
    """An asset that was fetched: a snapshot of a model, or what ``Dataset.save_to_disk`` wrote."""

    files: dict[str, int]  # its files with their sizes in bytes
    bytes: int  # their sum
    time: float  # when it was fetched, seconds since the epoch

    def is_complete(self) -> bool:
        """Return whether every file is there in its full size."""
        files = {Path(self.path) / name: size for name, size in self.files.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in files.items())

    def source(self, revision: str) -> Source:
        """Return it as the source of a run that asks for ``revision``."""
        return Source(**self.name, revision=revision, commit=self.commit, path=self.path, licence=self.licence)


def assets_of(recipe: Recipe) -> list[Wanted]:
    """Return everything of the hub that a run of this recipe reads, each once."""
    return [asset for asset in _all_assets(recipe) if not is_local(asset)]


def local_assets_of(recipe: Recipe) -> list[Wanted]:
    """Return everything a run reads that lies on this machine: files, folders and what is built in."""
    return [asset for asset in _all_assets(recipe) if is_local(asset)]


def is_local(asset: Asset) -> bool:
    """Return whether a name is a file, a folder or built in, not a hub id."""
    if asset.id.startswith((SMOKE_SCHEME, MODEBENCH_SCHEME, "/", "./", "../", "~")) or os.path.exists(asset.id):
        return True
    return asset.kind == DATASET and asset.id.endswith(tuple(BUILDERS))


def _all_assets(recipe: Recipe) -> list[Wanted]:
    """Return model and datasets, each once and with the most rows that are asked of it."""
    found: dict[tuple[Any, ...], Wanted] = {}
    for asset in (_model(recipe), *_training_sets(recipe), *_evaluation_set(recipe), *_benchmarks(recipe)):
        name = replace(asset, limit=None).same
        known = found.get(name)
        if asset.id and (known is None or (asset.limit or math.inf) > (known.limit or math.inf)):
            found[name] = asset
    return list(found.values())


def _model(recipe: Recipe) -> Wanted:
    key, code = "model_name_or_path", bool(recipe["trust_remote_code"])
    revision = recipe["model_revision"]
    return Wanted(kind=MODEL, id=recipe[key] or "", where=recipe.source(key), revision=revision, code=code)


def _training_sets(recipe: Recipe) -> Iterator[Wanted]:
    mixture = recipe["dataset_mixture"]
    if mixture:
        where = recipe.source("dataset_mixture")
        for entry in mixture.get("datasets", []):
            yield _dataset(where, entry.get("id"), entry.get("config"), entry.get("split") or "train")
        return
    limit = None
    if recipe["dataset_streaming"] and recipe["max_train_prompts"]:
        limit = _SPARE * recipe["max_train_prompts"]
    where = recipe.source("dataset_name")
    yield _dataset(where, recipe["dataset_name"], recipe["dataset_config"], recipe["dataset_train_split"], limit)


def _evaluation_set(recipe: Recipe) -> Iterator[Wanted]:
    if recipe["eval_strategy"] == "no":
        return
    limit = None
    if recipe["dataset_streaming"]:  # what a draw of eval_subsample needs to reach eval_max_prompts
        limit = math.ceil(recipe["eval_max_prompts"] / recipe["eval_subsample"])
    if recipe["eval_dataset_name"]:
        where = recipe.source("eval_dataset_name")
        config, split = recipe["eval_dataset_config"], recipe["eval_dataset_split"]
        yield _dataset(where, recipe["eval_dataset_name"], config, split, limit)
    elif not recipe["dataset_mixture"]:
        where = recipe.source("dataset_name")
        yield _dataset(where, recipe["dataset_name"], recipe["dataset_config"], recipe["dataset_test_split"], limit)


def _benchmarks(recipe: Recipe) -> Iterator[Wanted]:
    if recipe["benchmarks"]:
        from grpo_recipes.recipe.registry import benchmark_sources

        where = recipe.source("benchmarks")
        for name, config, split in benchmark_sources(recipe["benchmarks"]):
            yield _dataset(where, name, config, split)


def _dataset(where: str, name: str | None, config: str | None, split: str | None, limit: int | None = None) -> Wanted:
    return Wanted(kind=DATASET, id=name or "", where=where, config=config, split=split, limit=limit)


def make_record(asset: Wanted, commit: str, folder: Path, files: Mapping[str, int], licence: str | None) -> Record:
    """Return the record of an asset that has just come."""
    total = sum(files.values())
    source = Source(**asset.name, revision=asset.revision, commit=commit, path=str(folder), licence=licence)
    return Record(**asdict(source), files=dict(files), bytes=total, time=time.time())


def write_record(record: Record, asset: Wanted, environment: Mapping[str, str]) -> None:
    """Record an asset under the revision asked for, and under its commit, by which a resumed run looks for it."""
    for revision in (record.commit, asset.revision):
        path = record_file(replace(asset, revision=revision), environment)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, asdict(record))


def find_record(asset: Wanted, environment: Mapping[str, str]) -> Record | None:
    """Return the record of an asset that is here, or None."""
    try:
        record = Record(**json.loads(record_file(asset, environment).read_text()))
    except (FileNotFoundError, ValueError, TypeError):  # none, or of another version of this package
        return None
    return record if record.is_complete() else None


def record_file(asset: Wanted, environment: Mapping[str, str]) -> Path:
    """Return the file of an asset's record."""
    exact = json.dumps([*asset.same, asset.revision, asset.code])
    name = f"{asset.kind}--{_slug(asset)}@{_plain(asset.revision)[:12]}-{_digest(exact)[:8]}"
    return cache_root(environment) / "fetched" / f"{name}.json"


def dataset_folder(asset: Asset, commit: str, environment: Mapping[str, str]) -> Path:
    """Return where a fetched dataset is saved: ``<CACHE_ROOT>/datasets/<id>--<config>--<split>--<commit>``."""
    return cache_root(environment) / "datasets" / f"{_slug(asset)}--{commit[:12]}"


def _slug(asset: Asset) -> str:
    """Return an asset as part of a file name."""
    rows = f"first-{asset.limit}" if asset.limit else None
    return "--".join(_plain(part) for part in (asset.id, asset.config, asset.split, rows) if part)


def _plain(text: str) -> str:
    """Return ``text`` for a file name; splits like ``train[:10%]`` and ``train[:10]`` stay apart."""
    plain = re.sub(r"[^\w.-]+", "--", text)
    return plain if plain == text.replace("/", "--") else f"{plain}{_digest(text)[:6]}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
