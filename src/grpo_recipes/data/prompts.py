"""The prompts a run trains on and those it evaluates on: read, shaped, rendered, filtered, counted."""

import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
    DataSource,
    Fetched,
    Message,
    Problems,
    chosen,
    collected,
    distinct,
    eval_source,
    mixed,
    problems,
    prompt_key,
    reading,
    rows_of,
    train_source,
)
from grpo_recipes.errors import ConfigError, config_error, translate
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.recipe.generated import GeneratedData, generated
from grpo_recipes.recipe.rendering import missing_fix, missing_message, rendering_notes

_MOST_SHOWN = 4000  # characters of a text that is shown


@dataclass(frozen=True)
class Renderer:
    """Render prompts as TRL's trainer does, which sends the server token ids and no messages."""

    tokenizer: PreTrainedTokenizerBase  # with its chat template
    template_kwargs: dict[str, Any]  # the recipe's ``chat_template_kwargs``

    def text(self, prompt: list[Message]) -> str:
        """Return a prompt as text."""
        return str(self._render(prompt, tokenize=False))

    def ids(self, prompts: list[list[Message]]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        rendered = self._render(prompts, tokenize=True, return_dict=True)["input_ids"] if prompts else []
        return [list(ids) for ids in rendered]

    def check(self, prompts: list[list[Message]], seen: set[tuple[str, ...]], system: str | None) -> None:
        """Reject a prompt in which the template leaves out a message; each sequence of roles is rendered once.

        ``seen`` has the sequences of roles that are known to be right. ``system`` is the recipe's system prompt.
        """
        for prompt in prompts:
            roles = tuple(message["role"] for message in prompt)
            if prompt and roles not in seen:
                seen.add(roles)
                if message := missing_message(self.text, prompt):
                    ours = message == {"role": "system", "content": system}
                    what = f"the chat template leaves out the {message['role']} message of a prompt"
                    where = "system_prompt" if ours else "chat_template"
                    raise config_error(where, what, missing_fix(message, not ours))

    def notes(self, prompt: list[Message]) -> list[str]:
        """Return what a user should know of rendered prompts."""
        template = self.tokenizer.get_chat_template(tools=None)
        return rendering_notes(self.text, prompt, template, self.template_kwargs)

    def lengths(self, prompts: list[list[Message]]) -> list[int]:
        """Return the tokens of each prompt."""
        return [len(ids) for ids in self.ids(prompts)]

    def _render(self, prompts: Any, **how: Any) -> Any:
        fix = "write a chat_template that can, or leave out what it cannot (a system prompt, the roles of a chat)"
        what = "the template cannot render a prompt"
        with translate(TemplateError, lambda error: config_error("chat_template", f"{what}: {error}", fix)):
            return self.tokenizer.apply_chat_template(
                prompts, add_generation_prompt=True, **how, **self.template_kwargs
            )


def renderer_of(template: str | None, tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any] | None) -> Renderer:
    """Give the tokenizer the recipe's chat template, which is saved with the model, and return what renders with it."""
    if template is not None:
        tokenizer.chat_template = template
    if tokenizer.chat_template is None:
        raise config_error("chat_template", "the tokenizer has no chat template", "add chat_template to the recipe")
    return Renderer(tokenizer, kwargs or {})


def shortened(text: str) -> str:
    """Return a text to show; of a very long one the beginning, the number of characters left out, and the end."""
    if len(text) <= _MOST_SHOWN:
        return text
    head, tail = _MOST_SHOWN * 3 // 4, _MOST_SHOWN // 4
    left_out = f"… {len(text) - head - tail:,} of {len(text):,} characters are left out …"
    return f"{text[:head]}\n{left_out}\n{text[-tail:]}"


@dataclass(frozen=True)
class Prompts:
    """A prepared dataset."""

    dataset: Dataset  # ``prompt`` (chat messages), ``answer`` (a text), and the source's other scalar columns
    counts: Counts
    example: str  # the first prompt as the model sees it
    title: str = ""  # what the prompts are for, when they are not to train on

    def __str__(self) -> str:
        title = self.title or f"{len(self.dataset)} prompts"
        first = f"{title} ({self.counts.read} read, {self.counts.too_long} dropped as longer than max_prompt_length)"
        return "; ".join([first, *self.counts.lines()])


def load_prompts(
    args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, least: int = 1, seed: int = 0,
    template_kwargs: dict[str, Any] | None = None, fetched: Fetched | None = None,
) -> Prompts:  # fmt: skip
    """Read, render and filter the training prompts; with several ranks, one does and the others wait.

    The tokenizer gets ``args.chat_template`` where the recipe has one. ``least`` is the number of prompts that a step
    needs, ``seed`` that of the shuffle of which ``max_train_prompts`` takes the first. A ConfigError says why the
    source cannot be read, which column is missing, that the template fails, or that too few prompts are left.
    """
    renderer = renderer_of(args.chat_template, tokenizer, template_kwargs)

    def prepare() -> Prompts:
        """Read, render and filter the rows."""
        counts, limit = Counts(), args.max_train_prompts
        if (data := generated(args.dataset_name)) and data.ordered:
            return _repeated_in_order(args, renderer, counts, least)
        if args.dataset_mixture:
            kept, held_out = mixed(args, counts, fetched)
            if held_out is not None:
                counts.notes.append(f"{len(held_out)} rows held out for evaluation (test_split_size)")
            found = Problems(kept.features, kept.iter(BATCH_ROWS))
        else:
            source = train_source(args)
            rows = rows_of(source, args, fetched)
            if limit and not args.dataset_streaming:
                rows = rows.shuffle(seed=seed, keep_in_memory=True)
            found = distinct(problems(rows, source, args, counts, min(BATCH_ROWS, limit or BATCH_ROWS)), counts)
        dataset = _fitting(found, renderer, args, counts, limit)
        if len(dataset) == limit:
            order = "stream" if args.dataset_streaming else "shuffle by the seed"
            counts.notes.append(f"the first {limit} of the {order} (max_train_prompts)")
        if len(dataset) < least:
            key = "max_train_prompts" if len(dataset) == limit else "max_prompt_length" if counts.too_long else None
            what = f"{len(dataset)} of {counts.read} prompts are left, one step needs {least}"
            long = [f"{counts.too_long} longer than max_prompt_length"] if counts.too_long else []
            fix = f"raise {key} or lower prompts_per_step"
            fix = fix if key else "lower prompts_per_step, or name a larger dataset"
            raise config_error(key or "prompts_per_step", "; ".join([what, *long, *counts.lines()]), fix)
        counts.notes += renderer.notes(dataset[0]["prompt"])
        return Prompts(dataset, counts, renderer.text(dataset[0]["prompt"]))

    return _prepared("train", prepare)


def load_eval_prompts(
    args: ScriptArguments, tokenizer: PreTrainedTokenizerBase, seed: int,
    template_kwargs: dict[str, Any] | None = None, fetched: Fetched | None = None,
) -> Prompts:  # fmt: skip
    """Read, draw, render and filter the prompts that training is evaluated on, as ``load_prompts`` does.

    They are ``eval_dataset_name``, else what the mixture holds out, else ``dataset_test_split`` of ``dataset_name``:
    of these the share ``eval_subsample``, at least one and at most ``eval_max_prompts``, drawn by ``seed``. For
    ``ordered`` generated data, they are all its problems to evaluate on, except those that equal a problem to train on.
    """
    renderer = renderer_of(args.chat_template, tokenizer, template_kwargs)

    def prepare() -> Prompts:
        """Read, render and filter the rows."""
        counts = Counts()
        source = eval_source(args) if args.eval_dataset_name or not args.dataset_mixture else None
        if source and (data := generated(source.id)) and data.ordered:
            return _all_held_out(data, source, args, renderer, counts)
        rows = rows_of(source, args, fetched) if source else mixed(args, counts, fetched)[1]
        if rows is None:
            raise config_error("dataset_mixture", "nothing is held out to evaluate on", "add test_split_size to it")
        if source and isinstance(rows, IterableDataset):  # no more of a stream than eval_max_prompts can need
            most = math.ceil(args.eval_max_prompts / args.eval_subsample)
            with reading(source.id):
                rows = Dataset.from_list(list(rows.take(most)), features=rows.features)
        wanted = min(args.eval_max_prompts, max(1, round(args.eval_subsample * len(rows))))
        shuffled = rows.shuffle(seed=seed, keep_in_memory=True)
        found = Problems(rows.features, shuffled.iter(BATCH_ROWS))
        if source is not None:
            found = distinct(problems(shuffled, source, args, counts, min(BATCH_ROWS, wanted)), counts)
        dataset = _fitting(found, renderer, args, counts, wanted)
        if len(dataset) == 0:
            what = "; ".join(["no evaluation prompt is left", *counts.lines()])
            raise config_error("eval_strategy", what, "name another set")
        limits = f"eval_max_prompts {args.eval_max_prompts}"
        limits += f", eval_subsample {args.eval_subsample:g}" if args.eval_subsample < 1 else ""
        title = f"evaluating on {len(dataset)} of {len(rows)} rows ({limits})"
        return Prompts(dataset, counts, renderer.text(dataset[0]["prompt"]), title)

    return _prepared("eval", prepare)


def _repeated_in_order(args: ScriptArguments, renderer: Renderer, counts: Counts, least: int) -> Prompts:
    """Return all problems to train on, again and again, so that an epoch is whole steps of ``least``.

    TRL's sampler drops what is left of an epoch beyond whole steps. With a multiple of both numbers of rows, step i
    of an unshuffled run has the problems at (i * least + j) mod their number, also where the epoch ends.
    """
    source = train_source(args)
    every = _every_problem(source, args, renderer, counts)
    dataset = every.select([row % len(every) for row in range(math.lcm(len(every), least))])
    return Prompts(dataset, counts, renderer.text(every[0]["prompt"]), f"{len(every)} problems of {source.id}")


def _all_held_out(
    data: GeneratedData, source: DataSource, args: ScriptArguments, renderer: Renderer, counts: Counts
) -> Prompts:
    """Return all problems to evaluate on, except those that equal a problem to train on."""
    every = _every_problem(source, args, renderer, counts)
    trained: set[bytes] = set()
    if args.dataset_name == source.id:
        training = _every_problem(train_source(args), args, renderer, Counts())
        trained = set(map(prompt_key, training["prompt"]))
    rows = [row for row, prompt in enumerate(every["prompt"]) if prompt_key(prompt) not in trained]
    if not rows:
        size_key, eval_size_key = data.size_keys
        what = f"every problem of {eval_size_key} of '{source.id}' is also one to train on"
        raise config_error(eval_size_key, what, f"write more of them, or fewer {size_key}")
    if len(rows) < len(every):
        counts.notes.append(f"{len(every) - len(rows)} that equal a problem to train on left out")
    dataset = every.select(rows)
    title = f"evaluating on {len(dataset)} problems of {source.id}"
    return Prompts(dataset, counts, renderer.text(dataset[0]["prompt"]), title)


def _every_problem(source: DataSource, args: ScriptArguments, renderer: Renderer, counts: Counts) -> Dataset:
    """Return all problems of a generated dataset; reject a long one: without it, the others would move up."""
    dataset = _fitting(problems(rows_of(source, args), source, args, counts), renderer, args, counts, None)
    if counts.too_long:
        what = f"{counts.too_long} of {counts.read} problems of '{source.id}' are longer than max_prompt_length"
        raise config_error("max_prompt_length", what, "raise it")
    return dataset


def _prepared(name: str, prepare: Callable[[], Prompts]) -> Prompts:
    """Call ``prepare`` in rank 0 alone; every rank maps the dataset that it left under ``<run>/prompts``.

    The run directory is on a file system that all nodes share. With one process nothing is written. A ConfigError of
    ``prepare`` is raised on every rank; where it fails in another way, the other ranks raise a RuntimeError.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return prepare()
    failure: Exception | None = None
    outcome: dict[str, Any] = {}  # what rank 0 sends the others
    if torch.distributed.get_rank() == 0:
        try:
            prompts, home = prepare(), Path(os.environ["GRPO_RUN_DIR"]) / "prompts"
            home.mkdir(exist_ok=True)
            for old in home.glob(f"{name}-*"):  # of an earlier attempt
                shutil.rmtree(old)
            folder = home / f"{name}-{uuid.uuid4().hex[:8]}"  # that no rank has looked for before
            prompts.dataset.save_to_disk(folder)
            outcome = {"folder": str(folder), "rest": replace(prompts, dataset=None)}
        except Exception as error:  # the other ranks wait: they must hear of it, whatever it is
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
    return replace(outcome["rest"], dataset=load_from_disk(outcome["folder"]))


def first_problems(
    args: ScriptArguments, most: int, fetched: Fetched | None = None
) -> tuple[list[dict[str, Any]], Counts]:
    """Return the first problems a recipe trains on, before any shuffle, as ``problems`` shapes them."""
    counts = Counts()
    if args.dataset_mixture:
        joined, _ = mixed(args, counts, fetched)
        return joined.select(range(min(most, len(joined)))).to_list(), counts
    source = train_source(args)
    shaped = problems(rows_of(source, args, fetched), source, args, counts, batch_rows=most)
    return collected(shaped, most).to_list(), counts


def _fitting(found: Problems, renderer: Renderer, args: ScriptArguments, counts: Counts, limit: int | None) -> Dataset:
    """Return the problems of at most ``max_prompt_length`` tokens, the first ``limit`` of them."""

    seen: set[tuple[str, ...]] = set()

    def batches() -> Iterator[Batch]:
        for batch in found.batches:
            renderer.check(batch["prompt"], seen, args.system_prompt)
            lengths, longest = renderer.lengths(batch["prompt"]), args.max_prompt_length
            kept = [index for index, length in enumerate(lengths) if longest is None or length <= longest]
            counts.too_long += len(lengths) - len(kept)
            counts.longest = max([counts.longest, *(lengths[index] for index in kept)])
            yield chosen(batch, kept)

    return collected(Problems(found.features, batches()), limit)
