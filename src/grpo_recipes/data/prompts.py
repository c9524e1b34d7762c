"""The prompts a run trains on and those it evaluates on: read, shaped, rendered, filtered, counted."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset, IterableDataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from grpo_recipes.data.mixture import mixed
from grpo_recipes.data.problems import (
    BATCH_ROWS,
    Batch,
    Counts,
    Message,
    Problems,
    chosen,
    collected,
    distinct,
    problems,
)
from grpo_recipes.data.rows import DataSource, Fetched, eval_source, reading, rows_of, train_source
from grpo_recipes.data.sharing import prepared_once
from grpo_recipes.errors import ConfigError, config_error
from grpo_recipes.recipe.configs import ScriptArguments


def use_template(template: str | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer the recipe's chat template. TRL renders with it, and it is saved with the model.

    Raises:
        ConfigError: there is no template at all.
    """
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise config_error("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")


@dataclass(frozen=True)
class Renderer:
    """Renders as TRL's trainer does, which sends the server token ids and no messages."""

    tokenizer: PreTrainedTokenizerBase  # with its chat template
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # the recipe's ``chat_template_kwargs``

    def text(self, prompt: list[Message]) -> str:
        """Return a prompt as text."""
        return str(self._render(prompt, tokenize=False))

    def lengths(self, prompts: list[list[Message]]) -> list[int]:
        """Return the tokens of each prompt."""
        if not prompts:
            return []
        return [len(ids) for ids in self._render(prompts, tokenize=True, return_dict=True)["input_ids"]]

    def fitting(self, batches: Iterable[Batch], limit: int | None, counts: Counts) -> Iterator[Batch]:
        """Drop prompts of more than ``limit`` tokens."""
        for batch in batches:
            lengths = self.lengths(batch["prompt"])
            kept = [index for index, length in enumerate(lengths) if limit is None or length <= limit]
            counts.too_long += len(lengths) - len(kept)
            counts.longest = max([counts.longest, *(lengths[index] for index in kept)])
            yield chosen(batch, kept)

    def _render(self, prompts: Any, **how: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, **how, **self.template_kwargs
            )
        except TemplateError as error:
            fix = "write a chat_template that can, or leave out what it cannot (a system prompt, the roles of a chat)"
            raise config_error("chat_template", f"the template cannot render a prompt: {error}", fix) from error


@dataclass(frozen=True)
class Prompts:
    """A prepared dataset."""

    # Columns ``prompt`` (chat messages), ``answer`` (the reference solution, a text), and the other scalar columns of
    # the source under their names.
    dataset: Dataset
    counts: Counts
    example: str  # the first prompt as the model sees it
    title: str = ""  # what the prompts are for, when they are not to train on

    @property
    def read(self) -> int:
        """Return the rows read from the source."""
        return self.counts.read

    @property
    def dropped(self) -> int:
        """Return the rows whose rendered prompt is longer than ``max_prompt_length``."""
        return self.counts.too_long

    def __str__(self) -> str:
        title = self.title or f"{len(self.dataset)} prompts"
        first = f"{title} ({self.read} read, {self.dropped} dropped as longer than max_prompt_length)"
        return "; ".join([first, *self.counts.lines()])


@dataclass(frozen=True)
class _Setting:
    """What both kinds of prompts are made with."""

    args: ScriptArguments
    renderer: Renderer
    seed: int
    fetched: Fetched | None


def load_prompts(
    args: ScriptArguments,
    tokenizer: PreTrainedTokenizerBase,
    least: int = 1,
    seed: int = 0,
    template_kwargs: dict[str, Any] | None = None,
    fetched: Fetched | None = None,
) -> Prompts:
    """Read, render and filter the training prompts; with several ranks, one does and the others wait.

    Args:
        args: names the source and its columns.
        tokenizer: renders and counts; its chat template is replaced by ``args.chat_template`` when given.
        least: prompts needed for one step.
        seed: of the shuffle of which ``max_train_prompts`` takes the first.
        template_kwargs: the recipe's ``chat_template_kwargs``.
        fetched: as in ``read_rows``.

    Raises:
        ConfigError: the source cannot be read, a column is missing, the template fails, or too few prompts are left.
    """
    use_template(args.chat_template, tokenizer)
    setting = _Setting(args, Renderer(tokenizer, template_kwargs or {}), seed, fetched)
    prompts: Prompts = prepared_once("train", functools.partial(_train, setting, least))
    return prompts


def load_eval_prompts(
    args: ScriptArguments,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    template_kwargs: dict[str, Any] | None = None,
    fetched: Fetched | None = None,
) -> Prompts:
    """Read, draw, render and filter the prompts that training is evaluated on; arguments as of ``load_prompts``.

    They are ``eval_dataset_name``, else what the mixture holds out, else ``dataset_test_split`` of ``dataset_name``:
    of these the share ``eval_subsample``, at least one and at most ``eval_max_prompts``, drawn by ``seed``.

    Raises:
        ConfigError: as ``load_prompts``; or there is nothing to evaluate on.
    """
    use_template(args.chat_template, tokenizer)
    setting = _Setting(args, Renderer(tokenizer, template_kwargs or {}), seed, fetched)
    prompts: Prompts = prepared_once("eval", functools.partial(_evaluate, setting))
    return prompts


def first_problems(args: ScriptArguments, most: int, fetched: Fetched | None = None) -> list[dict[str, Any]]:
    """Return the first problems a recipe trains on, before any shuffle: ``prompt``, ``answer``, other scalar columns.

    Raises:
        ConfigError: the dataset cannot be read, or lacks a column.
    """
    if args.dataset_mixture:
        joined, _ = mixed(args, Counts(), fetched)
        return joined.select(range(min(most, len(joined)))).to_list()
    source = train_source(args)
    found = problems(rows_of(source, args, fetched), source, args, Counts(), batch_rows=most)
    return collected(found, most).to_list()


def _train(setting: _Setting, least: int) -> Prompts:
    args, counts, limit = setting.args, Counts(), setting.args.max_train_prompts
    dataset = _finished(_train_problems(setting, counts), setting, counts, limit)
    if len(dataset) == limit:
        order = "stream" if args.dataset_streaming else "shuffle by the seed"
        counts.notes.append(f"the first {limit} of the {order} (max_train_prompts)")
    if len(dataset) < least:
        raise _too_few(len(dataset), least, limit, counts)
    return Prompts(dataset, counts, setting.renderer.text(dataset[0]["prompt"]))


def _too_few(found: int, least: int, limit: int | None, counts: Counts) -> ConfigError:
    key = "max_train_prompts" if found == limit else "max_prompt_length" if counts.too_long else None
    what = f"{found} of {counts.read} prompts are left, one step needs {least}"
    long = [f"{counts.too_long} longer than max_prompt_length"] if counts.too_long else []
    fix = f"raise {key} or lower prompts_per_step" if key else "lower prompts_per_step, or name a larger dataset"
    return config_error(key or "prompts_per_step", "; ".join([what, *long, *counts.lines()]), fix)


def _train_problems(setting: _Setting, counts: Counts) -> Problems:
    args = setting.args
    if args.dataset_mixture:
        kept, _ = mixed(args, counts, setting.fetched)
        return Problems(kept.features, kept.iter(BATCH_ROWS))
    source = train_source(args)
    rows = rows_of(source, args, setting.fetched)
    if args.max_train_prompts and not args.dataset_streaming:
        rows = rows.shuffle(seed=setting.seed, keep_in_memory=True)
    size = min(BATCH_ROWS, args.max_train_prompts or BATCH_ROWS)
    found = problems(rows, source, args, counts, size)
    return Problems(found.features, distinct(found.batches, counts))


def _evaluate(setting: _Setting) -> Prompts:
    args, counts = setting.args, Counts()
    rows, source = _eval_rows(setting, counts)
    wanted = min(args.eval_max_prompts, max(1, round(args.eval_subsample * len(rows))))
    shuffled = rows.shuffle(seed=setting.seed, keep_in_memory=True)
    if source is None:
        found = Problems(rows.features, shuffled.iter(BATCH_ROWS))
    else:
        found = problems(shuffled, source, args, counts, min(BATCH_ROWS, wanted))
        found = Problems(found.features, distinct(found.batches, counts))
    dataset = _finished(found, setting, counts, wanted)
    if len(dataset) == 0:
        raise config_error(
            "eval_strategy", "; ".join(["no evaluation prompt is left", *counts.lines()]), "name another set"
        )
    title = f"evaluating on {len(dataset)} of {len(rows)} rows (eval_subsample {args.eval_subsample:g})"
    return Prompts(dataset, counts, setting.renderer.text(dataset[0]["prompt"]), title)


def _eval_rows(setting: _Setting, counts: Counts) -> tuple[Dataset, DataSource | None]:
    """Return the rows to draw from, and what they are; None for the problems that a mixture held out."""
    args = setting.args
    if args.dataset_mixture and not args.eval_dataset_name:
        _, held = mixed(args, counts, setting.fetched)
        if held is None:
            raise config_error("dataset_mixture", "nothing is held out to evaluate on", "add test_split_size to it")
        return held, None
    source = eval_source(args)
    rows = rows_of(source, args, setting.fetched)
    if isinstance(rows, IterableDataset):
        # No more of a stream than eval_max_prompts can need.
        most = math.ceil(args.eval_max_prompts / args.eval_subsample)
        with reading(source.id):
            rows = Dataset.from_list(list(rows.take(most)), features=rows.features)
    return rows, source


def _finished(found: Problems, setting: _Setting, counts: Counts, limit: int | None) -> Dataset:
    """Return the problems that fit, at most ``limit`` of them."""
    fitting = setting.renderer.fitting(found.batches, setting.args.max_prompt_length, counts)
    return collected(Problems(found.features, fitting), limit)
