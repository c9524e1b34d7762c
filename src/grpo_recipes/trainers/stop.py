"""A request to stop is a file in the run directory: ranks under accelerate cannot be reached by signals of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.errors import EXIT_STOPPED
from grpo_recipes.launch.rundir import stop_file


class StopOnRequest(TrainerCallback):
    """Looks for the request after every optimizer step; then saves and ends, all ranks at the same step.

    Attributes:
        stopped: whether a request ended the training.
    """

    def __init__(self, run_dir: Path):
        self._file = stop_file(run_dir)
        self.stopped = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """Save and end here if any rank sees the request, unless this was the last step anyway."""
        if self._agreed(args.device) and state.global_step < state.max_steps:
            self.stopped = control.should_save = control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        """transformers calls this where the training is stopped too: that is no end of an epoch to evaluate at."""
        if self.stopped and state.epoch != int(state.epoch or 0):
            control.should_evaluate = False
        return control

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """End an evaluation that a request comes into.

        Raises:
            EvaluationStopped: on every rank, after the same batch.
        """
        if not self.stopped and state.global_step < state.max_steps and self._agreed(args.device):
            self.stopped = True
            raise EvaluationStopped

    def _agreed(self, device: torch.device) -> bool:
        seen = torch.tensor(int(self._file.exists()), device=device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(seen, op=torch.distributed.ReduceOp.MAX)
        return bool(seen)


class EvaluationStopped(Exception):
    """A stop request came during an evaluation; caught by the trainer."""


class StoppedOnRequest(SystemExit):
    """Training ended on request, with its state saved."""

    def __init__(self, step: int):
        super().__init__(EXIT_STOPPED)
        self.step = step

    def __str__(self) -> str:
        return f"stopped on request after step {self.step}, state saved"
