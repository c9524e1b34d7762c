"""Datasets: from a file or the hub to prompts and solutions."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase

from grpo_recipes.configs import ScriptArguments
from grpo_recipes.errors import refuse

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass(frozen=True)
class Prompts:
    """A prepared dataset.

    Attributes:
        dataset: columns ``prompt`` (chat messages) and ``answer`` (the reference solution, a text).
        read: rows in the source.
        dropped: rows whose rendered prompt is longer than ``max_prompt_length``.
        example: the first prompt as the model sees it.
    """

    dataset: Dataset
    read: int
    dropped: int
    example: str

    def __str__(self) -> str:
        return (
            f"{len(self.dataset)} prompts ({self.read} read, {self.dropped} dropped as longer than max_prompt_length)"
        )


def load_prompts(args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, least: int = 1) -> Prompts:
    """Read, render and filter the training prompts.

    Args:
        args: names the source and its columns.
        tokenizer: renders and counts; its chat template is replaced by ``args.chat_template`` when given.
        least: prompts needed for one step.

    Raises:
        Refused: a column is missing, the tokenizer has no chat template, or too few prompts are left.
    """
    if args.chat_template is not None:
        tokenizer.chat_template = args.chat_template
    if tokenizer.chat_template is None:
        raise refuse("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")
    source = _read(args)
    _need_columns(args, source)
    # In memory and without a fingerprint on disk: a cache would outlive a change of the template.
    prepared = source.map(
        lambda row: _row(args, row), remove_columns=source.column_names, keep_in_memory=True, load_from_cache_file=False
    )
    if len(prepared) == 0:
        raise refuse("dataset_name", f"'{args.dataset_name}' has no rows", "name a dataset with rows")
    kept = prepared.filter(
        lambda row: _fits(args, tokenizer, row["prompt"]), keep_in_memory=True, load_from_cache_file=False
    )
    if len(kept) < least:
        what = f"{len(kept)} of {len(prepared)} prompts are left, one step needs {least}"
        raise refuse("max_prompt_length", what, "raise max_prompt_length or lower prompts_per_step")
    example = tokenizer.apply_chat_template(kept[0]["prompt"], tokenize=False, add_generation_prompt=True)
    return Prompts(kept, len(source), len(prepared) - len(kept), str(example))


def _read(args: ScriptArguments) -> Dataset:
    path = Path(os.path.expanduser(args.dataset_name))
    if path.suffix in _BUILDERS and path.exists():
        return load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train")
    if path.is_dir() and (path / "dataset_info.json").exists():
        return load_from_disk(str(path))
    return load_dataset(args.dataset_name, args.dataset_config, split=args.dataset_train_split)


def _need_columns(args: ScriptArguments, source: Dataset) -> None:
    for key in ("dataset_prompt_column", "dataset_solution_column"):
        column = getattr(args, key)
        if column not in source.column_names:
            what = f"'{args.dataset_name}' has no column '{column}'"
            raise refuse(key, what, f"write one of {', '.join(source.column_names)}")


def _row(args: ScriptArguments, row: dict[str, Any]) -> dict[str, Any]:
    problem, solution = row[args.dataset_prompt_column], str(row[args.dataset_solution_column])
    messages = problem if isinstance(problem, list) else [{"role": "user", "content": str(problem)}]
    if args.system_prompt:
        messages = [{"role": "system", "content": args.system_prompt}, *messages]
    if args.dataset_solution_marker:
        solution = solution.rpartition(args.dataset_solution_marker)[2]
    return {"prompt": messages, "answer": solution.strip()}


def _fits(args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> bool:
    """Whether the rendered prompt fits."""
    if args.max_prompt_length is None:
        return True
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    return len(encoded["input_ids"]) <= args.max_prompt_length
