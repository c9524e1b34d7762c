"""Generated datasets: rows that are made from recipe keys, so that nothing is downloaded.

``generated("smoke:sums")`` returns the dataset of that name. The smoke task is part of the core; an extension lists its
datasets in its part ``datasets``. The same keys give the same rows on every machine. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from grpo_recipes import smoke
from grpo_recipes.recipe.extensions import entries

Lookup = Callable[[str], Any]  # the value of a recipe key: recipe.__getitem__ or partial(getattr, script_args)
Row = dict[str, Any]
SPLITS = ("train", "test")


@dataclass(frozen=True)
class Scoring:
    """Scores of a benchmark next to ``pass@k``, for problems with several right answers."""

    column: str  # name of the judgments in a row of the results
    judge: Callable[[str, str], Any]  # (completion, answer) -> its judgment, as JSON has it
    scores: Callable[[Sequence[Sequence[Any]], Sequence[str]], dict[str, Any]]  # (judgments, answers) -> scores
    baselines: Callable[[Sequence[str], int], dict[str, Any]]  # (answers, samples) -> scores without a model, by name


@dataclass(frozen=True)
class GeneratedData:
    """One generated dataset: its rows, the reward that judges them, and the keys that decide both."""

    name: str  # in ``dataset_name``; it begins with a scheme, e.g. ``smoke:``
    columns: tuple[str, ...]  # problem, answer, and further columns for rewards
    rows: Callable[[Lookup, str], list[Row]]  # (keys, split) -> rows
    fingerprint: Callable[[Lookup], str]  # a short hash of everything that decides the rows of both splits
    in_files: bool = False  # written to files before the run, under any split: the smoke task
    size_keys: tuple[str, str] = ("", "")  # keys with the numbers of rows to train and to evaluate on
    reward: str | None = None  # the only reward that judges its problems; None: rewards that compare with one answer
    ordered: bool = False  # training repeats all rows in their order, and an evaluation takes all of them
    order_keys: tuple[str, ...] = ()  # keys that a resumed run may not change, because they move its place in the data
    eval_keys: tuple[str, ...] = ()  # keys that decide the rows to evaluate on
    recorded: Mapping[str, str] = field(default_factory=dict)  # column -> its name in metrics.jsonl and eval.jsonl
    scoring: Scoring | None = None  # further scores if it is a benchmark

    @property
    def scheme(self) -> str:
        """The part of the name before the colon."""
        return self.name.partition(":")[0]


def _read_smoke_rows(name: str, _: Lookup, split: str) -> list[Row]:
    """Return the rows of a smoke dataset for the split "train" or "test"."""
    splits = smoke.split_sums(solutions=name == smoke.UNTRAINED, programs=name == smoke.PROGRAMS)
    return [dict(row) for row in splits[split == "test"]]


def _fingerprint_smoke(name: str, _: Lookup) -> str:
    """Return a name that changes with the rows of a smoke dataset: the name of its folder."""
    return smoke.smoke_folder(name, {}).name


_SMOKE = tuple(
    GeneratedData(
        name,
        ("problem", "answer", *(["solution"] if name == smoke.UNTRAINED else [])),
        partial(_read_smoke_rows, name),
        partial(_fingerprint_smoke, name),
        in_files=True,
    )
    for name in smoke.SMOKE_DATA
)


def generated_datasets() -> dict[str, GeneratedData]:
    """Return all generated datasets by name."""
    return {data.name: data for data in (*_SMOKE, *entries("datasets"))}


def generated(name: str | None) -> GeneratedData | None:
    """Return the generated dataset of a name, None for other names."""
    return generated_datasets().get(name or "")


def schemes() -> dict[str, list[str]]:
    """Return the names of all generated datasets: scheme with its colon, e.g. ``smoke:`` -> names."""
    names: dict[str, list[str]] = {}
    for data in generated_datasets().values():
        names.setdefault(f"{data.scheme}:", []).append(data.name)
    return names


def has_scheme(name: str | None) -> bool:
    """Return whether a name begins with the scheme of generated data, e.g. ``smoke:``; the rest may be misspelled."""
    return (name or "").startswith(tuple(schemes()))


def is_misspelled(name: str | None) -> bool:
    """Return whether a name has the scheme of generated data, but the dataset does not exist."""
    return has_scheme(name) and generated(name) is None


def own_reward(name: str | None) -> str | None:
    """Return the only reward that judges a generated dataset.

    Return None if its problems have one answer each, and for any other dataset.
    """
    data = generated(name)
    return data.reward if data else None


def recorded_columns() -> dict[str, str]:
    """Return the columns of generated data that metrics.jsonl and eval.jsonl record, each with its name there."""
    return {column: name for data in generated_datasets().values() for column, name in data.recorded.items()}


def recorded_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the recorded columns of these rows: name in metrics.jsonl -> the value of each row; {} without rows."""
    columns = recorded_columns().items() if rows else ()
    return {name: [row[column] for row in rows] for column, name in columns if column in rows[0]}


def keys_of_data(kind: str) -> list[str]:
    """Return the recipe keys in the field ``kind`` (``order_keys`` or ``eval_keys``) of all generated datasets."""
    return list(dict.fromkeys(key for data in generated_datasets().values() for key in getattr(data, kind)))
