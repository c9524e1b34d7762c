"""Several datasets as one: ``dataset_mixture``."""

from __future__ import annotations

from datasets import Dataset, Features, Value, concatenate_datasets

from grpo_recipes.data.problems import BATCH_ROWS, Counts, Problems, collected, distinct, problems, prompt_key
from grpo_recipes.data.rows import Fetched, mixture_source, read_rows
from grpo_recipes.errors import config_error
from grpo_recipes.recipe.configs import DatasetConfig, DatasetMixtureConfig, ScriptArguments

_KEY = "dataset_mixture"


def mixed(args: ScriptArguments, counts: Counts, fetched: Fetched | None = None) -> tuple[Dataset, Dataset | None]:
    """Join, shuffle and split the datasets of a mixture. The same recipe gives the same rows in the same order.

    Returns:
        Problems to train on, and those held out, or None without ``test_split_size``. No prompt is in both. Beside
        ``prompt`` and ``answer`` they have ``source``, the id of the dataset, and the columns that all datasets have.

    Raises:
        ConfigError: a dataset cannot be read, lacks a column, or too few rows are left.
    """
    mixture = DatasetMixtureConfig(**(args.dataset_mixture or {}))
    seed = int(mixture.seed)
    parts = [_part(DatasetConfig(**entry), seed, args, counts, fetched) for entry in mixture.datasets]
    joined = concatenate_datasets(_alike(parts, counts)).shuffle(seed=seed, keep_in_memory=True)
    joined = collected(Problems(joined.features, distinct(joined.iter(BATCH_ROWS), counts)))
    if mixture.test_split_size is None:
        return joined, None
    return hold_out(joined, float(mixture.test_split_size))


def hold_out(rows: Dataset, size: float) -> tuple[Dataset, Dataset]:
    """Split shuffled rows in those to train on and the first ones, held out; rows of one prompt stay together.

    ``size`` is a share below 1, or a number of rows.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    wanted = max(1, round(size * len(rows))) if size < 1 else int(size)
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(rows["prompt"]):
        groups.setdefault(prompt_key(prompt), []).append(index)
    held: list[int] = []
    kept: list[int] = []
    for group in groups.values():
        (held if len(held) < wanted else kept).extend(group)
    if not kept:
        what = f"test_split_size {size:g} of {len(rows)} rows leaves none to train on"
        raise config_error(_KEY, what, "hold out fewer rows")
    return rows.select(sorted(kept)), rows.select(held)


def _part(entry: DatasetConfig, seed: int, args: ScriptArguments, counts: Counts, fetched: Fetched | None) -> Dataset:
    """Return the problems of one dataset, its weight's share of them, with their source."""
    rows = read_rows(entry.id, entry.config, entry.split, fetched=fetched)
    if entry.weight is not None:
        share = max(1, round(float(entry.weight) * len(rows)))
        rows = rows.shuffle(seed=seed, keep_in_memory=True).select(range(min(share, len(rows))))
    found = problems(rows, mixture_source(entry, args), args, counts)
    if "source" in found.features:
        counts.notes.append(f"column 'source' of '{entry.id}' replaced by the dataset's id")
    features = Features({**found.features, "source": Value("string")})
    return collected(
        Problems(features, ({**batch, "source": [entry.id] * len(batch["prompt"])} for batch in found.batches))
    )


def _alike(parts: list[Dataset], counts: Counts) -> list[Dataset]:
    """Return the columns that all parts have, of one type."""
    first, every = parts[0].features, dict.fromkeys(name for part in parts for name in part.column_names)
    common = [name for name in every if all(part.features.get(name) == first.get(name) for part in parts)]
    left_out = [name for name in every if name not in common]
    if left_out:
        counts.notes.append(f"columns that not all datasets of the mixture have left out: {', '.join(left_out)}")
    return [part.select_columns(common) for part in parts]
