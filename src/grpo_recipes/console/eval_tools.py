"""Tools in `grpo eval`: sample completions turn by turn from a server, and run their calls as a training does.

with open_tools(recipe, weights, copies) as tools:  # None for a recipe without tools
    arguments = tools.arguments  # their chat_template_kwargs show the tools
    generate(tools.sampler(client, tokenizer), prompts, n, sampling, file)
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from grpo_recipes.console.generate import make_trainer_arguments
from grpo_recipes.errors import config_error
from grpo_recipes.paths import display_path
from grpo_recipes.recipe import Recipe
from grpo_recipes.recipe.sources import rollout_class, sampler_of
from grpo_recipes.recipe.user_code import REWARD_COPIES, copy_source
from grpo_recipes.smoke import SMOKE_SCHEME

if TYPE_CHECKING:
    from grpo_recipes.rollouts.openai import CompletionClient, Failed, Sample, SamplingParameters
    from grpo_recipes.rollouts.source import SamplingTrainer, Source


_BATCHES = 4  # batches of requests that are sampled together, because some episodes end early


class RowPrompt(list[int]):
    """The token ids of a prompt, with its row of the dataset."""

    def __init__(self, ids: Sequence[int], row: dict[str, Any]):
        super().__init__(ids)
        self.row = row


@dataclass
class Tools:
    """The tools of a recipe, in child processes."""

    source: "Source"
    arguments: Any  # the recipe's keys; ``chat_template_kwargs`` has the tools
    weights: str  # the model's folder or hub id, "" for a generated model

    def sampler(self, client: "CompletionClient", tokenizer: Any) -> "ToolSampler":
        """Return a sampler of completions with calls. ``client`` samples their turns."""
        from grpo_recipes.rollouts.renderer import read_stop_tokens

        stops = [tokenizer.eos_token_id, *(read_stop_tokens(self.weights) if self.weights else [])]
        kwargs = self.arguments.chat_template_kwargs
        settings = SimpleNamespace(processing_class=tokenizer, chat_template_kwargs=kwargs, eos_token_ids=stops)
        trainer = cast("SamplingTrainer", settings)  # the attributes that ``Source.play`` uses
        self.source.attach(trainer)
        return ToolSampler(client, self.source, trainer)


def restore_columns(tools: Tools | None, sample: dict[str, Any]) -> dict[str, Any]:
    """Return the columns that a completion of ``completions.jsonl`` adds to its row for rewards."""
    return tools.source.restore_columns(sample["columns"]) if tools and "columns" in sample else {}


@contextmanager
def open_tools(recipe: Recipe, weights: str, copies: Path | None) -> Iterator[Tools | None]:
    """Start the recipe's tools, and end them after the block. Yield None for a recipe without tools.

    ``weights`` is the model's folder or hub id, and ``copies`` a run's folder with copies of the user's code. Raise
    ConfigError if an environment gives the prompts, and if a tool can't be described.
    """
    lookup = recipe.__getitem__
    sampler = sampler_of(lookup)
    if sampler is None:
        yield None
        return
    if not sampler.reads_datasets(lookup):
        problem = "grpo eval samples without the recipe's environment"
        fix = "use a recipe with a dataset_name and without environment"
        raise config_error(display_path(recipe.path), problem, fix)
    with tempfile.TemporaryDirectory() as folder:
        code_copies, arguments = Path(folder) / REWARD_COPIES, make_trainer_arguments(recipe)
        if copies is not None and copies.is_dir():
            shutil.copytree(copies, code_copies, ignore=shutil.ignore_patterns("limits_*", "episodes_*"))
        for spec in sampler.user_code(lookup):
            copy_source(spec, code_copies)
        source: Source = rollout_class(lookup)(arguments, arguments, Path(folder))
        try:
            yield Tools(source, arguments, "" if recipe.model.name.startswith(SMOKE_SCHEME) else weights)
        finally:
            source.close()


@dataclass
class ToolSampler:
    """Sample completions with calls of tools, as ``rollouts.generate`` requests them."""

    client: "CompletionClient"
    source: "Source"
    trainer: "SamplingTrainer"  # only its tokenizer, chat_template_kwargs and end tokens

    def iterate_completed(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: "SamplingParameters", seeds: Sequence[int]
    ) -> Iterator[tuple[int, list["Sample | Failed"]]]:
        """Yield the index of each prompt, a RowPrompt, with its ``n`` completions; ``seeds`` has a seed per prompt.

        The turns of ``_BATCHES`` times the client's requests are sampled together. A completion is a ``Failed`` if one
        of its turns is missing.
        """
        from grpo_recipes.rollouts.turns import derive_seed

        count = max(1, _BATCHES * self.client.batch_size // n)
        for start in range(0, len(prompts), count):
            chunk = range(start, min(start + count, len(prompts)))
            episode_seeds = [derive_seed(seeds[index], number) for index in chunk for number in range(n)]
            chunk_prompts = [cast("RowPrompt", prompts[index]) for index in chunk for _ in range(n)]
            completions = self._play(chunk_prompts, episode_seeds, sampling)
            for position, index in enumerate(chunk):
                yield index, completions[position * n : (position + 1) * n]

    def _play(
        self, prompts: list[RowPrompt], seeds: list[int], sampling: "SamplingParameters"
    ) -> list["Sample | Failed"]:
        """Return a completion for each prompt, a ``Failed`` if a turn is missing."""
        from grpo_recipes.rollouts.openai import Failed, PlayedSample, Sample

        failures: list[Failed] = []
        turn_sampling = replace(sampling, max_tokens=self.source.turn_tokens)

        def sample(turn_seeds: list[int], contexts: list[list[int]]) -> list[list[int] | None]:
            """Return the tokens of the next turns, None for a missing turn."""
            turns = [turn for (turn,) in self.client.sample(contexts, 1, turn_sampling, turn_seeds)]
            failures.extend(turn for turn in turns if isinstance(turn, Failed))
            return [turn.ids if isinstance(turn, Sample) else None for turn in turns]

        completions: list[Sample | Failed] = []
        rows = [prompt.row for prompt in prompts]
        for played in self.source.play(prompts, seeds, self.trainer, sample, rows):
            if played is None:
                completions.append(failures[0])
                continue
            logprobs = [0.0] * len(played.ids)  # not stored
            reason = "length" if played.is_cut(self.trainer.eos_token_ids) else "stop"
            turns = played.messages, played.tokens, played.columns
            completions.append(PlayedSample(played.ids, logprobs, played.text, reason, *turns))
        return completions
