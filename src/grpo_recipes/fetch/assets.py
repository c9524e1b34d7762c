"""What a recipe needs: models and datasets of the hub, and what lies on this machine. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_recipes.modebench.dataset import SCHEME as MODEBENCH_SCHEME
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import BUILDERS
from grpo_recipes.smoke import SMOKE_SCHEME

MODEL, DATASET = "model", "dataset"
_SPARE = 2  # rows of a stream for each prompt kept: some are dropped as too long, or seen before


@dataclass(frozen=True)
class Piece:
    """A model with its tokenizer, or one split of a dataset.

    Attributes:
        kind: ``model`` or ``dataset``.
        id: hub id, or a local file or folder.
        where: the recipe's line that names it.
        revision: branch, tag or commit asked for.
        config: configuration of the dataset.
        split: split of the dataset.
        limit: only its first rows (a streamed dataset).
        code: whether Python files of the model's repository belong to it (trust_remote_code).
    """

    kind: str
    id: str
    where: str
    revision: str = "main"
    config: str | None = None
    split: str | None = None
    limit: int | None = None
    code: bool = False

    def __str__(self) -> str:
        parts = [part for part in (self.config, self.split) if part]
        rows = [f"first {self.limit:,} rows"] if self.limit else []
        inside = ", ".join([*parts, *rows])
        return f"{self.kind} {self.id}" + (f" ({inside})" if inside else "")

    @property
    def same(self) -> tuple[Any, ...]:
        """What makes it the same piece at another revision."""
        return (self.kind, self.id, self.config, self.split, self.limit)


def pieces_of(recipe: Recipe) -> list[Piece]:
    """Everything of the hub that a run of this recipe reads, each once."""
    return [piece for piece in _all_pieces(recipe) if not is_local(piece)]


def local_pieces_of(recipe: Recipe) -> list[Piece]:
    """Everything a run reads that lies on this machine: files, folders and what is built in."""
    return [piece for piece in _all_pieces(recipe) if is_local(piece)]


def is_local(piece: Piece) -> bool:
    """Whether a name is a file, a folder or built in, not a hub id."""
    if piece.id.startswith((SMOKE_SCHEME, MODEBENCH_SCHEME, "/", "./", "../", "~")) or os.path.exists(piece.id):
        return True
    return piece.kind == DATASET and piece.id.endswith(tuple(BUILDERS))


def _all_pieces(recipe: Recipe) -> list[Piece]:
    """Model and datasets, each once and with the most rows that are asked of it."""
    found: dict[tuple[Any, ...], Piece] = {}
    for piece in (_model(recipe), *_datasets(recipe)):
        name = replace(piece, limit=None).same
        if piece.id and (name not in found or _more_rows(piece, found[name])):
            found[name] = piece
    return list(found.values())


def _more_rows(piece: Piece, other: Piece) -> bool:
    return other.limit is not None and (piece.limit is None or piece.limit > other.limit)


def _model(recipe: Recipe) -> Piece:
    key = "model_name_or_path"
    code = bool(recipe["trust_remote_code"])
    return Piece(MODEL, recipe[key] or "", recipe.origin(key), recipe["model_revision"], code=code)


def _datasets(recipe: Recipe) -> Iterator[Piece]:
    yield from _training_sets(recipe)
    if recipe["eval_strategy"] != "no":
        yield from _evaluation_set(recipe)
    yield from _benchmarks(recipe)


def _training_sets(recipe: Recipe) -> Iterator[Piece]:
    mixture = recipe["dataset_mixture"]
    if mixture:
        where = recipe.origin("dataset_mixture")
        for entry in mixture.get("datasets", []):
            yield _dataset(where, entry.get("id"), entry.get("config"), entry.get("split") or "train")
        return
    limit = None
    if recipe["dataset_streaming"] and recipe["max_train_prompts"]:
        limit = _SPARE * recipe["max_train_prompts"]
    where = recipe.origin("dataset_name")
    yield _dataset(where, recipe["dataset_name"], recipe["dataset_config"], recipe["dataset_train_split"], limit)


def _evaluation_set(recipe: Recipe) -> Iterator[Piece]:
    limit = None
    if recipe["dataset_streaming"]:  # what a draw of eval_subsample needs to reach eval_max_prompts
        limit = math.ceil(recipe["eval_max_prompts"] / recipe["eval_subsample"])
    if recipe["eval_dataset_name"]:
        where = recipe.origin("eval_dataset_name")
        config, split = recipe["eval_dataset_config"], recipe["eval_dataset_split"]
        yield _dataset(where, recipe["eval_dataset_name"], config, split, limit)
    elif not recipe["dataset_mixture"]:
        where = recipe.origin("dataset_name")
        yield _dataset(where, recipe["dataset_name"], recipe["dataset_config"], recipe["dataset_test_split"], limit)


def _benchmarks(recipe: Recipe) -> Iterator[Piece]:
    if recipe["benchmarks"]:
        from grpo_recipes.recipe.registry import benchmark_sources

        where = recipe.origin("benchmarks")
        for name, config, split in benchmark_sources(recipe["benchmarks"]):
            yield _dataset(where, name, config, split)


def _dataset(where: str, name: str | None, config: str | None, split: str | None, limit: int | None = None) -> Piece:
    return Piece(DATASET, name or "", where, config=config, split=split, limit=limit)
