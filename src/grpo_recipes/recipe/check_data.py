"""What a recipe must hold of its datasets: that they are there, with their columns, as far as a head of a file tells.

Pure: no torch, no datasets. Six hours in a queue are long for the typo of a column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.modebench.dataset import COLUMNS, SCHEME, SPLITS, TASKS
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import BUILDERS, RESERVED_COLUMNS, columns_of, has_splits, is_saved
from grpo_recipes.smoke import SMOKE_SCHEME

SMOKE_TASKS = ("smoke:sums", "smoke:sums-tied")
_HUB_NAME = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
_COLUMNS = ("dataset_prompt_column", "dataset_solution_column")


def is_hub_name(name: str) -> bool:
    """Whether a repository on the hub may be called so: ``name`` or ``user/name``, no address."""
    return _HUB_NAME.fullmatch(name) is not None


def training_data(recipe: Recipe) -> list[Problem]:
    """``dataset_name`` or ``dataset_mixture``."""
    name, mixture = recipe["dataset_name"], recipe["dataset_mixture"]
    if name and mixture:
        what = "dataset_mixture and dataset_name are both given"
        return [Problem(recipe.place("dataset_mixture"), what, "keep one of them")]
    if mixture is not None:
        return list(_mixture(recipe, mixture))
    if not name:
        return [Problem(recipe.path.name, "no dataset is named", "add dataset_name: a hub id or a .jsonl file")]
    wanted = {recipe[key]: recipe.place(key) for key in _COLUMNS}
    where = recipe.place("dataset_name")
    return list(_named(_Named(where, name, recipe["dataset_config"], recipe["dataset_train_split"], wanted)))


def streaming(recipe: Recipe) -> list[Problem]:
    """``dataset_streaming``."""
    if not recipe["dataset_streaming"]:
        return []
    where = recipe.place("dataset_streaming")
    if (recipe["dataset_name"] or "").startswith(SCHEME):
        what = f"'{recipe['dataset_name']}' is made on the spot, there is nothing to stream"
        return [Problem(where, what, "remove dataset_streaming")]
    if recipe["dataset_mixture"]:
        what = "dataset_streaming has no meaning with dataset_mixture, whose weights are shares of all rows"
        return [Problem(where, what, "remove dataset_streaming")]
    if recipe["max_train_prompts"] is None:
        what = "dataset_streaming without max_train_prompts would read the stream to its end"
        return [Problem(where, what, "add max_train_prompts, e.g. max_train_prompts: 10000")]
    return []


def evaluation_data(recipe: Recipe) -> list[Problem]:
    """The dataset evaluated on, where ``eval_strategy`` wants one."""
    if recipe["eval_strategy"] == "no":
        return []
    if recipe["eval_dataset_name"]:
        return _evaluation_set(recipe)
    mixture, name = recipe["dataset_mixture"], recipe["dataset_name"]
    if mixture:
        held = mixture.get("test_split_size")
        what, fix = "nothing is held out to evaluate on", "add test_split_size to it, or eval_dataset_name"
        return [] if held else [Problem(recipe.place("dataset_mixture"), what, fix)]
    if not name:
        return []  # told already
    split = recipe["dataset_test_split"]
    if name in TASKS:
        return list(_modebench(_Named(recipe.place("dataset_test_split"), name, None, split, {})))
    path = Path(os.path.expanduser(name))
    if name.startswith(SMOKE_SCHEME) or (os.path.exists(path) and not has_splits(path)):
        own = name if name.startswith(SMOKE_SCHEME) else "the file to evaluate on"
        what = f"'{name}' has no split '{split}' to evaluate on"
        return [Problem(recipe.place("eval_strategy"), what, f"add eval_dataset_name: {own}")]
    # That the folder is there was looked at above, and its columns are those of its training split.
    if path.is_dir() and is_saved(path):
        return list(_named(_Named(recipe.place("dataset_test_split"), name, None, split, {})))
    return []


def _evaluation_set(recipe: Recipe) -> list[Problem]:
    keys = [f"eval_{key}" if recipe[f"eval_{key}"] else key for key in _COLUMNS]
    wanted = {recipe[key]: recipe.place(key) for key in keys}
    name, config, split = (recipe[f"eval_dataset_{part}"] for part in ("name", "config", "split"))
    return list(_named(_Named(recipe.place("eval_dataset_name"), name, config, split, wanted)))


@dataclass(frozen=True)
class _Named:
    """A dataset where the recipe names it.

    Attributes:
        where: place in the recipe.
        name: hub id, file or folder.
        config: its configuration.
        split: its split.
        columns: those wanted -> where the recipe names them.
    """

    where: str
    name: str
    config: str | None
    split: str
    columns: dict[str, str]


def _named(named: _Named) -> Iterator[Problem]:
    if named.name.startswith(SMOKE_SCHEME):
        if named.name not in SMOKE_TASKS:
            yield Problem(named.where, f"there is no built-in '{named.name}'", "write smoke:sums")
        return
    if named.name.startswith(SCHEME):
        yield from _modebench(named)
        return
    path = Path(os.path.expanduser(named.name))
    if not os.path.exists(path):
        if named.name.startswith(("/", "./", "../", "~")) or path.suffix in BUILDERS:
            yield Problem(named.where, f"no file '{named.name}'", "name an existing file or a hub id")
        elif not is_hub_name(named.name):
            what = f"'{named.name}' is neither a file here nor a hub id"
            yield Problem(named.where, what, "name an existing file or a hub id, e.g. openai/gsm8k")
        return
    if named.config and (path.is_file() or is_saved(path)):
        what = f"'{named.name}' has no configuration '{named.config}', it is a local file"
        yield Problem(named.where, what, "remove the configuration")
    try:
        found = columns_of(path, named.split)
    except (OSError, ValueError) as error:
        yield Problem(named.where, str(error), "name a data file, or a folder of data files of one kind")
        return
    for column, where in named.columns.items():
        if found is not None and column not in found:
            yield Problem(where, f"'{path.name}' has no column '{column}'", f"write one of {', '.join(found)}")


def _modebench(named: _Named) -> Iterator[Problem]:
    if named.name not in TASKS:
        yield Problem(named.where, f"there is no built-in '{named.name}'", f"write {' or '.join(TASKS)}")
        return
    if named.config:
        what = f"'{named.name}' has no configuration '{named.config}', it is made on the spot"
        yield Problem(named.where, what, "remove the configuration")
    if named.split not in SPLITS:
        what = f"'{named.name}' has no split '{named.split}'"
        yield Problem(named.where, what, f"write {' or '.join(SPLITS)}; modebench_prompts says how many there are")
    for column, where in named.columns.items():
        if column not in COLUMNS:
            what, fix = f"'{named.name}' has no column '{column}'", f"write one of {', '.join(COLUMNS)}"
            yield Problem(where, what, fix)


def _mixture(recipe: Recipe, mixture: dict[str, Any]) -> Iterator[Problem]:
    where = recipe.place("dataset_mixture")
    entries = mixture.get("datasets") or []
    if not entries:
        yield Problem(where, "dataset_mixture names no datasets", "add datasets: a list of {id, split, weight}")
    for index, entry in enumerate(entries):
        yield from (_in_entry(index, problem) for problem in _entry(recipe, where, entry))
    size = mixture.get("test_split_size")
    if size is not None and (float(size) <= 0 or (float(size) >= 1 and float(size) % 1)):
        what = f"test_split_size is {size}"
        yield Problem(where, what, "write a share between 0 and 1, or a whole number of rows")


def _in_entry(index: int, problem: Problem) -> Problem:
    return Problem(problem.where, f"dataset_mixture.datasets[{index}]: {problem.what}", problem.fix)


def _entry(recipe: Recipe, where: str, entry: dict[str, Any]) -> Iterator[Problem]:
    name, columns = entry.get("id"), entry.get("columns")
    columns = [columns] if isinstance(columns, str) else columns
    if not name:
        yield Problem(where, "has no id", "add id: a hub id or a file")
        return
    if name.startswith((SMOKE_SCHEME, SCHEME)):
        yield Problem(where, f"'{name}' cannot be mixed", f"write dataset_name: {name}")
        return
    if columns is not None and len(columns) < 2:
        yield Problem(where, f"columns are {columns}", "write [prompt column, solution column], and others to keep")
        return
    for column in (columns or [])[2:]:
        if column in RESERVED_COLUMNS:
            yield Problem(where, f"column '{column}' has a meaning of its own in training", "rename it in the data")
    wanted = columns or [recipe[key] for key in _COLUMNS]
    split = entry.get("split") or "train"
    yield from _named(_Named(where, name, entry.get("config"), split, dict.fromkeys(wanted, where)))
