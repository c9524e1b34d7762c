"""Prepare a dataset in one rank, and map it in the others."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed
from accelerate.utils import broadcast_object_list
from datasets import Dataset, load_from_disk

from grpo_recipes.errors import ConfigError


def prepared_once(name: str, prepare: Callable[[], Any]) -> Any:
    """Call ``prepare`` in rank 0 alone; every rank maps the dataset that it left under ``<run>/prompts``.

    ``prepare`` returns a dataclass with a ``dataset``. The run directory is on a file system that all nodes share. With
    one process nothing is written. A ConfigError of ``prepare`` is raised on every rank; where it fails in another way,
    the other ranks raise a RuntimeError.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return prepare()
    failure: Exception | None = None
    outcome: dict[str, Any] = {}  # what rank 0 sends the others
    if torch.distributed.get_rank() == 0:
        try:
            prepared = prepare()
            outcome = {"folder": _save(name, prepared.dataset), "rest": replace(prepared, dataset=None)}
        except Exception as error:  # the other ranks wait: they must hear of it, whatever it is
            problems = error.problems if isinstance(error, ConfigError) else []
            failure, outcome = error, {"problems": problems, "failure": f"{type(error).__name__}: {error}"}
    outcomes = [outcome]
    broadcast_object_list(outcomes, from_process=0)
    if failure is not None:
        raise failure
    (outcome,) = outcomes
    if outcome.get("problems"):
        raise ConfigError(*outcome["problems"])
    if "failure" in outcome:
        raise RuntimeError(f"rank 0 could not prepare the prompts: {outcome['failure']}")
    return replace(outcome["rest"], dataset=load_from_disk(outcome["folder"]))


def _save(name: str, dataset: Dataset) -> str:
    """Write the dataset aside, then put it in place under a name that no rank has looked for before."""
    home = Path(os.environ["GRPO_RUN_DIR"]) / "prompts"
    home.mkdir(exist_ok=True)
    for old in [*home.glob(f"{name}-*"), *home.glob(f".{name}-*")]:  # of an earlier attempt
        shutil.rmtree(old)
    folder = home / f"{name}-{uuid.uuid4().hex[:8]}"
    partial = folder.with_name(f".{folder.name}")
    dataset.save_to_disk(partial)
    partial.rename(folder)
    return str(folder)
