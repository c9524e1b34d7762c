"""Keep the checkpoint with the best ``eval_reward``, stop a training early, and load the best weights at its end.

transformers compares the evaluations, and its ``EarlyStoppingCallback`` counts those without improvement. Here, only
evaluations count that are due: callbacks may evaluate other sets. A new best is saved at once, so that its weights
exist. ``best.json`` names it, and a resumed run continues with the same best reward and the same count.

    trainer.best = BestModel(trainer, run_dir)  # in _determine_best_metric: trainer.best.update(metrics, compare)
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.runs.checkpoints import find_damage
from grpo_recipes.runs.rundir import BEST, write_json
from grpo_recipes.trainers.protocol import InnerTrainer


class TrainingEnded(Exception):
    """A callback ended the training in an evaluation that was repeated after a resume, before the next step."""


class EarlyStopping(EarlyStoppingCallback):
    """End the training after ``early_stopping_patience`` evaluations without a new best reward."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Continue with the count in the checkpoint's ``trainer_state.json``. If it has run out, take no step."""
        self.early_stopping_patience = args.early_stopping_patience
        states: Any = state.stateful_callbacks
        saved = states.get(type(self).__name__, self.state())
        self.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
        control.should_training_stop |= self.has_run_out

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        """Do nothing: ``BestModel.update`` calls ``count``."""

    def count(self, trainer: InnerTrainer, metrics: dict[str, float]) -> None:
        """Count an evaluation, before its metrics can become the best. End the training if the patience runs out."""
        super().on_evaluate(trainer.args, trainer.state, trainer.control, metrics)

    @property
    def has_run_out(self) -> bool:
        """Whether the patience has run out, which ends the training."""
        return bool(self.early_stopping_patience_counter >= self.early_stopping_patience)


class BestModel(TrainerCallback):
    """The best evaluation of a training, for ``load_best_model_at_end`` and ``early_stopping_patience``."""

    def __init__(self, trainer: InnerTrainer, run_dir: Path):
        """Register early stopping and this callback with the trainer, as far as the keys need them."""
        args = trainer.args
        self._trainer, self._file = trainer, run_dir / BEST
        self._keeps, self._patience = args.load_best_model_at_end, args.early_stopping_patience
        if self._patience is not None:
            trainer.add_callback(EarlyStopping(self._patience))
        if self._keeps or self._patience is not None:
            trainer.add_callback(self)

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the best checkpoint. None without ``load_best_model_at_end``, or before an evaluation ended."""
        step = self._trainer.state.best_global_step
        return Path(self._trainer.args.output_dir) / f"checkpoint-{step}" if self._keeps and step else None

    @property
    def _early_stopping(self) -> EarlyStopping | None:
        """The trainer's EarlyStopping callback, or None. transformers may have replaced our object by a copy."""
        callbacks = self._trainer.callback_handler.callbacks
        return next((callback for callback in callbacks if isinstance(callback, EarlyStopping)), None)

    @property
    def has_stopped_early(self) -> bool:
        """Whether the patience has run out, False without one. A resume with a larger patience continues."""
        return self._early_stopping is not None and self._early_stopping.has_run_out

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write ``best.json`` again: an earlier attempt may have come further than its last checkpoint."""
        self._write()

    def update(self, metrics: dict[str, float], compare: Callable[[], bool]) -> bool:
        """Count an evaluation that was due, write ``best.json``, and return whether the evaluation is the best so far.

        With ``load_best_model_at_end``, request a checkpoint of a new best. ``compare`` is transformers' comparison.
        Print a line if the patience has run out. Without ``metrics``, because a stop request ended the evaluation,
        return False and change nothing.
        """
        if not metrics:
            return False
        trainer = self._trainer
        if self._early_stopping:
            self._early_stopping.count(trainer, metrics)
        if is_best := compare():
            trainer.state.best_global_step = trainer.state.global_step  # not set by transformers if nothing is saved
            trainer.control.should_save |= self._keeps
        if self._keeps or self._early_stopping:
            self._write()
        if self.has_stopped_early and trainer.accelerator.is_main_process:
            best = f"{trainer.state.best_metric:.4g} of step {trainer.state.best_global_step}"
            count = f"{self._patience} evaluations" if self._patience != 1 else "1 evaluation"
            print(f"grpo: stopped early: no eval_reward above {best} in {count}", flush=True)
        return is_best

    def _write(self) -> None:
        """Write ``best.json`` on rank 0, or remove it if there is no best evaluation."""
        state = self._trainer.state
        if not state.is_world_process_zero:
            return
        if state.best_global_step is None:
            self._file.unlink(missing_ok=True)
            return
        facts: dict[str, Any] = {"best_step": state.best_global_step, "best_eval_reward": state.best_metric}
        if self._early_stopping:
            facts["evaluations_since_best"] = self._early_stopping.early_stopping_patience_counter
            facts["stopped_early"] = self._early_stopping.has_run_out
        write_json(self._file, facts)

    def name_checkpoint(self) -> None:
        """Set the best checkpoint in transformers' state to its final path, or to None without one.

        During a save, transformers sets its path in the temporary folder. A moved run directory has another path.
        """
        self._trainer.state.best_model_checkpoint = None if self.checkpoint is None else str(self.checkpoint)

    def finish(self) -> None:
        """Let transformers find the best checkpoint at the end of the training. Print a note if it should but can't."""
        self.name_checkpoint()
        if self._keeps and self.checkpoint is None and self._trainer.accelerator.is_main_process:
            print("grpo: no evaluation was completed, so the model is from the last step", flush=True)

    def load(self, load: Callable[[], None]) -> None:
        """Load the weights of the best checkpoint with ``load``, transformers' method. Called by every rank.

        Do nothing without a best checkpoint, or if it is of the last step. vLLM gets the weights with the next
        transfer. Raise ValueError if the checkpoint is missing or damaged.
        """
        trainer, checkpoint = self._trainer, self.checkpoint
        step, last_step = trainer.state.best_global_step, trainer.state.global_step
        if checkpoint is None or step == last_step:
            return
        is_main = trainer.accelerator.is_main_process
        (damage,) = broadcast_object_list([find_damage(checkpoint, print) if is_main else None])
        if damage:
            fix = "resume with --load_best_model_at_end false to save the model of the last step"
            raise ValueError(f"the best checkpoint, {checkpoint.name}, can't be loaded ({damage}). Fix: {fix}")
        load()
        trainer.note_loaded_step(-1)
        if is_main:
            print(f"grpo: the model is from step {step} of {last_step}, the best evaluation", flush=True)


def repeat_owed_evaluation(trainer: InnerTrainer) -> None:
    """Run the evaluation in which a stop request ended the last attempt. Raise TrainingEnded if it ends the training.

    Raise Stopped after another stop request. Nothing is saved: the run was resumed from this step's checkpoint.
    """
    saves = trainer.control.should_save
    trainer.evaluation.owed = False  # if the run stops in it again, the checkpoint still owes it
    trainer.evaluation.read_earlier_metrics()
    trainer._determine_best_metric(trainer._evaluate(None, None), None)
    trainer.control.should_save = saves
    trainer.preemption.stop_if_agreed()
    if trainer.control.should_training_stop:
        trainer.checkpoints.mark_ended()
        raise TrainingEnded
