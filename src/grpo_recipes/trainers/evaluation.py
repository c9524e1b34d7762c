"""Evaluation during training: a row of ``eval.jsonl`` each time, and no trace of it in the training."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import datasets
import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import broadcast_object_list, set_seed
from transformers.trainer_utils import EvalLoopOutput, PredictionOutput

from grpo_recipes.runs.rundir import read_rows
from grpo_recipes.runs.stop_request import Stopped
from grpo_recipes.trainers.metrics import json_number
from grpo_recipes.trainers.random_states import random_states, set_random_states

_LEFT_OUT = "model_preparation_time"  # transformers', of the first evaluation of a process
_UNNAMED = "other"  # a set that was passed without a metric_key_prefix


class Evaluation:
    """Mixin before ``MetricsRows``: evaluate as TRL does, with exact means, and write ``eval.jsonl``.

    TRL averages the means of batches, whose last one may be short or filled up with prompts seen before. Here every
    completion of every prompt counts once, whatever set is evaluated. A stop request ends an evaluation; the resumed
    run makes up for it where it was due.
    """

    def __init__(self, *, run_dir: Path, **kwargs: Any):
        self._eval_file = run_dir / "eval.jsonl"
        self._eval_batch = 0
        self._eval_rewards: list[torch.Tensor] | None = None  # None outside an evaluation
        self._eval_set: str | None = None
        self._eval_inside = False  # True inside an evaluation, or while one is due: a stop ends that as a whole
        self._eval_made: dict[str | None, dict[str, float]] = {}  # metrics that an earlier attempt has written
        self._evaluation_owed = False
        super().__init__(run_dir=run_dir, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluate any set, or each set of a dict, as transformers does, and add a row for each to ``eval.jsonl``.

        All metrics begin with ``metric_key_prefix`` and, in a dict, the key of the set; TRL calls them ``eval_reward``
        and so on whatever the set. In ``eval.jsonl`` the name ``eval_reward`` always means the trainer's own set. A row
        of another set has ``set``, its name, and ``eval_<set>_reward``, so that no reader takes it for the run's. The
        name is the key in the dict, or the prefix (``other`` where that is ``eval``).

        Returns:
            The metrics, or nothing where a stop request came before the end.
        """
        name = self._set_name(eval_dataset, metric_key_prefix)
        if name in self._eval_made:
            return dict(self._eval_made[name])
        try:
            self._stop_if_agreed()  # save first: the time left may be seconds
            with self._undisturbed(name), self._told("evaluate"):
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        except Stopped:
            if self._eval_inside:
                raise
            return {}

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Predict as transformers does, with the metrics of ``evaluate``; write no row, leave no trace in the training.

        Returns:
            As transformers', without metrics where a stop request came before the end.
        """
        try:
            with self._undisturbed(), self._told("evaluate"):
                return super().predict(*args, **kwargs)
        except Stopped:
            if self._eval_inside:
                raise
            return PredictionOutput(predictions=None, label_ids=None, metrics={})

    def _set_name(self, eval_dataset: Any, prefix: str) -> str | None:
        """Return what ``eval.jsonl`` calls the set, None for the trainer's own one."""
        if eval_dataset is None or eval_dataset is self.eval_dataset:
            return None
        if isinstance(eval_dataset, str):  # one of the trainer's own sets
            return eval_dataset
        return _UNNAMED if prefix == "eval" else prefix.removeprefix("eval_")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Build TRL's loader; never keep that of a passed set, which persistent workers would take for the next one."""
        if eval_dataset is None or isinstance(eval_dataset, str):
            return super().get_eval_dataloader(eval_dataset)
        kept = getattr(self, "_eval_dataloaders", {})
        self._eval_dataloaders: dict[str, Any] = {}
        try:
            return super().get_eval_dataloader(eval_dataset)
        finally:
            self._eval_dataloaders = kept

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Build the loader of an evaluation: transformers' does not repeat the prompts of a stream."""
        return self.get_eval_dataloader(test_dataset)

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> Any:
        if description == "Evaluation" and isinstance(dataset, datasets.IterableDataset):
            dataset = _CountedStream(dataset)
        return super()._get_dataloader(dataset, description, *args, **kwargs)

    # --- evaluations that the training makes -----------------------------------------------------------------------

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        on_start = skip_scheduler  # transformers says so for eval_on_start alone, a resumed run included
        if on_start and self.state.global_step > 0:
            return {}
        if on_start:
            self._eval_made = self._rows_of_this_step()
        self._eval_inside = True
        try:
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        except Stopped:
            self._evaluation_owed = True
            metrics = {}
        finally:
            self._eval_inside = False
            self._eval_made = {}
        if on_start:
            self._stop_if_agreed()  # before the first step, where nothing is saved
        return metrics

    def _rows_of_this_step(self) -> dict[str | None, dict[str, float]]:
        """Return the metrics of the trainer's own sets, by name, that an earlier attempt wrote for this step.

        Rank 0 reads them for all: ranks on other nodes may see a file later.
        """
        own = self.eval_dataset if isinstance(self.eval_dataset, dict) else {None}
        made = {
            row.get("set"): {name: _number(value) for name, value in row.items() if name.startswith("eval_")}
            for row in (read_rows(self._eval_file) if self.accelerator.is_main_process else [])
            if row["step"] == self.state.global_step and row.get("set") in own
        }
        answer = [made]
        broadcast_object_list(answer, from_process=0)
        return answer[0]

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Determine it as transformers does, which raises where an evaluation was stopped and has no metrics."""
        return bool(metrics) and super()._determine_best_metric(metrics, trial)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Make up for the evaluation that the run was stopped in, its sets without a row, then train as TRL does.

        Raises:
            Stopped: the run was stopped in it again; nothing has happened since the checkpoint that owes it.
        """
        if self._evaluation_owed:
            self._evaluation_owed = False
            self._eval_made = self._rows_of_this_step()
            self._determine_best_metric(self._evaluate(None, None), None)
            self._stop_if_agreed()
        return super().training_step(*args, **kwargs)

    def _unsaved_state(self) -> dict[str, Any]:
        return {**super()._unsaved_state(), "evaluation_owed": self._evaluation_owed}

    def _restore_unsaved(self, state: dict[str, Any]) -> None:
        super()._restore_unsaved(state)
        self._evaluation_owed = state["evaluation_owed"] and self.args.eval_strategy != "no"

    def _describe_restored(self, state: dict[str, Any]) -> list[str]:
        owed = "owed" if self._evaluation_owed else "none owed"
        return [*super()._describe_restored(state), f"evaluation: {owed}"]

    # --- one evaluation --------------------------------------------------------------------------------------------

    @contextmanager
    def _undisturbed(self, name: str | None = None) -> Iterator[None]:
        """Put back what training goes on from: random states, TRL's table of completions, the clock of the row.

        The model's mode is put back too: by it TRL knows whether the next log is of the training. So is what is due
        after the step, where a callback evaluates: transformers takes any evaluation and any log for the one due.
        """
        began, seconds, logs, log_completions = time.perf_counter(), self._seconds, self._logs, self.log_completions
        outer, training = (self._eval_set, self._eval_inside), self.model.training
        due = self.control.should_log, self.control.should_evaluate
        self._seconds = dict(seconds)
        self._logs = _empty(logs)
        self.log_completions = False  # the parquet file of this step is the training's
        self._eval_set, self._eval_inside = name, True
        states = random_states()
        try:
            set_seed(self._evaluation_seed())
            yield
        finally:
            set_random_states(states)
            if self._row_began is not None:  # not before the first step: its row does not cover that time
                seconds["evaluate"] += time.perf_counter() - began
            self._seconds, self._logs, self.log_completions = seconds, logs, log_completions
            self._eval_set, self._eval_inside = outer
            self._eval_rewards = None
            self.model.train(training)
            if not self._eval_inside:
                self.control.should_log, self.control.should_evaluate = due
            self._metrics["eval"].clear()

    def _evaluation_seed(self) -> int:
        """Return one for each step, rank and set: an evaluation made up for later draws what it would have drawn."""
        text = f"{self.args.seed}/eval/{self.state.global_step}/{self.args.process_index}"
        text += "" if self._eval_set is None else f"/{self._eval_set}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run transformers' loop, and add TRL's metrics, with the rewards' means over every completion once."""
        began = time.perf_counter()
        self._eval_batch, self._eval_rewards = 0, []
        self._metrics["eval"].clear()
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        width = len(self.reward_func_names)
        rewards = torch.cat(self._eval_rewards or [torch.empty(0, width)])
        repeats = self.num_generations_eval
        prompts = min(_prompts_in(dataloader, repeats), len(rewards) // repeats)
        means = {name: _mean(values) for name, values in self._metrics["eval"].items()}
        # What fills up the last batch comes after all completions that count.
        means |= self._reward_means(rewards[: prompts * repeats])
        output.metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        self._metrics["eval"].clear()  # else TRL logs them again, under its own names
        self._eval_rewards = None
        if description == "Evaluation" and self.accelerator.is_main_process:
            measured = {name.removeprefix(f"{metric_key_prefix}_"): value for name, value in output.metrics.items()}
            self._write_eval_row(measured, prompts, time.perf_counter() - began)
        return output

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Count the batch, since sampling seeds come from the count, and evaluate it as TRL does."""
        self._eval_batch += 1
        return super().prediction_step(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._eval_rewards is not None:  # a batch for the sampler is too large for one forward pass
            kwargs["batch_size"] = self.args.per_device_train_batch_size
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._eval_rewards is not None:
            self._eval_rewards.append(rewards.detach().cpu())
        return rewards

    def _reward_means(self, rewards: torch.Tensor) -> dict[str, float]:
        """Return TRL's reward metrics over ``rewards``, (B, rewards); NaN where there is no verdict."""
        weighted = (rewards * self.reward_weights.cpu()).nansum(dim=1)
        weighted[rewards.isnan().all(dim=1)] = torch.nan
        means = {"reward": weighted.nanmean(), "reward_std": _nanstd(weighted)}
        for name, column in zip(self.reward_func_names, rewards.T, strict=True):
            means |= {f"rewards/{name}/mean": column.nanmean(), f"rewards/{name}/std": _nanstd(column)}
        return {name: value.item() for name, value in means.items()}

    def _write_eval_row(self, measured: dict[str, float], prompts: int, seconds: float) -> None:
        start = "eval_" if self._eval_set is None else f"eval_{self._eval_set}_"
        row = {
            "step": self.state.global_step,
            **({} if self._eval_set is None else {"set": self._eval_set}),
            **{f"{start}{name}": json_number(value) for name, value in measured.items() if name != _LEFT_OUT},
            "prompts": prompts,
            "seconds": seconds,
        }
        with self._eval_file.open("a") as file:
            file.write(json.dumps(row) + "\n")


class _CountedStream(torch.utils.data.IterableDataset[Any]):
    """A stream that counts its rows while it is read.

    accelerate fills up the last batch of a stream that several processes share, so what counts must be known. A stream
    of datasets in several files it would deal out by file, and the processes would wait for each other's batches.
    """

    def __init__(self, stream: Any):
        self.stream, self.rows = stream, 0

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self.stream:
            self.rows += 1
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Pass it on: a shuffled stream has another order in each."""
        self.stream.set_epoch(epoch)


def _prompts_in(dataloader: Any, repeats: int) -> int:
    """Return how many prompts the set has, after the loader of it was read to the end."""
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return dataset.rows // repeats if isinstance(dataset, _CountedStream) else len(dataset)


def _number(value: Any) -> Any:
    """Undo ``json_number``."""
    return float(value) if isinstance(value, str) else value


def _mean(values: list[float]) -> float | None:
    """Return TRL's mean of the batches' values, None where no batch has one."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else None


def _empty(logs: dict[str, Any]) -> dict[str, Any]:
    """Return TRL's containers of logged completions without their content."""
    return {
        name: defaultdict(held.default_factory) if isinstance(held, defaultdict) else type(held)(maxlen=held.maxlen)
        for name, held in logs.items()
    }


def _nanstd(values: torch.Tensor) -> torch.Tensor:
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros(())
