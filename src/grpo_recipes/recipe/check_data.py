"""Check the datasets of a recipe against their files: columns, kinds of the first rows, numbers of rows, chat template.

Pure: no torch, no datasets. Only the head of a data file is read, except that rows are counted up to the number needed.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_recipes.errors import ConfigError, Problem
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe, rules
from grpo_recipes.recipe.datafiles import (
    BUILDERS,
    ENVIRONMENTS,
    LIVE_OBJECTS,
    RESERVED_COLUMNS,
    Head,
    count_rows,
    file_fix,
    has_splits,
    is_saved,
    last_part,
    read_head,
)
from grpo_recipes.recipe.generated import SPLITS, generated, has_scheme, is_misspelled, schemes
from grpo_recipes.recipe.shapes import (
    COLUMN_KEYS,
    DEFAULT_SOLUTION,
    DataSource,
    answer_of,
    chat_of,
    root_of,
    usable_columns,
    value_at,
)
from grpo_recipes.recipe.solutions import reads_solutions, requires_solutions
from grpo_recipes.recipe.sources import source_of, starts_from_rows
from grpo_recipes.recipe.user_code import missing_argument_problems

HUB_NAME = re.compile(r"(?!\.)[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)  # "./name" is a path
LOCAL_PREFIXES = ("/", "./", "../", "~")
_RESERVED, _MEDIA = "reserved name", "media"
_NO_CONFIGURATION = "remove the configuration; if a base sets it, set its key to null"
_Place = Callable[[str], str]  # from a recipe key to its file and line
Columns = Mapping[str, str]  # name of a column -> why rewards do not get it, empty if they do


# --- the datasets of a recipe -----------------------------------------------------------------------------------------


def training_source(recipe: Recipe) -> DataSource:
    """Return the dataset that ``dataset_name`` names, with its split and its columns of prompt and solution."""
    name, config, split = (recipe[f"dataset_{part}"] for part in ("name", "config", "train_split"))
    return DataSource(name, config, split, *(recipe[key] for key in COLUMN_KEYS))


def evaluation_source(recipe: Recipe) -> DataSource:
    """Return the dataset that ``eval_dataset_name`` names; without ``eval_*`` keys, it has the training's columns."""
    first, second = (f"eval_{key}" if recipe[f"eval_{key}"] else key for key in COLUMN_KEYS)
    name, config, split = (recipe[f"eval_dataset_{part}"] for part in ("name", "config", "split"))
    return DataSource(name, config, split, recipe[first], recipe[second], (first, second))


def mixture_sources(recipe: Recipe) -> list[DataSource]:
    """Return the datasets of ``dataset_mixture``, except entries without ``id`` or with fewer than two ``columns``.

    An entry without ``columns`` gets the recipe's prompt and solution columns.
    """
    sources, keys = [], ("dataset_mixture", "dataset_mixture")
    for entry in (recipe.data.mixture or {}).get("datasets") or []:
        columns = entry.get("columns") or [recipe[key] for key in COLUMN_KEYS]
        if entry.get("id") and len(columns) > 1:
            extra_columns = tuple(columns[2:]) if entry.get("columns") else None
            split = entry.get("split") or "train"
            sources.append(
                DataSource(entry["id"], entry.get("config"), split, columns[0], columns[1], keys, extra_columns)
            )
    return sources


def head_of(source: DataSource) -> Head | None:
    """Return the head of a local dataset; None if it is not local, or can't be read.

    The check of the dataset itself reports unreadable files.
    """
    path = Path(os.path.expanduser(source.id))
    with contextlib.suppress(OSError, ValueError):
        if not has_scheme(source.id) and path.exists():
            return read_head(path, source.split)
    return None


# --- rewards ----------------------------------------------------------------------------------------------------------


def reward_arguments(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each user reward with a required argument that no dataset of the recipe has."""
    live: tuple[str, ...] = LIVE_OBJECTS if recipe.rewards.isolation == "none" else ()
    live += (ENVIRONMENTS,) if starts_from_rows(recipe.__getitem__) else ()
    sets: list[Columns | None] = []  # None: unknown before a download
    if recipe.data.mixture:  # counts as one dataset with the columns that all of its datasets have
        all_of = [_list_columns(source) for source in mixture_sources(recipe)]
        known = [columns for columns in all_of if columns is not None]
        common = set.intersection(*map(set, known)) if known and len(known) == len(all_of) else None
        sets.append(None if common is None else {name: known[0][name] for name in sorted(common)})
    elif recipe.data.name:
        sets.append(_list_columns(training_source(recipe)))
    if rules.evaluation_set(recipe):
        sets.append(_list_columns(evaluation_source(recipe)))
    yield from missing_argument_problems(recipe, sets, recipe.path.parent / "rewards", live)


def _list_columns(source: DataSource) -> Columns | None:
    """Return a dataset's columns, each with the reason why rewards do not get it, or "" if they do.

    Read only the recipe, generated data and local files. Return None for other datasets of the hub, even if they
    are downloaded, and for files that can't be read.
    """
    if source.others is not None:
        return {last_part(name): "" for name in (source.prompt, source.solution, *source.others)}
    if data := generated(source.id):
        return dict.fromkeys(data.columns, "")
    head = head_of(source)
    if head is None:
        return None
    reasons = {name: _RESERVED for name in RESERVED_COLUMNS} | dict.fromkeys(head.media, _MEDIA)
    return {name: reasons.get(name, "") for name in head.columns}


# --- rows -------------------------------------------------------------------------------------------------------------


def training_data(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems of the dataset or the mixture that a recipe trains on.

    Too few rows for one step are a problem too. Yield nothing if the recipe sets neither or both.
    """
    name, mixture = recipe.data.name, recipe.data.mixture
    if name and mixture is None:
        yield from _check_dataset(recipe.location("dataset_name"), training_source(recipe), recipe.location, recipe)
        yield from _check_row_count(recipe, [training_source(recipe)])
    elif mixture is not None and not (name and mixture):
        entries, size = mixture.get("datasets") or [], mixture.get("test_split_size")
        if not entries:
            fix = "add datasets: a list of {id, split, weight}"
            yield recipe.problem("dataset_mixture", "dataset_mixture names no datasets", fix)
        for index, entry in enumerate(entries):
            for problem in _check_mixture_entry(recipe, entry):
                yield Problem(problem.where, f"dataset_mixture.datasets[{index}]: {problem.what}", problem.fix)
        if size is not None and (float(size) <= 0 or (float(size) >= 1 and float(size) % 1)):
            fix = "write a share between 0 and 1, or a whole number of rows"
            yield recipe.problem("dataset_mixture", f"test_split_size is {size}", fix)
        if len(sources := mixture_sources(recipe)) == len(entries):
            yield from _check_row_count(recipe, sources)


def _check_mixture_entry(recipe: Recipe, entry: dict[str, Any]) -> Iterator[Problem]:
    """Yield the problems of one entry in ``dataset_mixture.datasets``; the caller adds the index of the entry."""
    where, name, columns = recipe.location("dataset_mixture"), entry.get("id"), entry.get("columns")
    if not name:
        yield Problem(where, "has no id", "add id: a hub id or a file")
    elif has_scheme(name):
        yield Problem(where, f"'{name}' cannot be mixed", f"write dataset_name: {name}")
    elif columns is not None and len(columns) < 2:
        yield Problem(where, f"columns are {columns}", "write [prompt column, solution column], and others to keep")
    else:
        for column in (columns or [])[2:]:
            if last_part(column) in RESERVED_COLUMNS:
                message = f"the trainer reserves the column name '{last_part(column)}'"
                yield Problem(where, message, "rename it in the data")
        mixture = replace(recipe.values["dataset_mixture"], value={"datasets": [entry]})
        source = mixture_sources(recipe.with_value("dataset_mixture", mixture))[0]
        yield from _check_dataset(where, source, lambda _: where, recipe)


def evaluation_data(recipe: Recipe, _: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problems of the evaluation dataset or, without one, of the training dataset's ``dataset_test_split``.

    The split is only checked in local and built-in datasets. Yield nothing if the recipe does not evaluate.
    """
    if rules.evaluation_set(recipe):
        yield from _check_dataset(
            recipe.location("eval_dataset_name"), evaluation_source(recipe), recipe.location, recipe
        )
    elif recipe.evaluation.strategy != "no" and recipe.data.name and not recipe.data.mixture:
        name, split = recipe.data.name, recipe.data.test_split
        path, data = Path(os.path.expanduser(name)), generated(name)
        one_set = data is not None and data.in_files
        if one_set or (os.path.exists(path) and not has_splits(path)):
            fix = f"add eval_dataset_name: {name if one_set else 'the file to evaluate on'}"
            yield recipe.problem("eval_strategy", f"'{name}' has no split '{split}' to evaluate on", fix)
        elif data or (os.path.isdir(path) and is_saved(path)):
            # The training split has the same columns.
            source = replace(training_source(recipe), config=None, split=split)
            yield from _check_dataset(
                recipe.location("dataset_test_split"), source, recipe.location, recipe, columns=False
            )


def _check_dataset(
    where: str, source: DataSource, place: _Place, recipe: Recipe, columns: bool = True
) -> Iterator[Problem]:
    """Yield the problems of a dataset that the heads of its files show.

    ``where`` is the location of the dataset's name, and ``place`` returns the location of a key. With ``columns``
    false, columns and rows are not checked.
    """
    name, config, split = source.id, source.config, source.split
    path, head = Path(os.path.expanduser(name)), None
    data = generated(name)
    if is_misspelled(name):
        names = next(names for scheme, names in schemes().items() if name.startswith(scheme))
        yield Problem(where, f"there is no built-in '{name}'", f"write {' or '.join(names)}")
        return
    in_files = data is not None and data.in_files  # such data is used for any split and configuration of a base
    if config and not in_files and (data or os.path.isfile(path) or is_saved(path)):
        yield Problem(where, f"'{name}' has no configuration '{config}'", _NO_CONFIGURATION)
    if data and in_files:
        head = Head(list(data.columns), data.rows(recipe.__getitem__, SPLITS[0]))
    elif data:
        if split not in SPLITS:
            fix = f"write {' or '.join(SPLITS)}; {data.size_keys[0]} says how many there are"
            yield Problem(where, f"'{name}' has no split '{split}'", fix)
        head = Head(list(data.columns), [])
    elif not os.path.exists(path):
        yield from _find_missing_file(where, name, path)
    else:
        try:
            head = read_head(path, split)
        except (OSError, ValueError) as error:
            fix = file_fix(str(error)) or "name a data file, or a folder of data files of one kind"
            yield Problem(where, str(error), fix)
    if head is not None and columns:
        yield from _check_columns_and_rows(source, head, place, recipe)


def _find_missing_file(where: str, name: str, path: Path) -> Iterator[Problem]:
    """Yield the problem of a dataset name without a local file; nothing for a hub id.

    A ``name`` that starts like a local path (/, ./, ../ or ~), or a ``path`` with the suffix of a data file, is
    never a hub id. ``path`` is the local path of ``name``, and ``where`` the line that sets it.
    """
    if name.startswith(LOCAL_PREFIXES) or path.suffix in BUILDERS:
        whole = f"write {os.path.expanduser(name)}, or another file" if name.startswith("~") else "name a file"
        yield Problem(where, f"no file '{name}'", f"{whole}, from the folder of the launch, or a hub id")
    elif not HUB_NAME.fullmatch(name):
        fix = "name an existing file or a hub id, e.g. openai/gsm8k"
        yield Problem(where, f"'{name}' is neither a file here nor a hub id", fix)


def _check_columns_and_rows(source: DataSource, head: Head, place: _Place, recipe: Recipe) -> Iterator[Problem]:
    """Yield problems for missing columns in the head of a dataset, and for first rows of the wrong kind."""
    columns_read = (source.prompt, source.solution)
    passed = [name for name, reason in (_list_columns(source) or {}).items() if not (reason or name in columns_read)]
    with_solution = source.solution != DEFAULT_SOLUTION or requires_solutions(recipe.__getitem__, passed)
    broken, columns = False, [source.prompt, *[source.solution] * with_solution]
    for column, key in zip(columns, source.keys, strict=False):
        problem = _find_missing_column(source, head, column, for_solution=column != source.prompt)
        if problem:
            broken = True
            yield replace(problem, where=place(key))
    for column in source.others or ():
        if problem := _find_missing_column(source, head, column):
            yield replace(problem, where=place("dataset_mixture"))
    if not broken:
        yield from _find_wrong_rows(source, head, place, recipe)


def _find_missing_column(
    source: DataSource, head: Head, column: str, for_solution: bool | None = None
) -> Problem | None:
    """Return the problem of a column, or of a path into a column, that is missing in the head of a dataset, or None.

    The problem has no location yet. ``for_solution`` is true for the solution and false for the prompt; the fix then
    proposes columns that fit. It is None for other columns.
    """
    names, root = head.columns, root_of(column, head.columns)
    rows = [row for row in head.rows if root in row]
    if root in names and (root == column or not rows or any(value_at(row, column) is not None for row in rows)):
        return None
    usable = [] if for_solution is None else usable_columns(head.rows, source, for_solution)
    fix = f"write one of {', '.join(usable or names)}"
    shown_path = display_path(Path(os.path.expanduser(source.id)))
    if len(names) == 1 and (mark := next((mark for mark in ";\t|" if mark in names[0]), None)):
        name = {";": "semicolons", "\t": "tabs", "|": "bars"}[mark]
        fix = f"save the file with commas: its fields are separated by {name}"
        fix = "rename the file to .tsv: its fields are separated by tabs" if mark == "\t" else fix
    return Problem("", f"'{shown_path}' has no column '{column}'", fix)


def _find_wrong_rows(source: DataSource, head: Head, place: _Place, recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if a prompt or solution in the first rows is of the wrong kind, or is missing in all of them."""
    marker, completed = recipe.data.solution_marker, starts_from_rows(recipe.__getitem__)
    readers: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        (source.prompt, lambda value: chat_of(value, source, None, completed)),
        (source.solution, lambda value: answer_of(value, marker, source)[0]),
    )
    for (column, read), key, content in zip(readers, source.keys, ("prompt", "solution"), strict=True):
        rows = [row for row in head.rows if root_of(column, head.columns) in row]
        try:
            filled = [bool(read(value_at(row, column))) for row in rows]
        except ConfigError as error:
            (problem,) = error.problems
            yield replace(problem, where=place(key))
            continue
        if filled and not any(filled) and (content == "prompt" or reads_solutions(recipe.__getitem__)):
            usable = usable_columns(head.rows, source, content == "solution")
            candidates = [name for name in usable if name not in (source.prompt, source.solution)]
            fix = f"write one of {', '.join(candidates)}" if candidates else f"add a {content} to each row"
            first = f"the first {len(rows)} rows" if len(rows) > 1 else "the first row"
            yield Problem(place(key), f"column '{column}' of '{source.id}' has no {content} in {first}", fix)


def _check_row_count(recipe: Recipe, sources: Sequence[DataSource]) -> Iterator[Problem]:
    """Yield a problem if the datasets together have fewer rows than one step needs prompts.

    Nothing is yielded if the rows of a dataset can't be counted quickly, for example before a download, or if the
    recipe does not set the size of a step.
    """
    least = recipe.batch.prompts_per_step
    if least is None and recipe.batch.generation_batch_size:
        least = recipe.batch.generation_batch_size // recipe.batch.num_generations
    if not least:
        return
    total = 0
    for source in sources:
        data = generated(source.id)
        if data and data.in_files:
            count: int | None = len(data.rows(recipe.__getitem__, SPLITS[0]))
        else:
            count = local_rows(source, least - total)
        if count is None or (total := total + count) >= least:
            return
    if sources:
        key = "prompts_per_step" if recipe.batch.prompts_per_step is not None else "generation_batch_size"
        names = " and ".join(f"'{source.id}'" for source in sources)
        rows = f"{total} row{'s' * (total != 1)}"
        message = f"one step needs {least} prompts, {names} {'have' if len(sources) > 1 else 'has'} {rows}"
        value = total if key == "prompts_per_step" else total * recipe.batch.num_generations
        yield recipe.problem(key, message, f"set {key}: {value}, or name a larger dataset" if total else "add rows")


def local_rows(source: DataSource, most: int) -> int | None:
    """Count the rows of a local dataset, but stop at ``most``.

    Return None if it is not local, is a slice, can't be read, or takes long to count.
    """
    path = Path(os.path.expanduser(source.id))
    sliced = not re.fullmatch(r"\w+", source.split)
    if sliced or has_scheme(source.id) or not os.path.exists(path):
        return None
    with contextlib.suppress(OSError, ValueError):
        return count_rows(path, most, source.split)
    return None


# --- the rows that an evaluation takes --------------------------------------------------------------------------------


def evaluation_note(recipe: Recipe) -> str:
    """Return a line with the number of rows that an evaluation uses, or an empty text if there is nothing to report.

    The text is empty if the recipe has no evaluation, if a source such as an environment provides the completions, or
    if a generated dataset is always evaluated as a whole. If the rows cannot be counted before a download, the line has
    only their limit.
    """
    if not rules.evaluates(recipe) or source_of(recipe.__getitem__):
        return ""
    share, most = recipe.evaluation.subsample, recipe.evaluation.max_prompts
    limits = f"eval_max_prompts {most}" + (f", eval_subsample {share:g}" if share < 1 else "")
    name, size = rules.evaluation_set(recipe), (recipe.data.mixture or {}).get("test_split_size")
    if size and not name:
        return f"evaluation: the held-out rows of the mixture (test_split_size {float(size):g}), at most {most}"
    source = evaluation_source(recipe) if name else replace(training_source(recipe), split=recipe.data.test_split)
    if not source.id or ((data := generated(source.id)) and data.ordered):
        return ""
    path = Path(os.path.expanduser(source.id))
    of_splits = path.is_dir() and not is_saved(path)  # its files are counted together
    counted = None if of_splits else local_rows(source, _count_needed_rows(most, share) + 1)
    if counted is None:
        return f"evaluation: at most {most} rows of '{source.id}' ({limits})"
    used = min(most, max(1, round(share * counted)))
    total = f"more than {counted - 1}" if counted > _count_needed_rows(most, share) else str(counted)
    return f"evaluation: {used} of {total} rows of '{source.id}' ({limits})"


def _count_needed_rows(most: int, share: float) -> int:
    """Return how many rows a dataset needs so that the fraction ``share`` of them is ``most`` rows."""
    return -int(-most // share)
