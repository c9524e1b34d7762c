"""Read datasets from files, folders or the hub, convert their rows to problems, and join several datasets.

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
from typing import Any, TypeAlias

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
from grpo_recipes.recipe.shapes import (
    COLUMN_KEYS,
    DEFAULT_SOLUTION,
    DataSource,
    Message,
    answer_of,
    chat_of,
    root_of,
    value_at,
)
from grpo_recipes.recipe.solutions import reads_solutions, requires_solutions
from grpo_recipes.recipe.sources import starts_from_rows

Batch = dict[str, list[Any]]

BATCH_ROWS = 1000
MESSAGES = List({"role": Value("string"), "content": Value("string")})
Rows: TypeAlias = Dataset | IterableDataset
# (hub id, configuration, split) -> folder that an earlier `grpo fetch` saved with `save_to_disk`, or None.
Fetched = Callable[[str, str | None, str], Path | None]


def get_train_source(args: ScriptArguments) -> DataSource:
    """Return id, configuration, split and columns of the training dataset, from the recipe's ``dataset_*`` keys."""
    prompt, solution = (getattr(args, key) for key in COLUMN_KEYS)
    assert args.dataset_name is not None  # `grpo check` requires it, a mixture or a source of prompts
    return DataSource(args.dataset_name, args.dataset_config, args.dataset_train_split, prompt, solution)


def get_eval_source(args: ScriptArguments) -> DataSource:
    """Return the evaluation dataset: ``eval_dataset_name``, or the split ``dataset_test_split`` of ``dataset_name``.

    A column key of the evaluation that is not set has the training's value. Raise ConfigError if ``dataset_name`` is
    needed and is a file or folder without splits.
    """
    first, second = (f"eval_{key}" if getattr(args, f"eval_{key}") else key for key in COLUMN_KEYS)
    name, config, split = args.eval_dataset_name, args.eval_dataset_config, args.eval_dataset_split
    if not name:
        name, config, split = args.dataset_name, args.dataset_config, args.dataset_test_split
        assert name is not None  # as in ``get_train_source``
        path = Path(os.path.expanduser(name))
        if os.path.exists(path) and not datafiles.has_splits(path):
            problem = f"'{name}' has no split '{split}' to evaluate on"
            raise config_error("eval_strategy", problem, "add eval_dataset_name")
    return DataSource(name, config, split, getattr(args, first), getattr(args, second), (first, second))


def read_rows(
    source: str, config: str | None, split: str, streaming: bool = False, fetched: Fetched | None = None
) -> Rows:
    """Read a dataset from a hub id, a local file or a local folder. Raise ConfigError if that fails.

    ``split`` may be a slice such as ``train[:10%]``. A single file has any split and no ``config``. A stream is not
    read yet. A dataset that ``fetched`` finds on this machine is memory-mapped, never streamed.
    """
    if fetched and (folder := fetched(source, config, split)):
        return load_from_disk(str(folder))
    path = Path(os.path.expanduser(source))
    with describing_read_errors(source):
        if path.is_dir() and datafiles.is_saved(path):
            loaded = load_from_disk(str(path))
            parts = loaded if isinstance(loaded, DatasetDict) else {datafiles.split_name(split): loaded}
            ranges = ReadInstruction.from_spec(split).to_absolute({name: len(part) for name, part in parts.items()})
            return concatenate_datasets([parts[part.splitname].select(range(part.from_, part.to)) for part in ranges])
        options: dict[str, Any] = {"split": split, "streaming": streaming}
        if path.is_dir():
            kind, files = datafiles.data_files(path)
            _check_fields(files)
            return load_dataset(str(path), config, **options, **_get_text_options(kind, files[0]))
        if not path.is_file():
            return load_dataset(source, config, **options)
        if path.suffix not in datafiles.BUILDERS:
            raise ValueError(f"not a {', '.join(datafiles.BUILDERS)} file")
        if config is not None:
            raise ValueError(f"a file has no configuration '{config}'")
        _check_fields([path])
        file = glob.escape(str(path))  # datasets would interpret brackets in a name as a pattern
        kind, files_of_split = datafiles.BUILDERS[path.suffix], {datafiles.split_name(split): file}
        return load_dataset(kind, data_files=files_of_split, **options, **_get_text_options(kind, path))


def load_rows(source: DataSource, args: ScriptArguments, fetched: Fetched | None = None) -> Rows:
    """Return the rows of a recipe's dataset, either read or, for a built-in generator, generated from recipe keys.

    They are read as ``read_rows`` does, as a stream with ``dataset_streaming``. ``fetched`` finds downloaded datasets.
    """
    if data := generated(source.id):
        return Dataset.from_list(data.rows(partial(getattr, args), source.split))
    return read_rows(source.id, source.config, source.split, args.dataset_streaming, fetched)


def list_columns(rows: Rows) -> list[str]:
    """Return the column names of rows. A stream without a schema is read up to its first row; [] without one."""
    return rows.column_names or list(next(iter(rows), {}))


def require_columns(source: str, features: Any, keys: dict[str, str]) -> None:
    """Raise ConfigError for the first required column that is missing in ``features``, the types of all columns.

    ``keys`` maps each required column, or path into one, to the recipe key that sets it. ``source`` names the dataset.
    """
    for column, key in keys.items():
        if _get_feature(features, column) is None:
            inside = features.get(column.partition(".")[0])
            paths = [f"{column.partition('.')[0]}.{name}" for name in inside] if isinstance(inside, dict) else []
            fix = f"write one of {', '.join(paths or features)}"
            raise config_error(key, f"'{source}' has no column '{column}'", fix)


@contextmanager
def describing_read_errors(source: str) -> Iterator[None]:
    """Convert errors of ``datasets`` in the block to a ConfigError with the dataset and the reason in one line."""
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
            fix = "run grpo fetch RECIPE on a machine with a network, or name a local file"
        raise config_error(f"'{source}'", f"the dataset cannot be read: {reason}", fix) from error


def _check_fields(files: list[Path]) -> None:
    """Raise ValueError for the first fault in the .csv and .tsv files; other files are not read.

    Faults are a line with more or fewer fields than the header, a repeated column, unbalanced quotes, and text that is
    not UTF-8.
    """
    for file in files:
        if datafiles.BUILDERS[file.suffix] == "csv":
            for _ in datafiles.csv_rows(file):
                pass


def _get_text_options(kind: str, file: Path) -> dict[str, Any]:
    """Return options that read a .csv or .tsv file as text; no options for other kinds.

    Type guessing would turn 007 into 7, and NA into None.
    """
    if kind != "csv":
        return {}
    texts = dict.fromkeys(datafiles.csv_columns(file), str)
    return {
        "sep": datafiles.separator(file), "converters": texts, "na_filter": False, "keep_default_na": False
    }  # fmt: skip


@dataclass(frozen=True)
class Problems:
    """Problems that are read lazily, and only once."""

    features: Features
    """Types of ``prompt``, ``answer`` and the other columns."""
    batches: Iterator[Batch]
    """Each batch is made when it is requested."""


@dataclass
class Counts:
    """Counts of read, dropped and unusual rows."""

    read: int = 0
    empty: int = 0
    """Rows dropped since they have no prompt or no solution."""
    duplicates: int = 0
    """Rows dropped since prompt and answer equal an earlier row."""
    filtered: int = 0
    """Rows dropped since ``dataset_filter`` does not select them."""
    filter_values: dict[str, list[tuple[float, int, bool]]] = field(default_factory=dict)
    """Column of ``dataset_filter`` -> its numbers, each with its rows and whether the filter keeps them."""
    too_long: int = 0
    """Rows dropped since they are longer than ``max_prompt_length``."""
    other_answers: int = 0
    """Rows kept although the prompt appeared before with another answer."""
    own_system: int = 0
    """Rows kept with their own system message instead of ``system_prompt``."""
    unmarked: int = 0
    """Rows kept with the whole solution, which has no ``dataset_solution_marker``."""
    longest: int = 0
    """Tokens of the longest kept prompt."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Columns that rewards do not receive, with the reason."""
    notes: list[str] = field(default_factory=list)
    """Further notes for the user."""

    def lines(self) -> list[str]:
        """Return a line for each kind of unusual rows, the longest prompt, columns that rewards do not get, and notes.

        Rows that were read or too long have no line.
        """
        texts = {
            "outside of dataset_filter dropped": self.filtered,
            "without a prompt or a solution dropped": self.empty,
            "equal to an earlier prompt and answer dropped": self.duplicates,
            "with the prompt of an earlier one and another answer kept": self.other_answers,
            "with their own system message, which stays": self.own_system,
            "without dataset_solution_marker in the solution, which is kept whole": self.unmarked,
        }
        longest = [f"longest prompt {self.longest} tokens"] if self.longest else []
        columns = ", ".join(f"{name} ({reason})" for name, reason in self.left_out.items())
        named = [f"columns not passed to rewards: {columns}"] if columns else []
        return [*longest, *(f"{count} {text}" for text, count in texts.items() if count), *named, *self.notes]


def make_problems(
    rows: Rows, source: DataSource, args: ScriptArguments, counts: Counts, batch_rows: int = BATCH_ROWS
) -> Problems:
    """Convert rows to problems, ``batch_rows`` at a time when they are read, and add to ``counts``.

    Rows without a prompt are dropped, and rows without a solution if a reward may read it. If no reward needs a
    solution, its column may be missing, and the problems have no ``answer``. Raise ConfigError if another column is
    missing, or if a stream without a schema has no rows. A prompt that is neither text nor chat raises ConfigError when
    its batch is read.
    """
    names = list_columns(rows)
    if not names:
        raise config_error(f"'{source.id}'", "the dataset has no rows", "name a dataset with rows")
    known = rows.features or Dataset.from_dict(next(rows.iter(BATCH_ROWS))).features
    extra_columns = source.others
    if extra_columns is None:
        columns = [name for name in known if name not in (source.prompt, source.solution)]
        left_out = {name: reason for name in columns if (reason := _explain_left_out(name, known[name]))}
        counts.left_out |= left_out
        extra_columns = tuple(name for name in columns if name not in left_out)
    lookup = vars(args).get
    completed = starts_from_rows(lookup)  # an episode adds to its prompt, which may be empty
    is_named = source.solution != DEFAULT_SOLUTION or _get_feature(known, source.solution) is not None
    has_solution = is_named or requires_solutions(lookup, list(map(datafiles.last_part, extra_columns)))
    drops_empty, solution_columns = reads_solutions(lookup), [source.solution] * has_solution
    needed = {source.prompt: source.keys[0]} | dict.fromkeys(solution_columns, source.keys[1])
    require_columns(source.id, known, needed | dict.fromkeys(source.others or (), source.keys[0]))
    passed = {datafiles.last_part(name): _simplify_type(_get_feature(known, name)) for name in extra_columns}
    # Unselected columns are not decoded. In datasets with images, decoding them takes most of the time.
    read = [source.prompt, *solution_columns, *extra_columns]
    rows = rows.select_columns(list(dict.fromkeys(root_of(column, names) for column in read)))

    def convert_batches() -> Iterator[Batch]:
        """Yield the problems of each batch of rows, without the rows to drop.

        Columns are prompt, answer if there are solutions, and the last parts of ``extra_columns``. Add to read, empty,
        unmarked and own_system of ``counts``. Raise ConfigError if the source can't be read, or if a prompt or a
        solution is invalid.
        """
        unread, marker, system = rows.iter(batch_rows), args.dataset_solution_marker, args.system_prompt
        while True:
            with describing_read_errors(source.id):
                batch = next(unread, None)
            if batch is None:
                return
            values = {column: _get_values(batch, column) for column in read}
            prompts = [chat_of(value, source, system, completed) for value in values[source.prompt]]
            solutions = _round_to_written(values.get(source.solution, []), _get_feature(known, source.solution))
            answers = [answer_of(value, marker, source) for value in solutions]
            drops = has_solution and drops_empty
            usable = [i for i, prompt in enumerate(prompts) if prompt and not (drops and not answers[i][0])]
            counts.read += len(prompts)
            counts.empty += len(prompts) - len(usable)
            counts.unmarked += sum(unmarked for _, unmarked in answers)
            if system:
                counts.own_system += sum(prompt[0]["content"] != system for prompt in prompts if prompt)
            columns: Batch = {"prompt": prompts}
            columns |= {"answer": [answer for answer, _ in answers]} if has_solution else {}
            columns |= {datafiles.last_part(name): values[name] for name in extra_columns}
            yield select_rows(columns, usable)

    answer_type = {"answer": Value("string")} if has_solution else {}
    return Problems(Features({"prompt": MESSAGES, **answer_type, **passed}), convert_batches())


def _get_values(batch: Batch, column: str) -> list[Any]:
    """Return the values of a column of a batch, or of a path into a column, such as ``info.question``."""
    root = root_of(column, list(batch))
    if root == column:
        return batch[column]
    return [value_at({root: value}, column) for value in batch[root]]


def _get_feature(features: Any, column: str) -> Any:
    """Return the type of a column, or of a path into one, such as ``info.question``. None if no row can have it."""
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


def _explain_left_out(name: str, feature: Any) -> str:
    """Return why rewards do not receive a column: "reserved name" or "media". Empty if they do."""
    if name in datafiles.RESERVED_COLUMNS:
        return "reserved name"
    return "media" if _has_media(feature) else ""


def _has_media(feature: Any) -> bool:
    """Return whether a column contains images, audio, video or documents, also inside lists and dictionaries."""
    if isinstance(feature, List | LargeList):
        return _has_media(feature.feature)
    return any(map(_has_media, feature.values())) if isinstance(feature, dict) else hasattr(feature, "embed_storage")


def _simplify_type(feature: Any) -> Any:
    """Return a column's type with plain texts and lists instead of large ones, so that datasets can be joined."""
    if isinstance(feature, List | LargeList):
        return List(_simplify_type(feature.feature))
    if isinstance(feature, dict):
        return {name: _simplify_type(part) for name, part in feature.items()}
    return Value("string") if feature == Value("large_string") else feature


def _round_to_written(values: list[Any], feature: Any) -> list[Any]:
    """Return values with float16 and float32 numbers rounded as a file shows them: 0.1, not 0.10000000149011612."""
    narrow = {"float16": numpy.float16, "float32": numpy.float32}.get(getattr(feature, "dtype", ""))
    if narrow is None:
        return values
    return [value if value is None else float(str(narrow(value))) for value in values]


def drop_duplicates(source: Problems, counts: Counts) -> Problems:
    """Return problems that leave out rows whose prompt and answer equal an earlier row.

    Rows are filtered, and counted in ``counts``, when they are read.
    """
    answers_by_prompt: dict[bytes, set[bytes]] = {}

    def batches() -> Iterator[Batch]:
        """Yield each batch without the rows that have occurred before."""
        for batch in source.batches:
            new_rows = []
            texts = batch.get("answer") or [""] * len(batch["prompt"])
            for index, (prompt, answer) in enumerate(zip(batch["prompt"], texts, strict=True)):
                answers, digest = answers_by_prompt.setdefault(hash_prompt(prompt), set()), _hash_text(answer)
                if digest in answers:
                    counts.duplicates += 1
                    continue
                counts.other_answers += bool(answers)
                answers.add(digest)
                new_rows.append(index)
            yield select_rows(batch, new_rows)

    return Problems(source.features, batches())


def collect_rows(source: Problems, limit: int | None = None) -> Dataset:
    """Read the first ``limit`` rows, or all rows if it is None, into a dataset in memory.

    No more batches are read than necessary.
    """
    parts = [Dataset.from_dict({name: [] for name in source.features}, features=source.features)]
    total = 0
    for batch in source.batches:
        parts.append(Dataset.from_dict(batch, features=source.features))
        total += len(parts[-1])
        if limit is not None and total >= limit:
            break
    whole = concatenate_datasets(parts)
    return whole if limit is None else whole.select(range(min(limit, total)))


def select_rows(batch: Batch, indices: list[int]) -> Batch:
    """Return the rows of a batch with these indices."""
    return {name: [values[index] for index in indices] for name, values in batch.items()}


def hash_prompt(prompt: list[Message]) -> bytes:
    """Return a digest of 16 bytes that is the same for equal prompts."""
    return _hash_text(json.dumps([[message["role"], message["content"]] for message in prompt]))


def _hash_text(text: str) -> bytes:
    """Return a digest of 16 bytes that is the same for equal texts. Invalid Unicode is accepted."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def load_mixture(
    args: ScriptArguments, counts: Counts, fetched: Fetched | None = None
) -> tuple[Dataset, Dataset | None]:
    """Join, shuffle and split the datasets of a mixture. The same recipe gives the same rows in the same order.

    Return training problems, and held-out problems or None without ``test_split_size``. No prompt is in both.
    Problems have ``prompt``, ``answer``, ``source`` (the id of their dataset), and the columns that all datasets
    have. Update ``counts``. Raise ConfigError if no row is left to train on.
    """
    mixture = DatasetMixtureConfig(**(args.dataset_mixture or {}))
    seed = int(mixture.seed)
    entries = [DatasetConfig(**entry) for entry in (args.dataset_mixture or {}).get("datasets", [])]
    parts = [_load_part(entry, seed, args, counts, fetched) for entry in entries]
    names = dict.fromkeys(name for part in parts for name in part.column_names)
    first = parts[0].features
    common = [name for name in names if all(part.features.get(name) == first.get(name) for part in parts)]
    counts.left_out |= {name: "not in every dataset of the mixture" for name in names if name not in common}
    joined = concatenate_datasets([part.select_columns(common) for part in parts])
    shuffled = joined.shuffle(seed=seed, keep_in_memory=True)
    joined = collect_rows(drop_duplicates(Problems(shuffled.features, shuffled.iter(BATCH_ROWS)), counts))
    if mixture.test_split_size is None:
        return joined, None
    size = float(mixture.test_split_size)  # a fraction, or a number of rows
    held_out_size = max(1, round(size * len(joined))) if size < 1 else int(size)
    groups: dict[bytes, list[int]] = {}  # rows by prompt; all rows of a prompt are in the same part
    for index, prompt in enumerate(joined["prompt"]):
        groups.setdefault(hash_prompt(prompt), []).append(index)
    held_out: list[int] = []
    training: list[int] = []
    for group in groups.values():
        (held_out if len(held_out) < held_out_size else training).extend(group)
    if not training:
        problem = f"test_split_size {size:g} of {len(joined)} rows leaves none to train on"
        raise config_error("dataset_mixture", problem, "hold out fewer rows")
    return joined.select(sorted(training)), joined.select(held_out)


def _load_part(
    entry: DatasetConfig, seed: int, args: ScriptArguments, counts: Counts, fetched: Fetched | None
) -> Dataset:
    """Return the problems of a dataset of the mixture, with the column ``source``. Update ``counts``.

    ``entry.weight`` selects a random fraction of the rows, in an order drawn by ``seed``. None selects all, in their
    own order. ``fetched`` finds downloaded datasets.
    """
    rows = read_rows(entry.id, entry.config, entry.split, fetched=fetched)
    if entry.weight is not None:
        count = max(1, round(float(entry.weight) * len(rows)))
        rows = rows.shuffle(seed=seed, keep_in_memory=True).select(range(min(count, len(rows))))
    prompt, solution, *listed = entry.columns or [getattr(args, key) for key in COLUMN_KEYS]
    keys, extra_columns = ("dataset_mixture", "dataset_mixture"), tuple(listed) if entry.columns else None
    source = DataSource(entry.id, entry.config, entry.split, prompt, solution, keys, extra_columns)
    part = make_problems(rows, source, args, counts)
    if "source" in part.features:
        counts.notes.append(f"column 'source' of '{entry.id}' replaced by the dataset's id")
    features = Features({**part.features, "source": Value("string")})
    batches = ({**batch, "source": [entry.id] * len(batch["prompt"])} for batch in part.batches)
    return collect_rows(Problems(features, batches))
