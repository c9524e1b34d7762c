"""Evaluation during training: a row of ``eval.jsonl`` each time, and no trace of it in the training."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import broadcast_object_list, set_seed
from transformers.trainer_utils import EvalLoopOutput

from grpo_recipes.runs.rundir import read_rows
from grpo_recipes.runs.stop_request import Stopped
from grpo_recipes.trainers.checkpoints import contents, keep_random_states, refill
from grpo_recipes.trainers.metrics import append_json, json_number, weighted_rewards

_LEFT_OUT = "model_preparation_time"  # transformers', of the first evaluation of a process
_UNNAMED = "other"  # a set that was passed without a metric_key_prefix


class Evaluation:
    """Evaluate as TRL does, with exact means, write ``eval.jsonl``, and leave no trace in the training.

    TRL averages the means of batches, whose last one may be short or filled up with prompts seen before; here every
    completion counts once. A stop request ends an evaluation; the resumed run makes up for it where it was due.
    """

    def __init__(self, trainer: Any, run_dir: Path):
        self._trainer = trainer
        self._file = run_dir / "eval.jsonl"
        self.batch = 0  # batches so far: sampling seeds come from the count
        self.rewards: list[torch.Tensor] | None = None  # of the batches, (B, rewards) each; None outside an evaluation
        self._set: str | None = None
        self._inside = False  # True inside an evaluation, or while one is due: a stop ends that as a whole
        self.made: dict[str | None, dict[str, float]] = {}  # metrics of this step by set that an earlier attempt wrote
        self.owed = False  # whether the run was stopped in an evaluation that was due

    def set_name(self, eval_dataset: Any, prefix: str) -> str | None:
        """Return what ``eval.jsonl`` calls the set, None for the trainer's own one."""
        if eval_dataset is None or eval_dataset is self._trainer.eval_dataset:
            return None
        if isinstance(eval_dataset, str):  # one of the trainer's own sets
            return eval_dataset
        return _UNNAMED if prefix == "eval" else prefix.removeprefix("eval_")

    def read_made(self) -> None:
        """Read the metrics of the trainer's own sets, by name, that an earlier attempt wrote for this step."""
        trainer = self._trainer
        own = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None}
        made = {
            row.get("set"): {  # json_number wrote numbers that JSON does not have as text
                name: float(value) if isinstance(value, str) else value
                for name, value in row.items()
                if name.startswith("eval_")
            }
            for row in (read_rows(self._file) if trainer.accelerator.is_main_process else [])
            if row["step"] == trainer.state.global_step and row.get("set") in own
        }
        (self.made,) = broadcast_object_list([made])  # by rank 0: ranks on other nodes may see a file later

    @contextmanager
    def due(self) -> Iterator[None]:
        """Owe the evaluation that the training makes inside, where a stop request ends it."""
        self._inside = True
        try:
            yield
        except Stopped:
            self.owed = True
        finally:
            self._inside, self.made = False, {}

    @contextmanager
    def running(self, name: str | None = None) -> Iterator[None]:
        """Evaluate a set inside; a stop request ends that alone, unless the evaluation is part of another."""
        try:
            with self.undisturbed(name), self._trainer.rows.reported("evaluate"):
                yield
        except Stopped:
            if self._inside:
                raise

    @contextmanager
    def undisturbed(self, name: str | None = None) -> Iterator[None]:
        """Put back what training continues from: random states, TRL's table of completions, the clock of the row.

        The model's mode is put back too: by it TRL knows whether the next log is of the training. So is what is due
        after the step, where a callback evaluates: transformers takes any evaluation and any log for the one due.
        """
        trainer = self._trainer
        logs, log_completions = contents(trainer._logs), trainer.log_completions
        outer, training = (self._set, self._inside), trainer.model.training
        due = trainer.control.should_log, trainer.control.should_evaluate
        trainer.log_completions = False  # the parquet file of this step is the training's
        self._set, self._inside = name, True
        put_back_random_states = keep_random_states()
        try:
            with trainer.rows.evaluating():
                # A seed for each step, rank and set: an evaluation made up for later draws what it would have drawn.
                place = f"{trainer.args.seed}/eval/{trainer.state.global_step}/{trainer.args.process_index}"
                text = place if name is None else f"{place}/{name}"
                set_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
                yield
        finally:
            put_back_random_states()
            refill(trainer._logs, logs)
            trainer.log_completions = log_completions
            self._set, self._inside = outer
            self.rewards = None
            trainer.model.train(training)
            if not self._inside:
                trainer.control.should_log, trainer.control.should_evaluate = due
            trainer._metrics["eval"].clear()

    def loop(self, run: Callable[[], EvalLoopOutput], dataloader: Any, description: str, prefix: str) -> EvalLoopOutput:
        """Run transformers' loop, and add TRL's metrics, with the rewards' means over every completion once."""
        began, trainer = time.perf_counter(), self._trainer
        self.batch, self.rewards = 0, []
        trainer._metrics["eval"].clear()
        output = run()
        rewards = torch.cat(self.rewards or [torch.empty(0, len(trainer.reward_func_names))])
        repeats = trainer.num_generations_eval
        prompts = min(_prompts_in(dataloader, repeats), len(rewards) // repeats)
        known = {name: [one for one in ones if not math.isnan(one)] for name, ones in trainer._metrics["eval"].items()}
        means = {name: fmean(values) if values else None for name, values in known.items()}  # of batches, as TRL's
        # What fills up the last batch comes after all completions that count.
        means |= self._reward_means(rewards[: prompts * repeats])
        output.metrics.update({f"{prefix}_{name}": mean for name, mean in means.items()})
        trainer._metrics["eval"].clear()  # else TRL logs them again, under its own names
        self.rewards = None
        if description == "Evaluation" and trainer.accelerator.is_main_process:
            start = "eval_" if self._set is None else f"eval_{self._set}_"
            measured = {name.removeprefix(f"{prefix}_"): json_number(value) for name, value in output.metrics.items()}
            row = {
                "step": trainer.state.global_step,
                **({} if self._set is None else {"set": self._set}),
                **{f"{start}{name}": value for name, value in measured.items() if name != _LEFT_OUT},
                "prompts": prompts,
                "seconds": time.perf_counter() - began,
            }
            append_json(self._file, row)
        return output

    def _reward_means(self, rewards_BR: torch.Tensor) -> dict[str, float]:
        """Return TRL's reward metrics; NaN is unscored."""
        names, weighted_B = self._trainer.reward_func_names, weighted_rewards(rewards_BR, self._trainer.reward_weights)
        means = {"reward": weighted_B.nanmean(), "reward_std": _nanstd(weighted_B)}
        for name, column_B in zip(names, rewards_BR.T, strict=True):
            means |= {f"rewards/{name}/mean": column_B.nanmean(), f"rewards/{name}/std": _nanstd(column_B)}
        return {name: value.item() for name, value in means.items()}


class CountedStream(torch.utils.data.IterableDataset[Any]):
    """A stream that counts its rows while it is read.

    accelerate fills up the last batch of a stream that several processes share, so what counts must be known. It would
    deal out a stream of several files by file, and the processes would wait for each other's batches.
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
    dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
    return dataset.rows // repeats if isinstance(dataset, CountedStream) else len(dataset)


def _nanstd(values: torch.Tensor) -> torch.Tensor:
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros(())
