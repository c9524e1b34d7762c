"""Run the evaluations of a training: write a row of ``eval.jsonl`` for each, and leave the training unchanged.

evaluation = Evaluation(trainer, run_dir)
with evaluation.running():
    metrics = trl_evaluate()
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.data_loader import IterableDatasetShard
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from transformers.trainer_utils import EvalLoopOutput

from grpo_recipes.evaluate.scores import average_rewards, extract_answer, score_groups
from grpo_recipes.recipe.generated import recorded_columns
from grpo_recipes.runs.rundir import read_rows
from grpo_recipes.runs.stop_request import Stopped
from grpo_recipes.trainers.checkpoints import capture_random_states, copy_containers, replace_contents
from grpo_recipes.trainers.metrics import append_json
from grpo_recipes.trainers.protocol import InnerTrainer


class Evaluation:
    """Evaluate as in TRL, write ``eval.jsonl``, and leave the training unchanged.

    TRL averages the means of batches, and the last batch may repeat prompts. Here every completion counts once. A stop
    request ends an evaluation. If it was due, the resumed run makes it.
    """

    def __init__(self, trainer: InnerTrainer, run_dir: Path):
        self._trainer = trainer
        self._file = run_dir / "eval.jsonl"
        self.batch = 0  # number of the batch; sampling seeds depend on it
        self.rewards: list[torch.Tensor] | None = None  # (B, rewards) for each batch; None outside an evaluation
        self._answers: list[str | None] = []  # answers in the same completions
        self._set: str | None = None
        self.is_running = False  # True in an evaluation and while one is due, because a stop ends it as a whole
        self.earlier_metrics: dict[
            str | None, dict[str, float]
        ] = {}  # by set: written for this step by an earlier attempt
        self.owed = False  # whether the run was stopped in an evaluation that was due

    def get_set_name(self, eval_dataset: Any, prefix: str) -> str | None:
        """Return the name of an evaluation's set in ``eval.jsonl``, or None for the trainer's own set.

        A key of the trainer's sets is its own name. Other sets are named by the prefix without "eval_", or "other" if
        it is the default prefix.
        """
        if eval_dataset is None or eval_dataset is self._trainer.eval_dataset:
            return None
        if isinstance(eval_dataset, str):  # the key of one of the trainer's own sets
            return eval_dataset
        return "other" if prefix == "eval" else prefix.removeprefix("eval_")  # "eval" is the default prefix

    def read_earlier_metrics(self) -> None:
        """Read an earlier attempt's rows of this step from ``eval.jsonl`` into ``earlier_metrics``, by set.

        Only the trainer's own sets count, which are then not evaluated again. Called by every rank.
        """
        trainer = self._trainer
        set_names = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {None}
        rows = read_rows(self._file) if trainer.accelerator.is_main_process else []
        rows = [row for row in rows if row["step"] == trainer.state.global_step and row.get("set") in set_names]
        (rows,) = broadcast_object_list([rows])  # from rank 0, because other nodes may see the file later
        for row in rows:
            # Confidence intervals are only in the file. append_json wrote infinite numbers as text.
            numbers = {
                name: float(value) if isinstance(value, str) else value
                for name, value in row.items()
                if name.startswith("eval_") and not name.endswith("_ci")
            }
            self.earlier_metrics[row.get("set")] = numbers

    def start_batch(self) -> None:
        """Increase the batch number, which is part of the sampling seeds."""
        self.batch += 1

    @contextmanager
    def owed_if_stopped(self) -> Iterator[None]:
        """Mark the block as the evaluation that is due. If a stop request ends it, set ``owed`` and suppress Stopped.

        An evaluation that ends does not clear ``owed``: ``repeat_owed_evaluation`` clears it before it evaluates.
        """
        self.is_running = True
        try:
            yield
        except Stopped:
            self.owed = True
        finally:
            self.is_running, self.earlier_metrics = False, {}

    @contextmanager
    def running(self, name: str | None = None) -> Iterator[None]:
        """Evaluate a set in the block: apply the recipe's evaluation sampling, and restore the training afterwards.

        ``name`` is None for the trainer's own set. Suppress Stopped, so that a stop request ends only this
        evaluation, unless it is part of another.
        """
        args, rollouts = self._trainer.args, self._trainer.rollouts
        sampling = self._trainer.sampling_with(
            temperature=args.eval_temperature,
            top_p=args.eval_top_p,
            max_completion_length=args.eval_max_completion_length,
        )
        seed = args.eval_sampling_seed
        try:
            with (
                self.undisturbed(name),
                sampling,
                nullcontext() if seed is None else rollouts.seeds.using_seed(seed),
                self._trainer.rows.reported("evaluate"),
            ):
                yield
        except Stopped:
            if self.is_running:
                raise

    @contextmanager
    def undisturbed(self, name: str | None = None) -> Iterator[None]:
        """Seed the block for the set ``name``, and restore the training afterwards.

        Restored are the random states, TRL's table of completions, the model's mode, and the times of the row.

        TRL reads from the model's mode whether the next log belongs to the training. transformers takes any evaluation
        of a callback for the evaluation that is due.
        """
        trainer = self._trainer
        logs, is_training = copy_containers(trainer._logs), trainer.model.training
        outer_set, is_nested = self._set, self.is_running
        due_actions = trainer.control.should_log, trainer.control.should_evaluate
        restore_random_states = capture_random_states()
        try:
            self._set, self.is_running = name, True
            with trainer.rows.evaluating():
                # The seed depends on step, rank and set, so a late evaluation draws the same completions.
                seed = trainer.args.seed if trainer.args.eval_sampling_seed is None else trainer.args.eval_sampling_seed
                text = f"{seed}/eval/{trainer.state.global_step}/{trainer.args.process_index}"
                text += "" if name is None else f"/{name}"
                set_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big"))
                yield
        finally:
            self._set, self.is_running = outer_set, is_nested
            restore_random_states()
            replace_contents(trainer._logs, logs)
            self.rewards = None
            trainer.model.train(is_training)
            if not is_nested:
                trainer.control.should_log, trainer.control.should_evaluate = due_actions
            trainer._metrics["eval"].clear()

    @property
    def has_own_sampling(self) -> bool:
        """Whether the recipe lets evaluations sample with another temperature or ``top_p`` than the training."""
        trainer, args = self._trainer, self._trainer.args
        has_temperature = args.eval_temperature not in (None, trainer.temperature)
        return has_temperature or args.eval_top_p not in (None, trainer.top_p)

    def add(self, rewards_BR: torch.Tensor, completions: list[Any]) -> None:
        """Add the rewards of all ranks' batch, and the answers in this rank's completions. Called by every rank."""
        assert self.rewards is not None
        self.rewards.append(rewards_BR.detach().cpu())
        self._answers += gather_object([extract_answer(completion) for completion in completions])

    def loop(self, run: Callable[[], EvalLoopOutput], dataloader: Any, description: str, prefix: str) -> EvalLoopOutput:
        """Run transformers' loop with ``run``, and return its output with metrics of the rewards added.

        On rank 0, a loop with the description "Evaluation" also appends a row to ``eval.jsonl``. The last batch may
        repeat prompts to be full. The means count every completion once.
        """
        began, trainer = time.perf_counter(), self._trainer
        self.batch, self.rewards, self._answers = 0, [], []
        trainer._metrics["eval"].clear()
        output = run()
        rewards = torch.cat(self.rewards or [torch.empty(0, len(trainer.reward_func_names))])
        repeats = trainer.num_generations_eval
        dataset = dataloader.dataset
        dataset = dataset.dataset if isinstance(dataset, IterableDatasetShard) else dataset
        prompts_of_set = dataset.rows // repeats if isinstance(dataset, CountedStream) else len(dataset)
        prompts = min(prompts_of_set, len(rewards) // repeats)
        means: dict[str, float | None] = {}
        for name, values in trainer._metrics["eval"].items():  # one value per batch, as in TRL
            numbers = [value for value in values if not math.isnan(value)]
            means[name] = fmean(numbers) if numbers else None
        # Repeated prompts in the last batch come after all completions that count.
        counted = rewards[: prompts * repeats]
        scored = counted, trainer.reward_func_names, trainer.reward_weights
        means |= average_rewards(*scored)
        at_k = score_groups(*scored, self._answers[: len(counted)], repeats) if prompts else {}
        means |= {name: score for name, (score, _) in at_k.items()}
        all_metrics: dict[str, Any] = output.metrics if output.metrics is not None else {}
        all_metrics.update({f"{prefix}_{name}": mean for name, mean in means.items()})
        trainer._metrics["eval"].clear()  # otherwise TRL logs them again under its own names
        self.rewards = None
        if description == "Evaluation" and trainer.accelerator.is_main_process:
            set_columns, start = ({}, "eval_") if self._set is None else ({"set": self._set}, f"eval_{self._set}_")
            metrics = {f"{start}{name.removeprefix(f'{prefix}_')}": value for name, value in all_metrics.items()}
            metrics.pop(f"{start}model_preparation_time", None)  # transformers' metric of a process's first evaluation
            metrics |= {f"{start}{name}_ci": list(limits) for name, (_, limits) in at_k.items() if limits is not None}
            for column, metric in recorded_columns().items():
                if column in (getattr(dataset, "column_names", None) or ()):
                    metrics[metric] = list(dataset[column])[:prompts]
            row = {"step": trainer.state.global_step, **set_columns, **metrics, "prompts": prompts}
            append_json(self._file, {**row, "seconds": time.perf_counter() - began})
        return output


@dataclass(eq=False)
class CountedStream(torch.utils.data.IterableDataset[Any]):
    """A stream that counts its rows, because accelerate fills up the last batch.

    accelerate would distribute a plain stream of several files by file, and processes would wait for each other.
    """

    stream: Any
    rows: int = 0
    """Number of rows in the last pass."""

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows, and count them in ``rows`` from 0."""
        self.rows = 0
        for row in self.stream:
            self.rows += 1
            yield row

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the stream, which shuffles by it."""
        self.stream.set_epoch(epoch)
