"""Evaluation during training: a row of ``eval.jsonl`` each time, and no trace of it in the training."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, set_seed

from grpo_recipes.launch.rundir import read_rows
from grpo_recipes.trainers.metrics import json_number
from grpo_recipes.trainers.random_states import random_states, set_random_states
from grpo_recipes.trainers.stop import Stopped

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
        try:
            self._stop_if_agreed()  # save first: the time left may be seconds
            with self._undisturbed(), self._told("evaluate"):
                return super().evaluate(*args, **kwargs)
        except Stopped:
            self._metrics["eval"].clear()
            self._evaluation_owed = True
            return {}

    def _by_main(self, answer: bool) -> bool:
        """Rank 0's answer: ranks on other nodes may see a file later."""
        answers = [answer]
        broadcast_object_list(answers, from_process=0)
        return answers[0]

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> dict[str, float]:
        on_start = skip_scheduler  # transformers says so for eval_on_start alone, a resumed run included
        if on_start and self._evaluated_on_start():
            return {}
        metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
        if on_start:
            self._stop_if_agreed()  # before the first step, where nothing is saved
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """transformers', which raises where an evaluation was stopped and has no metrics."""
        return bool(metrics) and super()._determine_best_metric(metrics, trial)

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
        states = random_states()
        try:
            set_seed(self._evaluation_seed())
            yield
        finally:
            set_random_states(states)
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
            Stopped: it was stopped in that one again; nothing has happened since the checkpoint that owes it.
        """
        if self._evaluation_owed:
            self._evaluation_owed = False
            self._determine_best_metric(self.evaluate(), None)
            self._stop_if_agreed()
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

    def _unsaved_state(self) -> dict[str, Any]:
        return {**super()._unsaved_state(), "evaluation_owed": self._evaluation_owed}

    def _restore_unsaved(self, state: dict[str, Any]) -> None:
        super()._restore_unsaved(state)
        # An attempt since the checkpoint may have made up for it.
        made = any(row["step"] == self.state.global_step for row in read_rows(self._eval_file))
        owed = state["evaluation_owed"] and self.args.eval_strategy != "no"
        self._evaluation_owed = self._by_main(owed and not made)

    def _describe_restored(self, state: dict[str, Any]) -> list[str]:
        owed = "owed" if self._evaluation_owed else "none owed"
        return [*super()._describe_restored(state), f"evaluation: {owed}"]


def _empty(logs: dict[str, Any]) -> dict[str, Any]:
    """TRL's containers of logged completions, without what they hold."""
    return {
        name: defaultdict(held.default_factory) if isinstance(held, defaultdict) else type(held)(maxlen=held.maxlen)
        for name, held in logs.items()
    }


def _nanstd(values: torch.Tensor) -> torch.Tensor:
    known = values[~values.isnan()]
    return known.std() if len(known) > 1 else torch.zeros(())
