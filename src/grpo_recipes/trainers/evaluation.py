"""Evaluation during training: a row of ``eval.jsonl`` each time, and no trace of it in the training."""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate.utils import broadcast_object_list, set_seed

from grpo_recipes.launch.checkpoints import is_complete
from grpo_recipes.trainers.metrics import json_number
from grpo_recipes.trainers.stop import EvaluationStopped, StoppedOnRequest

# transformers' own clock, which counts a prompt as one sample whatever num_generations_eval is.
_LEFT_OUT = ("eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_model_preparation_time")


class Evaluation:
    """Mixin before ``MetricsRows``: evaluates as TRL does, with exact means, and writes ``eval.jsonl``.

    TRL averages the means of batches, whose last one may be short or filled up with prompts seen before; here every
    completion of every prompt counts once. A stop request ends an evaluation; a resumed run then makes up for it.
    """

    def __init__(self, *, run_dir: Path, **kwargs: Any):
        self._eval_file = run_dir / "eval.jsonl"
        self._eval_began: float | None = None  # None outside an evaluation
        self._eval_batch = 0
        self._eval_rewards: list[torch.Tensor] = []
        self._evaluation_owed = False
        super().__init__(run_dir=run_dir, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """TRL's; returns nothing where a stop request came before its end."""
        if self._stopping() and not self._saved_here():  # save first: the time left may be seconds
            return self._owe_evaluation()
        try:
            with self._undisturbed():
                return super().evaluate(*args, **kwargs)
        except EvaluationStopped:
            self._metrics["eval"].clear()
            self.control.should_save = self.control.should_training_stop = True
            return self._owe_evaluation()

    def _owe_evaluation(self) -> dict[str, float]:
        self._evaluation_owed, self.control.should_evaluate = True, False
        return {}

    def _saved_here(self) -> bool:
        return self._by_main(is_complete(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"))

    def _by_main(self, answer: bool) -> bool:
        """Rank 0's answer: ranks on other nodes may see a file later."""
        answers = [answer]
        broadcast_object_list(answers, from_process=0)
        return answers[0]

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        on_start = skip_scheduler  # transformers says so for eval_on_start alone, a resumed run included
        if on_start and self._evaluated_on_start():
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _evaluated_on_start(self) -> bool:
        has_rows = self._eval_file.exists() and self._eval_file.stat().st_size > 0
        return self._by_main(self.state.global_step > 0 or has_rows)

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Put back what training goes on from: random states, TRL's table of completions, the clock of the row."""
        seconds, logs, log_completions = self._seconds, self._logs, self.log_completions
        self._seconds = dict(seconds)
        self._logs = _empty(logs)
        self.log_completions = False  # the parquet file of this step is the training's
        self._eval_began, self._eval_batch, self._eval_rewards = time.perf_counter(), 0, []
        try:
            with _kept_random_states():
                set_seed(self._evaluation_seed())
                yield
        finally:
            if self._row_began is not None:  # not before the first step: its row does not cover that time
                seconds["evaluate"] += time.perf_counter() - self._eval_began
            self._seconds, self._logs, self.log_completions = seconds, logs, log_completions
            self._eval_began = None

    def _evaluation_seed(self) -> int:
        """One for each step and rank: an evaluation made up for later draws what it would have drawn."""
        text = f"{self.args.seed}/eval/{self.state.global_step}/{self.args.process_index}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, after the evaluation that the run was stopped in.

        Raises:
            StoppedOnRequest: it was stopped in that one again; nothing has happened since the checkpoint that owes it.
        """
        if self._evaluation_owed:
            self._evaluation_owed = False
            self.evaluate()
            if self._evaluation_owed:
                raise StoppedOnRequest(self.state.global_step)
        return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """TRL's, counting batches: sampling seeds come from the count."""
        self._eval_batch += 1
        return super().prediction_step(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        if self._eval_began is not None:  # a batch for the sampler is too large for one forward pass
            kwargs["batch_size"] = self.args.per_device_train_batch_size
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards = super()._calculate_rewards(*args, **kwargs)
        if self._eval_began is not None:
            self._eval_rewards.append(rewards.detach().cpu())
        return rewards

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, then a row for an evaluation."""
        if self._eval_began is not None:
            self._metrics["eval"].update(self._exact_rewards())
        super().log(logs, start_time)
        if self._eval_began is not None and self.accelerator.is_main_process:
            self._write_eval_row(logs)

    def _exact_rewards(self) -> dict[str, list[float]]:
        """TRL's reward metrics over every completion once; what fills up the last batch comes after all of them."""
        count = len(self.eval_dataset) * self.num_generations_eval
        rewards = torch.cat(self._eval_rewards)[:count]
        weighted = (rewards * self.reward_weights.cpu()).nansum(dim=1)
        weighted[rewards.isnan().all(dim=1)] = torch.nan
        means = {"reward": weighted.nanmean(), "reward_std": _nanstd(weighted)}
        for name, column in zip(self.reward_func_names, rewards.T, strict=True):
            means |= {f"rewards/{name}/mean": column.nanmean(), f"rewards/{name}/std": _nanstd(column)}
        return {name: [value.item()] for name, value in means.items()}

    def _write_eval_row(self, logs: dict[str, float]) -> None:
        metrics = {key: value for key, value in logs.items() if key.startswith("eval_") and key not in _LEFT_OUT}
        row = {
            "step": self.state.global_step,
            **{key: json_number(value) for key, value in metrics.items()},
            "prompts": len(self.eval_dataset),
            "seconds": time.perf_counter() - self._eval_began,
        }
        with self._eval_file.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self._evaluation_owed:
            _owed_file(output_dir).touch()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        owed = checkpoint is not None and self.args.eval_strategy != "no"
        self._evaluation_owed = owed and _owed_file(checkpoint).exists()


def _owed_file(checkpoint: str) -> Path:
    return Path(checkpoint) / "evaluation_owed"


@contextmanager
def _kept_random_states() -> Iterator[None]:
    python, of_numpy = random.getstate(), numpy.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        numpy.random.set_state(of_numpy)


def _empty(logs: dict[str, Any]) -> dict[str, Any]:
    """TRL's containers of logged completions, without what they hold."""
    return {
        name: defaultdict(held.default_factory) if isinstance(held, defaultdict) else type(held)(maxlen=held.maxlen)
        for name, held in logs.items()
    }


def _nanstd(values: torch.Tensor) -> torch.Tensor:
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros(())
