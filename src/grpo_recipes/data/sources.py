"""Which datasets a recipe names, and the columns it wants of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from grpo_recipes.errors import config_error
from grpo_recipes.recipe.configs import DatasetConfig, ScriptArguments
from grpo_recipes.recipe.datafiles import has_splits

_COLUMN_KEYS = ("dataset_prompt_column", "dataset_solution_column")


@dataclass(frozen=True)
class Source:
    """One dataset of a recipe.

    Attributes:
        id: hub id, file or folder.
        config: its configuration.
        split: its split.
        prompt: column of the problem.
        solution: column of the reference solution.
        keys: recipe keys that name the two columns, for messages.
        others: other columns to keep; None keeps all scalars.
    """

    id: str
    config: str | None
    split: str
    prompt: str
    solution: str
    keys: tuple[str, str] = _COLUMN_KEYS
    others: tuple[str, ...] | None = None


def train_source(args: ScriptArguments) -> Source:
    """``dataset_name``."""
    prompt, solution = (getattr(args, key) for key in _COLUMN_KEYS)
    return Source(args.dataset_name, args.dataset_config, args.dataset_train_split, prompt, solution)


def mixture_source(entry: DatasetConfig, args: ScriptArguments) -> Source:
    """An entry of ``dataset_mixture``: two of its ``columns`` are prompt and solution, the rest are kept."""
    names = entry.columns or [getattr(args, key) for key in _COLUMN_KEYS]
    others = tuple(names[2:]) if entry.columns else None
    where = ("dataset_mixture", "dataset_mixture")
    return Source(entry.id, entry.config, entry.split, names[0], names[1], where, others)


def eval_source(args: ScriptArguments) -> Source:
    """``eval_dataset_name``, or else ``dataset_test_split`` of ``dataset_name``.

    Raises:
        ConfigError: ``dataset_name`` is a single file, of which no part is kept apart.
    """
    given = [bool(getattr(args, f"eval_{key}")) for key in _COLUMN_KEYS]
    keys = [f"eval_{key}" if own else key for key, own in zip(_COLUMN_KEYS, given, strict=True)]
    prompt, solution = (getattr(args, key) for key in keys)
    where = (keys[0], keys[1])
    if args.eval_dataset_name:
        return Source(
            args.eval_dataset_name, args.eval_dataset_config, args.eval_dataset_split, prompt, solution, where
        )
    path = Path(os.path.expanduser(args.dataset_name))
    if path.exists() and not has_splits(path):
        what = f"'{args.dataset_name}' has no split '{args.dataset_test_split}' to evaluate on"
        raise config_error("eval_strategy", what, "add eval_dataset_name")
    return Source(args.dataset_name, args.dataset_config, args.dataset_test_split, prompt, solution, where)
