"""TRL's SFTTrainer with the checkpoints, metrics, checks and stop requests of a run.

trainer = SFTTrainer(model=name, args=make_config(args), train_dataset=rows, run_dir=run, stop=stop)
"""

import dataclasses
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl
from accelerate.utils import is_peft_model
from datasets import Dataset

from grpo_recipes.data.prompts import Prompts
from grpo_recipes.errors import config_error
from grpo_recipes.recipe.configs import RowsConfig
from grpo_recipes.runs.stop_request import Stopped, StoppedOnRequest, StopRequest
from grpo_recipes.trainers.checkpoints import Checkpoints, any_rank_requests_stop
from grpo_recipes.trainers.checks import Checks
from grpo_recipes.trainers.metrics import MetricsRows, to_json_number
from grpo_recipes.trainers.model import reject_shards

# Fields that both of TRL's configs have, with another meaning or another default.
_OTHER_MEANING = {"loss_type", "padding_free", "remove_unused_columns", "shuffle_dataset"}


def make_config(args: RowsConfig) -> trl.SFTConfig:
    """Return TRL's SFT options with the values of a recipe. Rows are not truncated."""
    shared = {field.name for field in dataclasses.fields(trl.SFTConfig) if field.init} - _OTHER_MEANING
    values = {name: getattr(args, name) for name in shared if hasattr(args, name)}
    fixed = {"max_length": None, "logging_nan_inf_filter": False, "include_num_input_tokens_seen": "non_padding"}
    return trl.SFTConfig(**{**values, **fixed})


def make_rows(prompts: Prompts, template_kwargs: dict[str, Any] | None) -> Dataset:
    """Return rows for TRL's SFTTrainer: the prompt as messages, and the solution as the assistant's message."""
    options = {"chat_template_kwargs": template_kwargs} if template_kwargs else {}

    def as_row(row: dict[str, Any]) -> dict[str, Any]:
        """Return a row in TRL's format: prompt, completion, and the variables of the chat template if there are any."""
        return {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": row["answer"]}], **options}

    return prompts.dataset.map(as_row, remove_columns=prompts.dataset.column_names)


class SFTTrainer(trl.SFTTrainer):
    """TRL's ``SFTTrainer`` that saves complete checkpoints, logs to ``run_dir`` and stops after a step on request.

    Rows of more than ``max_length`` tokens are dropped.
    """

    def __init__(
        self, *, args: trl.SFTConfig, run_dir: Path, stop: StopRequest, max_length: int | None = None, **kwargs: Any
    ):
        """Create the trainer; raise ConfigError if no row fits, and ValueError for LoRA with sharded weights."""
        helped: Any = self  # these helpers use only members that both trainers have
        self._stop, self._max_length, self._is_main = stop, max_length, args.process_index == 0
        self.checkpoints, self.checks = Checkpoints(helped), Checks(helped)
        self.best = SimpleNamespace(checkpoint=None)
        super().__init__(args=args, **kwargs)
        self.rows = MetricsRows(helped, run_dir, args.process_index)
        if is_peft_model(self.model):
            reject_shards(self.accelerator)

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Tokenize the rows as TRL does, and drop the rows with more tokens than ``sft_max_length``, if it is set.

        Rank 0 prints how many were dropped. Raise ConfigError if none is left.
        """
        rows, limit = super()._prepare_dataset(dataset, *args, **kwargs), self._max_length
        if limit is None:
            return rows
        fitting = rows.filter(lambda row: len(row["input_ids"]) <= limit)
        if not len(fitting):
            shortest = min(map(len, rows["input_ids"]))
            problem = f"none of {len(rows)} rows fits, the shortest has {shortest} tokens"
            raise config_error("sft_max_length", problem, f"set sft_max_length: {shortest}, or more")
        if self._is_main:
            print(f"grpo: {len(rows) - len(fitting)} of {len(rows)} rows dropped as longer than sft_max_length")
        return fitting

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as in transformers. On a stop request, save the completed step and raise StoppedOnRequest."""
        with suppress(Stopped):
            return super().train(*args, **kwargs)
        raise StoppedOnRequest(f"after step {self.state.global_step}, state saved")

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Run an epoch as in transformers, which would take one more step after the last one."""
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a micro-step as in TRL, and report it to the launcher."""
        self.rows.begin_update()
        return super().training_step(*args, **kwargs)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> float | None:
        """Return the gradient norm as a number, or None without it; raise NotFinite if norm or loss is not finite.

        With fp16, a few steps in a row may have a norm that is not finite.
        """
        return self.checks.check_gradient(super()._get_grad_norm(model, grad_norm=grad_norm))

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Check the weights after a step, log and save. On a stop request, save and raise Stopped on every rank."""
        self.checks.check_weights()
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        is_over = self.control.should_training_stop or self.state.global_step >= self.state.max_steps
        if not is_over and any_rank_requests_stop(self._stop, self.args.device):
            self._save_checkpoint(model, trial)
            raise Stopped

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as in TRL, and add a row to ``metrics.jsonl`` for every optimizer step.

        In the log history, numbers that are not finite become texts.
        """
        super().log(logs, start_time)
        self.state.log_history[-1] = {key: to_json_number(value) for key, value in self.state.log_history[-1].items()}
        if "loss" in logs:
            self.rows.write(logs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint with TRL's method, in a folder that is renamed once it is complete."""
        with self.rows.phase("save"):
            self.checkpoints.save(partial(super()._save_checkpoint, model, trial))

    def _get_output_dir(self, trial: Any) -> str:
        """Return the folder that transformers writes checkpoints to: during a save, the folder for incomplete ones."""
        return str(self.checkpoints.staging or super()._get_output_dir(trial))
