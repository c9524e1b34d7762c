"""Define sources of completions that replace TRL's sampler: episodes played here, or groups sampled elsewhere.

A source subclasses ``Source``. The trainer calls its hooks at fixed points of each generation.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from grpo_recipes.data.prompts import Prompts
from grpo_recipes.recipe.configs import ScriptArguments
from grpo_recipes.rollouts.backends import Rollouts
from grpo_recipes.rollouts.turns import Message
from grpo_recipes.trainer_protocol import Trainer


class PlayedCompletion(NamedTuple):
    """A completion of several turns that was sampled without a trainer."""

    messages: list[Message]
    """The turns of the model and the messages between them, after the prompt."""
    ids: list[int]
    """Tokens of all turns, and of the messages between them."""
    tokens: int
    """Number of ``ids`` that the model sampled."""
    unfinished: bool
    """Whether a limit ended it before its answer."""
    columns: dict[str, Any] | None = None
    """Additional columns for rewards, as JSON. ``Source.restore_columns`` returns the values."""

    @property
    def text(self) -> str:
        """All messages with their roles, for tables."""
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in self.messages)

    def is_cut(self, end_ids: Collection[int]) -> bool:
        """Return whether it is unfinished, or its last turn has no end token."""
        return self.unfinished or not self.ids or self.ids[-1] not in end_ids


class Source:
    """A source of completions for training, with hooks for each stage of a generation.

    The trainer calls the hooks on every rank in this order: ``attach`` once. Then, for each generation,
    ``start_generation``, the source itself (TRL's ``rollout_func``), ``completions``, ``annotate``,
    ``token_advantages`` and ``finish_generation``. A subclass must define the methods that raise NotImplementedError
    here.
    """

    records: list[dict[str, Any]]
    """A record per row of the last training batch, over all ranks, for samples.jsonl; may be empty."""
    brings_advantages = False
    """Whether rows of the last batch come with advantages that are not computed from rewards."""
    turn_tokens: int
    """Maximum tokens of a turn that ``play`` requests."""
    temperatures: torch.Tensor | None = None
    """Temperatures of the rank's rows, (B,), if they differ from the recipe's temperature."""

    @classmethod
    def training_prompts(cls, args: ScriptArguments, seed: int, least: int) -> Prompts:
        """Return the source's training prompts, at least ``least`` (for one step). ``seed`` is the run's seed."""
        raise NotImplementedError

    @classmethod
    def evaluation_prompts(cls, args: ScriptArguments) -> Prompts:
        """Return the evaluation prompts of this source. Called instead of reading the recipe's evaluation dataset."""
        raise NotImplementedError

    def run_benchmark(self, runner: Any, name: str, rows: list[dict[str, Any]]) -> None:
        """Run the benchmark ``name`` of this source. Called by every rank.

        Rank 0 passes the new rows, with the list ``rows``, to ``runner.add_rows``.
        """
        raise NotImplementedError

    def benchmark_settings(self) -> dict[str, Any]:
        """Return the source's own settings that change the results of benchmarks and of `grpo eval`."""
        return {}

    def play(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], trainer: "SamplingTrainer",
        sample: Callable[[list[int], list[list[int]]], list[list[int] | None]],
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> list[PlayedCompletion | None]:  # fmt: skip
        """Play an episode per prompt (token ids), for benchmarks and `grpo eval`. None if a turn is missing.

        If rows of the dataset start the episodes, ``rows`` has the row of each prompt.

        ``sample`` gets the seeds and contexts of the next turns, and returns the token ids of each turn, or None if
        it failed. Only ``processing_class``, ``chat_template_kwargs`` and ``eos_token_ids`` of ``trainer`` are used.
        """
        raise NotImplementedError

    def restore_columns(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of a ``PlayedCompletion`` as rewards get them. The source must be open."""
        return columns

    def close(self) -> None:
        """End the processes of this source."""

    def attach(self, trainer: "SamplingTrainer") -> None:
        """Receive the trainer. Called once, when the trainer has its model and its sampler."""

    def start_generation(self, rows: list[dict[str, Any]], name: str) -> None:
        """Receive the rank's dataset rows of the next generation, and its name, the origin of seeds."""
        raise NotImplementedError

    def __call__(self, prompts: list[Any], trainer: "SamplingTrainer") -> dict[str, Any]:
        """Return the result of TRL's ``rollout_func``: lists with an entry for each of the rank's rows.

        ``prompt_ids`` and ``completion_ids`` are token ids. ``logprobs`` belong to the completions, or are None. The
        reward ``environment`` reads ``episode_reward`` and ``episode_failed``, which is None or the reason why the row
        has no reward. The server already has the weights of the new step.
        """
        raise NotImplementedError

    def completions(self) -> list[list[Message]]:
        """Return the rank's completions of the last batch as messages, for rewards and tables."""
        raise NotImplementedError

    def annotate(self, trainer: "SamplingTrainer", output: dict[str, Any]) -> None:
        """Add columns to TRL's ``output`` of a generation, in place, before ``token_advantages`` is called."""

    def token_advantages(
        self, trainer: "SamplingTrainer", output: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return None to keep TRL's advantages, or two tensors that replace them.

        The first one, (B,) or (B, T), is for the rank's rows in the loss. The second one has a number for each row of
        all ranks, the mean over its tokens, and is only shown in tables.
        """
        return None

    def finish_generation(self, output: dict[str, Any]) -> None:
        """Change the loss inputs in ``output`` in place, after the check that the server had the right weights."""


class SamplingTrainer(Trainer, Protocol):
    """``Trainer`` for sources and benchmarks: it adds the sampler and the source of completions."""

    rollouts: Rollouts
    """The sampler of completions."""
    source: Source | None
    """The source that replaces TRL's sampler in training, if the recipe has one."""

    def serve_final_weights(self) -> None:
        """Send the weights of the last step to vLLM. Raise WeightsDiffer if it lacks them. Called by every rank."""
