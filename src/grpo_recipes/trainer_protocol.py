"""The members of the trainer that other packages may use.

Weight bridges, sources of completions and benchmarks receive the trainer and rely only on ``Trainer``.
``trainers.grpo.GRPOTrainer`` implements it. Packages may import only packages below them, and ``weights`` needs
``Trainer``, so this module is below ``weights``. Two protocols extend it: ``rollouts.source.SamplingTrainer`` adds the
source of completions. ``trainers.protocol`` adds the state that only the trainer's own helpers may change.

    def attach(self, trainer: Trainer) -> None: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        TrainerCallback,
        TrainerState,
    )

    from grpo_recipes.recipe.configs import GRPOConfig
    from grpo_recipes.runs.stop_request import StopRequest

Mode = Literal["train", "eval"]


class Phases(Protocol):
    """Times the phases of a training step and reports them to the launcher."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count the time of the ``with`` block as a phase: ``sample``, ``score``, ``sync``, ``save``, ``evaluate``."""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Add the time of the ``with`` block to this rank's trace under ``name``."""


class Preemption(Protocol):
    """Stops all ranks at the same place when a stop is requested."""

    stop: StopRequest
    """The stop request of the run."""

    def stop_if_agreed(self) -> None:
        """Raise ``Stopped`` on every rank if any rank has seen a stop request. Called by every rank."""

    def cutting_short(self) -> AbstractContextManager[None]:
        """Let a stop request end the work in the ``with`` block early, if that work polls ``StopRequest.cuts``."""


class UnscoredLimit(Protocol):
    """Limits how many completions may stay without a score."""

    def most_unscored(self, rows: int) -> int:
        """Return how many of ``rows`` completions may be unscored before the run ends."""


class EvaluationScope(Protocol):
    """Keeps evaluations apart from the training."""

    def undisturbed(self, name: str | None = None) -> AbstractContextManager[None]:
        """Restore random states, tables of completions and the clock of the step after the ``with`` block."""


class Trainer(Protocol):
    """TRL's trainer with our additions, for objects outside ``trainers``."""

    args: GRPOConfig
    accelerator: Accelerator
    state: TrainerState
    model: PreTrainedModel
    """The trained model, without the wrappers of DDP, FSDP or DeepSpeed."""
    processing_class: PreTrainedTokenizerBase
    use_vllm: bool
    vllm_generation: Any
    """TRL's ``VLLMGeneration``, or ``weights.colocated.ColocatedGeneration``; missing without ``use_vllm``."""
    generation_config: GenerationConfig
    """How transformers samples; missing with ``use_vllm``."""
    chat_template_kwargs: dict[str, Any]
    eos_token_ids: list[int]
    num_generations: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    scale_rewards: str
    reward_funcs: list[Any]
    reward_weights: torch.Tensor
    """Weight of each reward, (rewards,)."""
    _last_loaded_step: int
    """The optimizer step of the weights in vLLM. -1 before the first transfer."""

    @property
    def rows(self) -> Phases:
        """The phases of the step under way."""

    @property
    def preemption(self) -> Preemption:
        """How the run stops on request."""

    @property
    def scoring(self) -> UnscoredLimit:
        """The limit of unscored completions."""

    @property
    def evaluation(self) -> EvaluationScope:
        """The evaluations of this training."""

    def note_loaded_step(self, step: int) -> None:
        """Record that vLLM now holds the weights of this optimizer step."""

    def add_metric(self, name: str, value: float, mode: Mode = "train") -> None:
        """Add a value to a metric. TRL logs the mean of its values over a step or an evaluation."""

    def add_callback(self, callback: TrainerCallback) -> None:
        """Register a callback, as in transformers."""

    def sampling_with(
        self,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        max_completion_length: int | None = None,
    ) -> AbstractContextManager[None]:
        """Sample with these settings in the ``with`` block. ``None`` keeps the setting of the training."""

    def with_settings(self, **settings: Any) -> AbstractContextManager[None]:
        """Set these attributes of the trainer in the ``with`` block, and restore them afterwards."""

    def _generate_single_turn(
        self, prompt_ids: Sequence[list[int]], images: Any, multimodal_fields: dict[str, Any], num_generations: int
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return the token ids of a completion for each prompt, and their log-probs with vLLM, else None."""

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple[list[list[int]], Any, Any]:
        """Return token ids of the prompts as TRL renders them, then images and multimodal fields."""
