"""Define protocols of the trainer for its own helpers: public members, and state that TRL and transformers keep.

A helper cannot import ``GRPOTrainer``, which imports the helper. It receives an ``InnerTrainer``. Objects outside this
package receive the smaller ``trainer_protocol.Trainer`` or ``rollouts.source.SamplingTrainer``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, TrainerControl
from trl.trainer.utils import RepeatSampler

from grpo_recipes.rollouts.source import SamplingTrainer
from grpo_recipes.runs.trace import Trace
from grpo_recipes.trainer_protocol import EvaluationScope, Phases

# Log-probs and entropies of completions, (B, T), and the load-balancing loss of a mixture of experts.
Computed = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class StepClock(Phases, Protocol):
    """Times and reports the phases of a step (``metrics.MetricsRows``)."""

    trace: Trace

    def reported(self, phase: str) -> AbstractContextManager[None]:
        """Report this phase to the launcher in the block, and the outer phase again afterwards."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Count the time of the block as ``evaluate``."""


class EvaluationState(EvaluationScope, Protocol):
    """The evaluations of a training (``evaluation.Evaluation``)."""

    owed: bool  # whether a stop request ended an evaluation that was due

    def read_earlier_metrics(self) -> None:
        """Read the metrics that an earlier attempt wrote for this step. Called by every rank."""

    @property
    def has_own_sampling(self) -> bool:
        """Whether the recipe lets evaluations sample with another temperature or ``top_p`` than the training."""


class CheckpointState(Protocol):
    """The state that our checkpoints add to transformers' (``checkpoints.Checkpoints``)."""

    def mark_ended(self) -> None:
        """Mark this step's checkpoint: a callback ended the training. Called by every rank."""


class BestState(Protocol):
    """The best evaluation of a training (``best.BestModel``)."""

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the best checkpoint, which is never deleted. None if there is none."""

    @property
    def has_stopped_early(self) -> bool:
        """Whether early stopping has ended the training."""

    def name_checkpoint(self) -> None:
        """Set the path of the best checkpoint in transformers' state."""


class Controller(Protocol):
    """An adaptive coefficient (``algorithms.maxent``)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the coefficient and the state of its updates, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the coefficient from a result of ``state_dict``."""


class InnerTrainer(SamplingTrainer, Protocol):
    """The members of ``GRPOTrainer`` that the helpers in this package use."""

    control: TrainerControl
    callback_handler: Any
    train_dataset: Any
    eval_dataset: Any
    sampler: RepeatSampler | None
    model_wrapped: torch.nn.Module
    ref_model: PreTrainedModel | None
    reward_func_names: list[str]
    rewards_BR: torch.Tensor
    controllers: dict[str, Controller]
    """The adaptive coefficients by name."""
    temperature_B: torch.Tensor | None
    """Temperature of each row of the current computation of log-probs, (B,), if it differs from the recipe's."""
    num_iterations: int
    num_generations_eval: int
    shuffle_dataset: bool | None
    is_in_train: bool
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool
    aux_loss_enabled: bool
    current_gradient_accumulation_steps: int
    _step: int
    _tokenizer: Any  # of the processor, for models that see images
    _tr_loss: torch.Tensor
    _buffered_inputs: list[dict[str, Any]] | None

    @property
    def _metrics(self) -> Mapping[str, dict[str, list[float]]]:
        """TRL's values of metrics since the last log, by mode and name."""

    @property
    def _logs(self) -> Mapping[str, Any]:
        """TRL's table of completions of the last generation, by column."""

    @property
    def checkpoints(self) -> CheckpointState:
        """The state in checkpoints."""

    @property
    def evaluation(self) -> EvaluationState:
        """The evaluations of this training."""

    @property
    def best(self) -> BestState:
        """The best evaluation of this training."""

    @property
    def rows(self) -> StepClock:
        """The clock of the step under way."""

    def loss_and_policy_gradient_term(
        self, compute: Callable[[Any, dict[str, Any]], torch.Tensor], model: Any, rows: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return TRL's loss of a micro-batch, and the same loss without KL divergence and entropy bonus."""

    def _calculate_rewards(
        self, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], completion_ids_list: list[Any]
    ) -> torch.Tensor:
        """Return the rewards of these completions of all ranks, (B, rewards)."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint of the current step."""

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """Run the evaluation that is due at this step. No metrics if a stop request ended it."""

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Update the best evaluation. Return whether these metrics are the best."""

    @property
    def _get_per_token_logps_and_entropies(self) -> Callable[..., Computed]:
        """TRL's forward pass over completions."""
