"""What TRL and transformers do not save, so that continuing equals not having stopped."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from trl.trainer.utils import RepeatSampler

from grpo_recipes.trainers.stop import StopOnRequest


class EpochRepeatSampler(RepeatSampler):
    """TRL's sampler whose order is a function of the epoch, not of how often it was iterated in this process."""

    def set_epoch(self, epoch: int) -> None:
        """Reach the state that ``epoch`` iterations leave; transformers calls this before each epoch."""
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(epoch):
                torch.randperm(self.num_samples, generator=self.generator)


class ExactResume:
    """Mixin before TRL's trainer: saves and restores the generation window and the running sums.

    TRL keeps sampled completions for ``steps_per_generation * num_iterations`` micro steps and saves neither them nor
    the position in them; transformers does not save its running loss.
    """

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        stock = super()._get_train_sampler(dataset)
        return EpochRepeatSampler(
            stock.data_source, stock.mini_repeat_count, stock.batch_size, stock.repeat_count, stock.shuffle, stock.seed
        )

    def _run_epoch(self, *args: Any, resume_from_checkpoint: str | None, **kwargs: Any) -> None:
        """transformers', which takes one step too many in a run that had taken them all when it is resumed."""
        ended = resume_from_checkpoint is not None and _ended_file(resume_from_checkpoint).exists()
        if ended or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """transformers', and a checkpoint where a callback ends the training: a resumed run must not go on there."""
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        early = self.control.should_training_stop and self.state.global_step < self.state.max_steps
        if not early or self._stopping():
            return
        self._save_checkpoint(model, trial)
        if self.accelerator.is_main_process:
            _ended_file(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}").touch()
        self.accelerator.wait_for_everyone()

    def _stopping(self) -> bool:
        callbacks = self.callback_handler.callbacks
        return any(isinstance(callback, StopOnRequest) and callback.stopped for callback in callbacks)

    def _window_file(self, folder: str | Path) -> Path:
        return Path(folder) / f"grpo_window_{self.args.process_index}.pt"

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        inside = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        state = {
            "step": self._step,
            "buffered": self._buffered_inputs if inside else None,
            "metrics": {mode: dict(metrics) for mode, metrics in self._metrics.items()},
            "step_time": self._current_train_step_time,
            "tr_loss": self._tr_loss,
            "total_loss": self._total_loss_scalar,
            "last_logged": self._globalstep_last_logged,
            "flos": self.current_flos,
        }
        torch.save(state, self._window_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is None:
            return
        path = self._window_file(checkpoint)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the checkpoint was made with another number of processes")
        # Our own file in our own run directory; it holds plain containers and tensors.
        state = torch.load(path, map_location=self.args.device, weights_only=False)
        self._step = state["step"]
        self._buffered_inputs = state["buffered"]
        for mode, metrics in state["metrics"].items():
            self._metrics[mode] = defaultdict(list, metrics)
        self._current_train_step_time = state["step_time"]
        self._tr_loss = state["tr_loss"]
        self._total_loss_scalar = state["total_loss"]
        self._globalstep_last_logged = state["last_logged"]
        self.current_flos = state["flos"]


def _ended_file(checkpoint: str | Path) -> Path:
    return Path(checkpoint) / "ended_by_callback"
