"""Read datasets, wherever they are, and shape their rows into problems; several datasets joined.

A problem has ``prompt`` (a chat), ``answer`` (a text), and other columns for rewards.
"""

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    Json,
    LargeList,
    List,
    ReadInstruction,
    Value,
    concatenate_datasets,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetNotFoundError, DatasetsError

from grpo_recipes.errors import config_error
from grpo_recipes.recipe import datafiles
from grpo_recipes.recipe.configs import DatasetConfig, DatasetMixtureConfig, ScriptArguments
from grpo_recipes.recipe.generated import generated
from grpo_recipes.recipe.shapes import COLUMN_KEYS, DataSource, Message, answer_of, chat_of, root_of, value_at

Batch = dict[str, list[Any]]

BATCH_ROWS = 1000
MESSAGES = List({"role": Value("string"), "content": Value("string")})
Rows = Dataset | IterableDataset
# (hub id, configuration, split) -> folder of `save_to_disk` that an earlier `grpo fetch` left, or None.
Fetched = Callable[[str, str | None, str], Path | None]


def train_source(args: ScriptArguments) -> DataSource:
    """Return what ``dataset_name`` names."""
    prompt, solution = (getattr(args, key) for key in COLUMN_KEYS)
    return DataSource(args.dataset_name, args.dataset_config, args.dataset_train_split, prompt, solution)


def eval_source(args: ScriptArguments) -> DataSource:
    """Return ``eval_dataset_name``, else ``dataset_test_split`` of ``dataset_name``, unless it is one file."""
    first, second = (f"eval_{key}" if getattr(args, f"eval_{key}") else key for key in COLUMN_KEYS)
    name, config, split = args.eval_dataset_name, args.eval_dataset_config, args.eval_dataset_split
    if not name:
        name, config, split = args.dataset_name, args.dataset_config, args.dataset_test_split
        path = Path(os.path.expanduser(name))
        if os.path.exists(path) and not datafiles.has_splits(path):
            what = f"'{name}' has no split '{split}' to evaluate on"
            raise config_error("eval_strategy", what, "add eval_dataset_name")
    return DataSource(name, config, split, getattr(args, first), getattr(args, second), (first, second))


def read_rows(
    source: str, config: str | None, split: str, streaming: bool = False, fetched: Fetched | None = None
) -> Rows:
    """Read a dataset: a hub id, a local file or a local folder; a ConfigError says why it cannot be read.

    ``split`` may be a slice such as ``train[:10%]``; a single file is whatever split is asked for. A stream is left
    unread, and what ``fetched`` finds on this machine is mapped, never streamed.
    """
    if fetched and (folder := fetched(source, config, split)):
        return load_from_disk(str(folder))
    path = Path(os.path.expanduser(source))
    with reading(source):
        if path.is_dir() and datafiles.is_saved(path):
            loaded = load_from_disk(str(path))
            parts = loaded if isinstance(loaded, DatasetDict) else {datafiles.split_name(split): loaded}
            ranges = ReadInstruction.from_spec(split).to_absolute({name: len(part) for name, part in parts.items()})
            return concatenate_datasets([parts[one.splitname].select(range(one.from_, one.to)) for one in ranges])
        options: dict[str, Any] = {"split": split, "streaming": streaming}
        if path.is_dir():
            kind, files = datafiles.data_files(path)
            _check_fields(files)
            return load_dataset(str(path), config, **options, **_text_options(kind, files[0]))
        if not path.is_file():
            return load_dataset(source, config, **options)
        if path.suffix not in datafiles.BUILDERS:
            raise ValueError(f"not a {', '.join(datafiles.BUILDERS)} file")
        if config is not None:
            raise ValueError(f"a file has no configuration '{config}'")
        _check_fields([path])
        file = glob.escape(str(path))  # datasets reads brackets in a name as a pattern
        kind, files_of_split = datafiles.BUILDERS[path.suffix], {datafiles.split_name(split): file}
        return load_dataset(kind, data_files=files_of_split, **options, **_text_options(kind, path))


def rows_of(source: DataSource, args: ScriptArguments, fetched: Fetched | None = None) -> Rows:
    """Return the rows of a dataset of a recipe: read, or generated from keys of the recipe."""
    if data := generated(source.id):
        return Dataset.from_list(data.rows(partial(getattr, args), source.split))
    return read_rows(source.id, source.config, source.split, args.dataset_streaming, fetched)


def column_names(rows: Rows) -> list[str]:
    """Return the columns of rows; those of a stream without a schema show in its first row."""
    return rows.column_names or list(next(iter(rows), {}))


def need_columns(source: str, features: Any, wanted: dict[str, str]) -> None:
    """Reject a dataset of these columns that lacks one; ``wanted`` has the recipe key that names each."""
    for column, key in wanted.items():
        if _feature_at(features, column) is None:
            inside = features.get(column.partition(".")[0])
            paths = [f"{column.partition('.')[0]}.{name}" for name in inside] if isinstance(inside, dict) else []
            fix = f"write one of {', '.join(paths or features)}"
            raise config_error(key, f"'{source}' has no column '{column}'", fix)


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Raise a ConfigError with the dataset and the reason, in one line, in place of what ``datasets`` raises."""
    try:
        yield
    except (DatasetsError, OSError, ValueError, RuntimeError, StopIteration) as error:
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        text = " ".join(str(first).split()) or type(first).__name__
        reason = "it has no rows" if isinstance(first, StopIteration) else text[:300] + " ..." * (len(text) > 300)
        fix = datafiles.file_fix(text) or "repair the file, or name a dataset, configuration and split that exist"
        if isinstance(error, DatasetNotFoundError):
            fix = "check the id; a private or gated dataset needs HF_TOKEN, and its terms accepted on its page"
        elif isinstance(error, ConnectionError):
            fix = "run grpo fetch RECIPE where there is a network, or name a local file"
        raise config_error(f"'{source}'", f"the dataset cannot be read: {reason}", fix) from error


def _check_fields(files: list[Path]) -> None:
    """Raise a ValueError with the line of a .csv or .tsv file whose number of fields is not the header's."""
    for file in files:
        if datafiles.BUILDERS[file.suffix] == "csv":
            for _ in datafiles.csv_rows(file):
                pass


def _text_options(kind: str, file: Path) -> dict[str, Any]:
    """Return how to read a .csv or .tsv file. Guessing types makes 7 of the answer 007, and a gap of the answer NA."""
    if kind != "csv":
        return {}
    texts = dict.fromkeys(datafiles.csv_columns(file), str)
    return {
        "sep": datafiles.separator(file), "converters": texts, "na_filter": False, "keep_default_na": False
    }  # fmt: skip


@dataclass(frozen=True)
class Problems:
    """Problems not yet read."""

    features: Features  # of ``prompt``, ``answer`` and the other columns
    batches: Iterator[Batch]  # each made when it is asked for


@dataclass
class Counts:
    """What became of the rows."""

    read: int = 0
    empty: int = 0  # dropped, without a prompt or a solution
    duplicates: int = 0  # dropped, since prompt and answer equal an earlier row's
    too_long: int = 0  # dropped, longer than ``max_prompt_length``
    other_answers: int = 0  # kept, though the prompt came before with another answer
    own_system: int = 0  # kept, with a system message of their own in place of ``system_prompt``
    unmarked: int = 0  # kept, whole solutions without ``dataset_solution_marker``
    longest: int = 0  # tokens of the longest prompt kept
    left_out: dict[str, str] = field(default_factory=dict)  # columns that rewards do not get, and why
    notes: list[str] = field(default_factory=list)  # what else the user should know

    def lines(self) -> list[str]:
        """Return one text for each count that is not 0, but for the rows read and those too long."""
        said = {
            "without a prompt or a solution dropped": self.empty,
            "equal to an earlier prompt and answer dropped": self.duplicates,
            "with the prompt of an earlier one and another answer kept": self.other_answers,
            "with a system message of their own, which stays": self.own_system,
            "without dataset_solution_marker in the solution, which is kept whole": self.unmarked,
        }
        longest = [f"longest prompt {self.longest} tokens"] if self.longest else []
        columns = ", ".join(f"{name} ({reason})" for name, reason in self.left_out.items())
        named = [f"columns not passed to rewards: {columns}"] if columns else []
        return [*longest, *(f"{count} {text}" for text, count in said.items() if count), *named, *self.notes]


def problems(
    rows: Rows, source: DataSource, args: ScriptArguments, counts: Counts, batch_rows: int = BATCH_ROWS
) -> Problems:
    """Shape rows into problems, ``batch_rows`` at a time, and count; refuse what is neither a text nor a chat."""
    names = column_names(rows)
    if not names:
        raise config_error(f"'{source.id}'", "the dataset has no rows", "name a dataset with rows")
    needed = {source.prompt: source.keys[0], source.solution: source.keys[1]}
    known = rows.features or Dataset.from_dict(next(rows.iter(BATCH_ROWS))).features
    need_columns(source.id, known, needed | dict.fromkeys(source.others or (), source.keys[0]))
    others = source.others
    if others is None:
        columns = [name for name in known if name not in (source.prompt, source.solution)]
        left_out = {name: reason for name in columns if (reason := _left_out(name, known[name]))}
        counts.left_out |= left_out
        others = tuple(name for name in columns if name not in left_out)
    passed = {datafiles.last_part(name): _common_type(_feature_at(known, name)) for name in others}
    # Unselected columns are not decoded: reading images takes most of the time in datasets that have some.
    read = [source.prompt, source.solution, *others]
    rows = rows.select_columns(list(dict.fromkeys(root_of(column, names) for column in read)))

    def shaped() -> Iterator[Batch]:
        """Yield chats and answers of a batch of rows at a time."""
        unread, marker, system = rows.iter(batch_rows), args.dataset_solution_marker, args.system_prompt
        while True:
            with reading(source.id):
                batch = next(unread, None)
            if batch is None:
                return
            values = {column: _values(batch, column) for column in read}
            prompts = [chat_of(value, source, system) for value in values[source.prompt]]
            solutions = _as_written(values[source.solution], _feature_at(known, source.solution))
            answers = [answer_of(value, marker, source) for value in solutions]
            usable = [index for index, prompt in enumerate(prompts) if prompt and answers[index][0]]
            counts.read += len(prompts)
            counts.empty += len(prompts) - len(usable)
            counts.unmarked += sum(unmarked for _, unmarked in answers)
            if system:
                counts.own_system += sum(prompt[0]["content"] != system for prompt in prompts if prompt)
            columns = {"prompt": prompts, "answer": [answer for answer, _ in answers]}
            yield chosen(columns | {datafiles.last_part(name): values[name] for name in others}, usable)

    return Problems(Features({"prompt": MESSAGES, "answer": Value("string"), **passed}), shaped())


def _values(batch: Batch, column: str) -> list[Any]:
    """Return the values of a column of a batch, or of a path into one."""
    root = root_of(column, list(batch))
    if root == column:
        return batch[column]
    return [value_at({root: value}, column) for value in batch[root]]


def _feature_at(features: Any, column: str) -> Any:
    """Return the type of a column or of a path into one; None if no row can have it."""
    if column in features:
        return features[column]
    feature = features
    for part in column.split("."):
        if isinstance(feature, dict):
            feature = feature.get(part)
        elif isinstance(feature, List | LargeList) and part.removeprefix("-").isdigit():
            feature = feature.feature
        elif not isinstance(feature, Json):
            return None
    return feature


def _left_out(name: str, feature: Any) -> str:
    """Return why rewards do not get a column, or an empty text."""
    if name in datafiles.RESERVED_COLUMNS:
        return "reserved name"
    return "media" if _has_media(feature) else ""


def _has_media(feature: Any) -> bool:
    """Return whether a column holds images, audio, video or documents, also inside lists and dictionaries."""
    if isinstance(feature, List | LargeList):
        return _has_media(feature.feature)
    return any(map(_has_media, feature.values())) if isinstance(feature, dict) else hasattr(feature, "embed_storage")


def _common_type(feature: Any) -> Any:
    """Return a column's type without the large texts and lists of pandas and polars, so that datasets can be joined."""
    if isinstance(feature, List | LargeList):
        return List(_common_type(feature.feature))
    if isinstance(feature, dict):
        return {name: _common_type(part) for name, part in feature.items()}
    return Value("string") if feature == Value("large_string") else feature


def _as_written(values: list[Any], feature: Any) -> list[Any]:
    """Return numbers of narrow columns as they were written: float32 stores 0.1 as 0.10000000149011612."""
    narrow = {"float16": numpy.float16, "float32": numpy.float32}.get(getattr(feature, "dtype", ""))
    if narrow is None:
        return values
    return [value if value is None else float(str(narrow(value))) for value in values]


def distinct(found: Problems, counts: Counts) -> Problems:
    """Drop what equals an earlier row in prompt and answer."""
    seen: dict[bytes, set[bytes]] = {}

    def is_new(prompt: list[Message], answer: str) -> bool:
        answers, digest = seen.setdefault(prompt_key(prompt), set()), _digest(answer)
        new = digest not in answers
        counts.duplicates += not new
        counts.other_answers += new and bool(answers)
        answers.add(digest)
        return new

    def batches() -> Iterator[Batch]:
        for batch in found.batches:
            pairs = enumerate(zip(batch["prompt"], batch["answer"], strict=True))
            yield chosen(batch, [index for index, (prompt, answer) in pairs if is_new(prompt, answer)])

    return Problems(found.features, batches())


def collected(found: Problems, limit: int | None = None) -> Dataset:
    """Return a dataset in memory, of the first ``limit`` rows or of all, and read no more batches than that takes."""
    parts = [Dataset.from_dict({name: [] for name in found.features}, features=found.features)]
    total = 0
    for batch in found.batches:
        parts.append(Dataset.from_dict(batch, features=found.features))
        total += len(parts[-1])
        if limit is not None and total >= limit:
            break
    whole = concatenate_datasets(parts)
    return whole if limit is None else whole.select(range(min(limit, total)))


def chosen(batch: Batch, indices: list[int]) -> Batch:
    """Return some rows of a batch."""
    return {name: [values[index] for index in indices] for name, values in batch.items()}


def prompt_key(prompt: list[Message]) -> bytes:
    """Return what equal prompts have in common."""
    return _digest(json.dumps([[message["role"], message["content"]] for message in prompt]))


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def mixed(args: ScriptArguments, counts: Counts, fetched: Fetched | None = None) -> tuple[Dataset, Dataset | None]:
    """Join, shuffle and split the datasets of a mixture. The same recipe gives the same rows in the same order.

    Return problems to train on, and those held out, or None without ``test_split_size``; no prompt is in both. Beside
    ``prompt`` and ``answer`` they have ``source``, the id of the dataset, and the columns that all datasets have.
    """
    mixture = DatasetMixtureConfig(**(args.dataset_mixture or {}))
    seed = int(mixture.seed)
    parts = [_part(DatasetConfig(**entry), seed, args, counts, fetched) for entry in mixture.datasets]
    every = dict.fromkeys(name for part in parts for name in part.column_names)
    first = parts[0].features
    common = [name for name in every if all(part.features.get(name) == first.get(name) for part in parts)]
    counts.left_out |= {name: "not in every dataset of the mixture" for name in every if name not in common}
    joined = concatenate_datasets([part.select_columns(common) for part in parts])
    shuffled = joined.shuffle(seed=seed, keep_in_memory=True)
    joined = collected(distinct(Problems(shuffled.features, shuffled.iter(BATCH_ROWS)), counts))
    if mixture.test_split_size is None:
        return joined, None
    size = float(mixture.test_split_size)  # a share, or a number of rows; all rows of a prompt are on one side
    wanted = max(1, round(size * len(joined))) if size < 1 else int(size)
    groups: dict[bytes, list[int]] = {}
    for index, prompt in enumerate(joined["prompt"]):
        groups.setdefault(prompt_key(prompt), []).append(index)
    held: list[int] = []
    kept: list[int] = []
    for group in groups.values():
        (held if len(held) < wanted else kept).extend(group)
    if not kept:
        what = f"test_split_size {size:g} of {len(joined)} rows leaves none to train on"
        raise config_error("dataset_mixture", what, "hold out fewer rows")
    return joined.select(sorted(kept)), joined.select(held)


def _part(entry: DatasetConfig, seed: int, args: ScriptArguments, counts: Counts, fetched: Fetched | None) -> Dataset:
    """Return the problems of one dataset, its weight's share of them, with their source."""
    rows = read_rows(entry.id, entry.config, entry.split, fetched=fetched)
    if entry.weight is not None:
        share = max(1, round(float(entry.weight) * len(rows)))
        rows = rows.shuffle(seed=seed, keep_in_memory=True).select(range(min(share, len(rows))))
    prompt, solution, *others = entry.columns or [getattr(args, key) for key in COLUMN_KEYS]
    keys, kept = ("dataset_mixture", "dataset_mixture"), tuple(others) if entry.columns else None
    source = DataSource(entry.id, entry.config, entry.split, prompt, solution, keys, kept)
    found = problems(rows, source, args, counts)
    if "source" in found.features:
        counts.notes.append(f"column 'source' of '{entry.id}' replaced by the dataset's id")
    features = Features({**found.features, "source": Value("string")})
    batches = ({**batch, "source": [entry.id] * len(batch["prompt"])} for batch in found.batches)
    return collected(Problems(features, batches))
