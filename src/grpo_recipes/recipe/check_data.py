"""What a recipe must hold of its datasets: they are there, with their columns, and its rewards can judge them.

Pure: no torch, no datasets; of a file the head is read alone. Six hours in a queue are long for the typo of a column.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_recipes.errors import Problem
from grpo_recipes.modebench.dataset import COLUMNS, SCHEME, SPLITS, TASKS, Settings, TooFew, rows
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.datafiles import BUILDERS, RESERVED_COLUMNS, columns_of, has_splits, is_saved
from grpo_recipes.recipe.registry import ONE_ANSWER
from grpo_recipes.recipe.rules import CONTRADICTIONS, modebench_tasks
from grpo_recipes.smoke import SMOKE_SCHEME, SMOKE_TASKS

MODEBENCH_REWARD = "modebench"
_HUB_NAME = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
_COLUMNS = ("dataset_prompt_column", "dataset_solution_column")


def is_hub_name(name: str) -> bool:
    """Return whether a repository on the hub may be called so: ``name`` or ``user/name``, no address."""
    return _HUB_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class _Dataset:
    """A dataset where the recipe names it."""

    where: str  # place in the recipe
    name: str  # hub id, file or folder
    config: str | None
    split: str
    columns: dict[str, str]  # those wanted -> where the recipe names them

    def problems(self) -> Iterator[Problem]:
        """Yield what is wrong with it, as far as the heads of its files show."""
        if self.name.startswith((SMOKE_SCHEME, SCHEME)):
            yield from self._built_in()
            return
        path = Path(os.path.expanduser(self.name))
        if not os.path.exists(path):
            if self.name.startswith(("/", "./", "../", "~")) or path.suffix in BUILDERS:
                yield Problem(self.where, f"no file '{self.name}'", "name an existing file or a hub id")
            elif not is_hub_name(self.name):
                what = f"'{self.name}' is neither a file here nor a hub id"
                yield Problem(self.where, what, "name an existing file or a hub id, e.g. openai/gsm8k")
            return
        if self.config and (path.is_file() or is_saved(path)):
            what = f"'{self.name}' has no configuration '{self.config}', it is a local file"
            yield Problem(self.where, what, "remove the configuration")
        try:
            found = columns_of(path, self.split)
        except (OSError, ValueError) as error:
            yield Problem(self.where, str(error), "name a data file, or a folder of data files of one kind")
            return
        if found is not None:
            yield from self._missing_columns(path.name, found)

    def _built_in(self) -> Iterator[Problem]:
        smoke = self.name.startswith(SMOKE_SCHEME)
        if self.name not in (SMOKE_TASKS if smoke else TASKS):
            fix = "write smoke:sums" if smoke else f"write {' or '.join(TASKS)}"
            yield Problem(self.where, f"there is no built-in '{self.name}'", fix)
        elif not smoke:
            if self.config:
                what = f"'{self.name}' has no configuration '{self.config}', it is made on the spot"
                yield Problem(self.where, what, "remove the configuration")
            if self.split not in SPLITS:
                fix = f"write {' or '.join(SPLITS)}; modebench_prompts says how many there are"
                yield Problem(self.where, f"'{self.name}' has no split '{self.split}'", fix)
            yield from self._missing_columns(self.name, COLUMNS)

    def _missing_columns(self, name: str, found: list[str] | tuple[str, ...]) -> Iterator[Problem]:
        for column, where in self.columns.items():
            if column not in found:
                yield Problem(where, f"'{name}' has no column '{column}'", f"write one of {', '.join(found)}")


def _training_data(recipe: Recipe) -> Iterator[Problem]:
    """Check ``dataset_name`` or ``dataset_mixture``; ``rules`` refuses both."""
    name, mixture = recipe["dataset_name"], recipe["dataset_mixture"]
    if mixture is not None:
        if not (name and mixture):
            yield from _mixture(recipe, mixture)
    elif not name:
        yield Problem(recipe.path.name, "no dataset is named", "add dataset_name: a hub id or a .jsonl file")
    else:
        wanted = {recipe[key]: recipe.place(key) for key in _COLUMNS}
        where = recipe.place("dataset_name")
        yield from _Dataset(where, name, recipe["dataset_config"], recipe["dataset_train_split"], wanted).problems()


def _mixture(recipe: Recipe, mixture: dict[str, Any]) -> Iterator[Problem]:
    entries, size = mixture.get("datasets") or [], mixture.get("test_split_size")
    if not entries:
        what = "dataset_mixture names no datasets"
        yield recipe.problem("dataset_mixture", what, "add datasets: a list of {id, split, weight}")
    for index, entry in enumerate(entries):
        for problem in _mixture_entry(recipe, entry):
            yield Problem(problem.where, f"dataset_mixture.datasets[{index}]: {problem.what}", problem.fix)
    if size is not None and (float(size) <= 0 or (float(size) >= 1 and float(size) % 1)):
        fix = "write a share between 0 and 1, or a whole number of rows"
        yield recipe.problem("dataset_mixture", f"test_split_size is {size}", fix)


def _mixture_entry(recipe: Recipe, entry: dict[str, Any]) -> Iterator[Problem]:
    where, name, columns = recipe.place("dataset_mixture"), entry.get("id"), entry.get("columns")
    columns = [columns] if isinstance(columns, str) else columns
    if not name:
        yield Problem(where, "has no id", "add id: a hub id or a file")
    elif name.startswith((SMOKE_SCHEME, SCHEME)):
        yield Problem(where, f"'{name}' cannot be mixed", f"write dataset_name: {name}")
    elif columns is not None and len(columns) < 2:
        yield Problem(where, f"columns are {columns}", "write [prompt column, solution column], and others to keep")
    else:
        for column in (columns or [])[2:]:
            if column in RESERVED_COLUMNS:
                yield Problem(where, f"column '{column}' has a meaning of its own in training", "rename it in the data")
        wanted = dict.fromkeys(columns or [recipe[key] for key in _COLUMNS], where)
        yield from _Dataset(where, name, entry.get("config"), entry.get("split") or "train", wanted).problems()


def _evaluation_data(recipe: Recipe) -> Iterator[Problem]:
    """Check the dataset evaluated on, where ``eval_strategy`` wants one."""
    if recipe["eval_strategy"] == "no":
        return
    if recipe["eval_dataset_name"]:
        keys = [f"eval_{key}" if recipe[f"eval_{key}"] else key for key in _COLUMNS]
        wanted = {recipe[key]: recipe.place(key) for key in keys}
        name, config, split = (recipe[f"eval_dataset_{part}"] for part in ("name", "config", "split"))
        yield from _Dataset(recipe.place("eval_dataset_name"), name, config, split, wanted).problems()
        return
    mixture, name, split = recipe["dataset_mixture"], recipe["dataset_name"], recipe["dataset_test_split"]
    if mixture:
        if not mixture.get("test_split_size"):
            fix = "add test_split_size to it, or eval_dataset_name"
            yield recipe.problem("dataset_mixture", "nothing is held out to evaluate on", fix)
        return
    path = Path(os.path.expanduser(name or ""))
    smoke = (name or "").startswith(SMOKE_SCHEME)
    if smoke or (name and os.path.exists(path) and not has_splits(path)):
        own = name if smoke else "the file to evaluate on"
        what = f"'{name}' has no split '{split}' to evaluate on"
        yield recipe.problem("eval_strategy", what, f"add eval_dataset_name: {own}")
    elif name and (name in TASKS or (path.is_dir() and is_saved(path))):  # the columns are those of the training split
        yield from _Dataset(recipe.place("dataset_test_split"), name, None, split, {}).problems()


def _modebench_sizes(recipe: Recipe) -> Iterator[Problem]:
    """Refuse keys ``modebench_*`` by which there are too few problems."""
    if any(rule.key.startswith("modebench_") and rule.broken(recipe) for rule in CONTRADICTIONS):
        return
    settings = Settings.read(recipe.__getitem__)
    for task in modebench_tasks(recipe):
        try:
            rows(task, "test", settings)
        except TooFew as error:
            key, what, fix = too_few(settings, error.found)
            yield recipe.problem(key, f"{task}: {what}", fix)


def too_few(settings: Settings, found: int) -> tuple[str, str, str]:
    """Return key, what is wrong and the fix where there are only ``found`` problems."""
    wanted = settings.prompts + settings.test_prompts
    what = f"{wanted} problems are asked for (modebench_prompts and modebench_test_prompts), there are {found}"
    left = found - settings.test_prompts
    if left > 0:
        return "modebench_prompts", what, f"write modebench_prompts: {left} or less, or ask for easier ones"
    fix = f"write modebench_test_prompts: {found // 4} and modebench_prompts: {found - found // 4}"
    return "modebench_test_prompts", what, fix if found > 1 else "widen modebench_min_modes to modebench_max_modes"


def _judging_rewards(recipe: Recipe) -> Iterator[Problem]:
    """Refuse rewards that cannot judge the data: one answer for many, or a verifier of other data."""
    named, trained = recipe["reward_funcs"], (recipe["dataset_name"] or "").startswith(SCHEME)
    evaluated = recipe["eval_dataset_name"] if recipe["eval_strategy"] != "no" else None
    wrong = [name for name in named if name in ONE_ANSWER]
    if MODEBENCH_REWARD in named and not trained:
        what = f"reward '{MODEBENCH_REWARD}' judges the problems of {' and '.join(TASKS)} alone"
        yield recipe.problem("reward_funcs", what, f"write dataset_name: {TASKS[0]}, or remove it")
    if trained and wrong:
        what = f"reward '{wrong[0]}' compares with one answer, a problem of {recipe['dataset_name']} has several"
        yield recipe.problem("reward_funcs", what, f"write reward_funcs: [{MODEBENCH_REWARD}]")
    if evaluated and evaluated.startswith(SCHEME) != trained:
        what = f"the rewards of '{recipe['dataset_name'] or 'dataset_mixture'}' cannot judge '{evaluated}'"
        fix = "evaluate on data of the same kind, or name the other one in benchmarks"
        yield recipe.problem("eval_dataset_name", what, fix)


DATA_RULES = (_training_data, _evaluation_data, _modebench_sizes, _judging_rewards)
