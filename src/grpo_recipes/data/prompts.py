"""Load the prompts for training and evaluation: read, convert, render, filter and count them.

prompts = load_prompts(script_args, tokenizer, least=args.prompts_per_step, seed=args.seed)
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset, load_from_disk
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_recipes.data.problems import (
    BATCH_ROWS,
    Batch,
    Counts,
    Fetched,
    Problems,
    Rows,
    collect_rows,
    describing_read_errors,
    drop_duplicates,
    get_eval_source,
    get_train_source,
    hash_prompt,
    list_columns,
    load_mixture,
    load_rows,
    make_problems,
    require_columns,
    select_rows,
)
from grpo_recipes.data.store import find_entry, identify_prompts, store_dataset
from grpo_recipes.errors import ConfigError, config_error, translate_errors
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.generated import GeneratedData, generated
from grpo_recipes.recipe.rendering import missing_fix, missing_message, rendering_notes
from grpo_recipes.recipe.row_filter import parse_row_filter
from grpo_recipes.recipe.shapes import DataSource, Message, root_of, value_at
from grpo_recipes.recipe.sources import starts_from_rows
from grpo_recipes.runs.rundir import PROMPTS

_MAX_SHOWN = 4000  # characters of a shown text


@dataclass(frozen=True)
class Renderer:
    """Render prompts with the chat template as TRL's trainer does."""

    tokenizer: PreTrainedTokenizerBase
    """The tokenizer with its chat template."""
    template_kwargs: dict[str, Any]
    """The recipe's ``chat_template_kwargs``."""

    def text(self, prompt: list[Message]) -> str:
        """Return a prompt as the text that the model gets. Raise ConfigError if the template can't render it."""
        return str(self._render(prompt, tokenize=False))

    def ids(self, prompts: list[list[Message]]) -> list[list[int]]:
        """Return the token ids of each prompt. Raise ConfigError if the template can't render one."""
        rendered = self._render(prompts, tokenize=True, return_dict=True)["input_ids"] if prompts else []
        return [list(ids) for ids in rendered]

    def check(self, prompts: list[list[Message]], checked: set[tuple[str, ...]], system: str | None) -> None:
        """Raise ConfigError if the template omits a message of a prompt. Each sequence of roles is checked once.

        ``checked`` collects the sequences of roles that were checked. ``system`` is the recipe's system prompt.
        """
        for prompt in prompts:
            roles = tuple(message["role"] for message in prompt)
            if prompt and roles not in checked:
                checked.add(roles)
                if message := missing_message(self.text, prompt):
                    is_recipes = message == {"role": "system", "content": system}
                    problem = f"the chat template leaves out the {message['role']} message of a prompt"
                    where = "system_prompt" if is_recipes else "chat_template"
                    raise config_error(where, problem, missing_fix(message, not is_recipes))

    def notes(self, prompt: list[Message]) -> list[str]:
        """Return notes for the user about rendered prompts: they change with the date, or end in an open thought."""
        template = self.tokenizer.get_chat_template(tools=None)
        return rendering_notes(self.text, prompt, template, self.template_kwargs)

    def _render(self, prompts: Any, **options: Any) -> Any:
        """Return the template's result for one or several prompts. Raise ConfigError if it fails."""
        fix = "write a chat_template that can, or remove the part that it cannot render (a system prompt, a role)"
        problem = "the template cannot render a prompt"
        with translate_errors(TemplateError, lambda error: config_error("chat_template", f"{problem}: {error}", fix)):
            return self.tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, **options, **self.template_kwargs
            )


def make_renderer(template: str | None, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None) -> Renderer:
    """Return a renderer with the recipe's chat template, or with the tokenizer's own template.

    A ``template`` of the recipe is set in the tokenizer, which is saved with the model. Raise ConfigError if there is
    no template.
    """
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise config_error("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")
    return Renderer(tokenizer, kwargs or {})


@contextmanager
def tokenize_on_all_cores() -> Iterator[None]:
    """Let the tokenizer use a thread per core inside the block, because the other ranks and the GPUs wait for it.

    Processes of a run have TOKENIZERS_PARALLELISM=false, so that a fork never finds such threads. The variable is true
    in the block, and restored after it.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def shorten(text: str) -> str:
    """Return a text for display. Above 4,000 characters, its middle is replaced by the number of omitted characters."""
    if len(text) <= _MAX_SHOWN:
        return text
    head, tail = _MAX_SHOWN * 3 // 4, _MAX_SHOWN // 4
    left_out = f"… {len(text) - head - tail:,} of {len(text):,} characters are left out …"
    return f"{text[:head]}\n{left_out}\n{text[-tail:]}"


@dataclass(frozen=True)
class Prompts:
    """A prepared dataset."""

    dataset: Dataset
    """Columns ``prompt`` (chat messages), ``answer`` (a text), and the source's other columns."""
    counts: Counts
    example: str = ""
    """The first prompt in the rendering for the model."""
    title: str = ""
    """The purpose of the prompts, unless they are for training."""

    def __str__(self) -> str:
        """Return one line: the title or the number of prompts, then the numbers of rows that were read and dropped."""
        title = self.title or f"{len(self.dataset)} prompts"
        first = f"{title} ({self.counts.read} read, {self.counts.too_long} dropped as longer than max_prompt_length)"
        return "; ".join([first, *self.counts.lines()])


def load_prompts(
    args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, least: int = 1, seed: int = 0,
    template_kwargs: dict[str, Any] | None = None, fetched: Fetched | None = None, run: Path | None = None,
) -> Prompts:  # fmt: skip
    """Read, render and filter the training prompts. In a trainer of ``run``, rank 0 does it and stores them there.

    ``args.chat_template``, if set, is stored in the tokenizer. ``least`` is the number of prompts of a step. ``seed``
    shuffles the rows before ``max_train_prompts`` selects the first ones. ``template_kwargs`` are the recipe's
    ``chat_template_kwargs``. ``fetched`` finds downloaded datasets. Raise ConfigError if the source cannot be
    read, a column is missing, the template fails, or too few prompts remain.
    """
    renderer = make_renderer(args.chat_template, tokenizer, template_kwargs)
    data = generated(args.dataset_name)
    is_ordered = data is not None and data.ordered

    def prepare() -> Prompts:
        """Return the training prompts. Raise ConfigError if fewer than ``least`` are left."""
        counts, limit = Counts(), args.max_train_prompts
        if is_ordered:
            source = get_train_source(args)
            problems = _load_all(source, args, renderer, counts)
            return Prompts(problems, counts, title=f"{len(problems)} problems of {source.id}")
        if args.dataset_mixture:
            training, held_out = load_mixture(args, counts, fetched)
            if held_out is not None:
                counts.notes.append(f"{len(held_out)} rows held out for evaluation (test_split_size)")
            candidates = Problems(training.features, training.iter(BATCH_ROWS))
        else:
            source = get_train_source(args)
            rows = _filter_rows(load_rows(source, args, fetched), args.dataset_filter, source.id, counts)
            if limit and not args.dataset_streaming:
                rows = rows.shuffle(seed=seed, keep_in_memory=True)
            batch_rows = min(BATCH_ROWS, limit or BATCH_ROWS)
            candidates = make_problems(rows, source, args, counts, batch_rows)
            if not starts_from_rows(partial(getattr, args)):
                candidates = drop_duplicates(candidates, counts)
        dataset = _drop_too_long(candidates, renderer, args, counts, limit)
        if len(dataset) == limit:
            order = "stream" if args.dataset_streaming else "shuffle by the seed"
            counts.notes.append(f"the first {limit} of the {order} (max_train_prompts)")
        if len(dataset) < least:
            causes = {
                "max_train_prompts": len(dataset) == limit,
                "max_prompt_length": counts.too_long,
                "dataset_filter": counts.filtered,
            }
            key = next((name for name, is_cause in causes.items() if is_cause), None)
            problem = f"{len(dataset)} of {counts.read} prompts are left, one step needs {least}"
            long = [f"{counts.too_long} longer than max_prompt_length"] if counts.too_long else []
            fix = f"{'widen' if key == 'dataset_filter' else 'raise'} {key} or lower prompts_per_step"
            fix = fix if key else "lower prompts_per_step, or name a larger dataset"
            raise config_error(key or "prompts_per_step", "; ".join([problem, *long, *counts.lines()]), fix)
        counts.notes += renderer.notes(dataset[0]["prompt"])
        return Prompts(dataset, counts)

    prompts = _prepare_on_main("train", args, renderer, [least, seed], prepare, run)
    return replace(prompts, dataset=_repeat(prompts.dataset, least)) if is_ordered else prompts


def load_eval_prompts(
    args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, seed: int,
    template_kwargs: dict[str, Any] | None = None, fetched: Fetched | None = None, run: Path | None = None,
) -> Prompts:  # fmt: skip
    """Read, sample, render and filter the evaluation prompts, as ``load_prompts`` does for training.

    They come from ``eval_dataset_name``, the held-out part of the mixture, or ``dataset_test_split`` of
    ``dataset_name``. ``seed`` selects the fraction ``eval_subsample`` of them, at least 1 and at most
    ``eval_max_prompts``. ``ordered`` generated data uses all its evaluation problems, except copies of training
    problems. Raise ConfigError if no prompt is left.
    """
    renderer = make_renderer(args.chat_template, tokenizer, template_kwargs)

    def prepare() -> Prompts:
        """Return the evaluation prompts. Raise ConfigError if none is left."""
        counts = Counts()
        source = get_eval_source(args) if args.eval_dataset_name or not args.dataset_mixture else None
        if source and (data := generated(source.id)) and data.ordered:
            return _load_held_out(data, source, args, renderer, counts)
        rows = load_rows(source, args, fetched) if source else load_mixture(args, counts, fetched)[1]
        if rows is None:
            raise config_error("dataset_mixture", "nothing is held out to evaluate on", "add test_split_size to it")
        if source and isinstance(rows, IterableDataset):  # read no more of a stream than eval_max_prompts can need
            max_rows = math.ceil(args.eval_max_prompts / args.eval_subsample)
            with describing_read_errors(source.id):
                rows = Dataset.from_list(list(rows.take(max_rows)), features=rows.features)
        limit = min(args.eval_max_prompts, max(1, round(args.eval_subsample * len(rows))))
        shuffled = rows.shuffle(seed=seed, keep_in_memory=True)
        candidates = Problems(rows.features, shuffled.iter(BATCH_ROWS))
        if source is not None:
            candidates = make_problems(shuffled, source, args, counts, min(BATCH_ROWS, limit))
            if not starts_from_rows(partial(getattr, args)):
                candidates = drop_duplicates(candidates, counts)
        dataset = _drop_too_long(candidates, renderer, args, counts, limit)
        if len(dataset) == 0:
            problem = "; ".join(["no evaluation prompt is left", *counts.lines()])
            raise config_error("eval_strategy", problem, "choose another set")
        limits = f"eval_max_prompts {args.eval_max_prompts}"
        limits += f", eval_subsample {args.eval_subsample:g}" if args.eval_subsample < 1 else ""
        title = f"evaluating on {len(dataset)} of {len(rows)} rows ({limits})"
        return Prompts(dataset, counts, title=title)

    return _prepare_on_main("eval", args, renderer, [seed], prepare, run)


def _repeat(problems: Dataset, least: int) -> Dataset:
    """Repeat all training problems of a generated dataset until an epoch consists of whole steps.

    ``least`` is the number of prompts of a step. TRL's sampler drops an incomplete step at the end of an epoch, so the
    epoch is a common multiple of ``least`` and the number of problems. Therefore, step i of an unshuffled run has the
    problems (i * least + j) mod the number of problems, in every epoch.
    """
    return problems.select([row % len(problems) for row in range(math.lcm(len(problems), least))])


def _load_held_out(
    data: GeneratedData, source: DataSource, args: ScriptArguments, renderer: Renderer, counts: Counts
) -> Prompts:
    """Load all evaluation problems of generated data, except copies of training problems.

    Raise ConfigError if all of them are copies.
    """
    problems = _load_all(source, args, renderer, counts)
    training_keys: set[bytes] = set()
    if args.dataset_name == source.id:
        training = _load_all(get_train_source(args), args, renderer, Counts())
        training_keys = set(map(hash_prompt, training["prompt"]))
    rows = [row for row, prompt in enumerate(problems["prompt"]) if hash_prompt(prompt) not in training_keys]
    if not rows:
        size_key, eval_size_key = data.size_keys
        problem = f"every problem of {eval_size_key} of '{source.id}' is also a training problem"
        raise config_error(eval_size_key, problem, f"set a larger {eval_size_key}, or a smaller {size_key}")
    if len(rows) < len(problems):
        counts.notes.append(f"{len(problems) - len(rows)} copies of training problems left out")
    dataset = problems.select(rows)
    return Prompts(dataset, counts, title=f"evaluating on {len(dataset)} problems of {source.id}")


def _load_all(source: DataSource, args: ScriptArguments, renderer: Renderer, counts: Counts) -> Dataset:
    """Return all problems of a generated dataset, and count them in ``counts``.

    Raise ConfigError if a prompt is too long, because the problems after a dropped one would move.
    """
    candidates = make_problems(load_rows(source, args), source, args, counts)
    dataset = _drop_too_long(candidates, renderer, args, counts, None)
    if counts.too_long:
        problem = f"{counts.too_long} of {counts.read} problems of '{source.id}' are longer than max_prompt_length"
        raise config_error("max_prompt_length", problem, "raise it")
    return dataset


def _prepare_on_main(
    name: str, args: ScriptArguments, renderer: Renderer, numbers: list[int], prepare: Callable[[], Prompts],
    run: Path | None,
) -> Prompts:  # fmt: skip
    """Call ``prepare`` on rank 0, which stores the dataset in ``run/prompts``; memory-map it on every other rank.

    A later attempt of the run uses the stored dataset, unless anything that determines the prompts has changed:
    the recipe's values, ``numbers``, or the rest of ``identify_prompts``. Without a run, nothing is stored, and each
    process prepares its prompts. All nodes share the file system of the run directory. A ConfigError of ``prepare`` is
    raised on every rank. After another error, the other ranks raise a RuntimeError.
    """
    if run is None:
        prompts = prepare()
        return replace(prompts, example=renderer.text(prompts.dataset[0]["prompt"]))
    values = [vars(args), numbers, renderer.template_kwargs]
    is_single = not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1

    def find_or_prepare() -> tuple[Prompts, Path | None]:
        """Return the prompts, and the folder with them; None if a single process can't reuse or store them."""
        identity = identify_prompts(run, args, renderer.tokenizer, values)
        if entry := find_entry(run / PROMPTS, name, identity):
            folder, fields = entry
            print(f"grpo: using the prompts in {PROMPTS}/{folder.name}, prepared by an earlier attempt")
            return Prompts(load_from_disk(folder), Counts(**fields["counts"]), title=fields["title"]), folder
        prompts = prepare()
        if is_single and identity is None:
            return prompts, None
        fields = {"counts": asdict(prompts.counts), "title": prompts.title}
        try:
            return prompts, store_dataset(run / PROMPTS, name, identity, prompts.dataset, fields)
        except OSError as error:
            if not is_single:  # the other ranks need the folder
                raise
            print(f"grpo: note: the prompts could not be stored, a resumed attempt prepares them again ({error})")
            return prompts, None

    prompts = find_or_prepare()[0] if is_single else _share(find_or_prepare)
    return replace(prompts, example=renderer.text(prompts.dataset[0]["prompt"]))


def _share(find_or_prepare: Callable[[], tuple[Prompts, Path | None]]) -> Prompts:
    """Call a function on rank 0, and return its prompts on every rank, memory-mapped from their folder."""
    failure: Exception | None = None
    outcome: dict[str, Any] = {}  # rank 0's message to the other ranks
    if torch.distributed.get_rank() == 0:
        try:
            prompts, folder = find_or_prepare()
            outcome = {"folder": str(folder), "rest": replace(prompts, dataset=None)}
        except Exception as error:  # the other ranks wait for a message
            problems = error.problems if isinstance(error, ConfigError) else []
            failure, outcome = error, {"problems": problems, "failure": f"{type(error).__name__}: {error}"}
    outcomes = [outcome]
    broadcast_object_list(outcomes, from_process=0)
    (outcome,) = outcomes
    if failure is not None:
        raise failure
    if outcome.get("problems"):
        raise ConfigError(*outcome["problems"])
    if "failure" in outcome:
        raise RuntimeError(f"rank 0 could not prepare the prompts: {outcome['failure']}")
    prompts_without_rows: Prompts = outcome["rest"]
    return replace(prompts_without_rows, dataset=load_from_disk(outcome["folder"]))


def load_first_problems(
    args: ScriptArguments, limit: int, fetched: Fetched | None = None
) -> tuple[list[dict[str, Any]], Counts]:
    """Read the first ``limit`` training problems of a recipe, before any shuffle, and return them with the counts.

    ``dataset_filter`` and ``max_prompt_length`` are not applied. A mixture is joined and shuffled first.
    """
    counts = Counts()
    if args.dataset_mixture:
        training, _ = load_mixture(args, counts, fetched)
        return training.select(range(min(limit, len(training)))).to_list(), counts
    source = get_train_source(args)
    problems = make_problems(load_rows(source, args, fetched), source, args, counts, batch_rows=limit)
    return collect_rows(problems, limit).to_list(), counts


def _filter_rows(rows: Rows, text: str | None, source: str, counts: Counts) -> Rows:
    """Return the rows whose column has a number in the range of the filter ``text``; all rows if it is None or empty.

    A stream is filtered when it is read. For other rows, ``counts`` gets the number of dropped rows and the
    distribution of the column. Raise ConfigError if ``source`` has no such column.
    """
    row_filter = parse_row_filter(text) if text else None
    if row_filter is None:
        return rows
    names = list_columns(rows)
    require_columns(source, rows.features or dict.fromkeys(names, True), {row_filter.column: "dataset_filter"})
    if isinstance(rows, IterableDataset):
        return rows.filter(lambda row: row_filter.keeps(value_at(row, row_filter.column)))
    with describing_read_errors(source):
        columns = rows.select_columns([root_of(row_filter.column, names)])
        values = [value_at(row, row_filter.column) for row in columns]
    indices = [index for index, value in enumerate(values) if row_filter.keeps(value)]
    counts.filtered += len(rows) - len(indices)
    counts.filter_values = {row_filter.column: row_filter.count(values)}
    return rows.select(indices)


def _drop_too_long(
    candidates: Problems, renderer: Renderer, args: ScriptArguments, counts: Counts, limit: int | None
) -> Dataset:
    """Return a dataset of the first ``limit`` problems with at most ``max_prompt_length`` tokens. Update ``counts``.

    A limit of None means no limit. Raise ConfigError if the chat template omits a message.
    """
    checked_roles: set[tuple[str, ...]] = set()

    def batches() -> Iterator[Batch]:
        """Yield the rows of each batch that are short enough, and count the others."""
        for batch in candidates.batches:
            renderer.check(batch["prompt"], checked_roles, args.system_prompt)
            with tokenize_on_all_cores():
                lengths, longest = [len(ids) for ids in renderer.ids(batch["prompt"])], args.max_prompt_length
            fitting = [index for index, length in enumerate(lengths) if longest is None or length <= longest]
            counts.too_long += len(lengths) - len(fitting)
            counts.longest = max([counts.longest, *(lengths[index] for index in fitting)])
            yield select_rows(batch, fitting)

    return collect_rows(Problems(candidates.features, batches()), limit)
