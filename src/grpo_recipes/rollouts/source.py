"""What a training takes the place of TRL's sampler with: episodes that it plays, or groups that others sampled."""

from typing import Any, Protocol

import torch

from grpo_recipes.data.prompts import Prompts
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import Rollouts
from grpo_recipes.rollouts.turns import Message
from grpo_recipes.trainer_protocol import Trainer


class Source:
    """Where the completions of a training come from, and the steps of a generation at which it has a say.

    The trainer calls them in this order, on every rank: ``join`` once; then for each generation ``begin``, the source
    itself (TRL's ``rollout_func``), ``completions``, ``mark``, ``token_advantages`` and ``settle``.
    """

    records: list[dict[str, Any]]  # of the last batch to train on, over all ranks, for samples.jsonl; may be empty
    brings_advantages = False  # whether rows of the last batch have advantages of their own, which rewards do not give
    temperatures: torch.Tensor | None = None  # (B,) of the rank's rows where they are not the recipe's; else None

    @classmethod
    def training_prompts(cls, args: ScriptArguments, seed: int, least: int) -> Prompts:
        """Return the rows to train on, at least ``least``; ``seed`` is the run's."""
        raise NotImplementedError

    @classmethod
    def evaluation_prompts(cls, args: ScriptArguments) -> Prompts:
        """Return the rows of evaluations."""
        raise NotImplementedError

    def run_benchmark(self, runner: Any, name: str, rows: list[dict[str, Any]]) -> None:
        """Run a benchmark of this source on every rank, and give its rows to ``runner.keep``."""
        raise NotImplementedError

    def benchmark_settings(self) -> dict[str, Any]:
        """Return what decides the results of its benchmarks, beside the settings of every benchmark."""
        return {}

    def attach(self, trainer: Any) -> None:
        """Take the trainer, whose sampler and weights are in place."""

    def start_generation(self, rows: list[dict[str, Any]], name: str) -> None:
        """Take the rank's rows of the batch that TRL will ask for next; ``name`` is its generation's."""
        raise NotImplementedError

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Return what TRL's ``rollout_func`` returns: lists with an entry for each of the rank's rows.

        ``prompt_ids`` and ``completion_ids`` are token ids, ``logprobs`` those of the completions, or None. The reward
        ``environment`` reads ``episode_reward``, and ``episode_failed``: None, or why the row has no reward. The server
        has the weights of the new step already.
        """
        raise NotImplementedError

    def completions(self) -> list[list[Message]]:
        """Return the rank's completions of the last batch as messages, for rewards and tables."""
        raise NotImplementedError

    def annotate(self, trainer: Any, output: dict[str, Any]) -> None:
        """Add to TRL's ``output`` what else distinguishes its rows, before they are weighed."""

    def token_advantages(self, trainer: Any, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return advantages in the place of TRL's: of the rank's rows, (B,) or (B, T), and of the rows of all ranks.

        The latter are for people: a row's is the mean over its tokens. None leaves TRL's.
        """
        return None

    def finish_generation(self, output: dict[str, Any]) -> None:
        """Change what the loss reads of ``output``, once the weights that it was sampled with are checked."""


class SamplingTrainer(Trainer, Protocol):
    """``Trainer`` for sources and benchmarks: it adds the sampler and the source of completions."""

    @property
    def rollouts(self) -> Rollouts:
        """The sampler of completions."""

    @property
    def source(self) -> Source | None:
        """The source that replaces TRL's sampler in training, if the recipe has one."""

    def serve_final_weights(self) -> None:
        """Send the weights of the last step to the sampler, and check them. Called by every rank."""
