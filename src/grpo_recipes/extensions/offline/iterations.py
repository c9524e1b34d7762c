"""Metrics and checkpoints by iteration, where an offline trainer is expected to leave them: beside the run directory.

In a sweep, where run directories lie side by side, they are inside each.

    metrics/train_iter_000.json    means over the optimizer steps of the iteration
    metrics/eval_iter_000.json     the evaluation after it
    checkpoints/iter_000           a link to the complete checkpoint of its last step

They are made from ``metrics.jsonl``, ``eval.jsonl`` and ``checkpoints/`` of the run, so a continued run makes the same.
"""

import math
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from grpo_recipes.extensions.offline.policy_gradient import loss_with_term
from grpo_recipes.process.reports import run_folder
from grpo_recipes.runs.checkpoints import complete_checkpoints, step_of
from grpo_recipes.runs.rundir import CELLS, read_rows, write_json
from grpo_recipes.trainers.callbacks import Compute, LossCallback

_OF_EVALUATION = re.compile(r"(pass|mean|best|majority)@\d+|reward|prompts|.*_interval")


class Iterations(LossCallback):
    """Write what is complete before the next step, so a stop leaves nothing half written."""

    @cached_property
    def _run(self) -> Path:
        return run_folder()  # the launch names it, and `grpo check --deep` makes callbacks without one

    @property
    def _root(self) -> Path:
        return self._run if self._run.parent.name == CELLS else self._run.parent

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write what an earlier attempt was stopped before."""
        self._flush(args, state)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the iteration that the last step has ended."""
        self._flush(args, state)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write the last iteration."""
        self._flush(args, state)

    def loss(self, trainer: Any, compute: Compute, model: Any, rows: dict[str, Any]) -> torch.Tensor:
        """Return the loss, and note its policy-gradient term."""
        return loss_with_term(trainer, compute, model, rows)

    def _flush(self, args: Any, state: TrainerState) -> None:
        steps = steps_of_iteration(args)
        if not state.is_world_process_zero or state.global_step % steps:
            return
        metrics = self._root / "metrics"
        metrics.mkdir(parents=True, exist_ok=True)
        rows = {int(row["step"]): row for row in read_rows(self._run / "metrics.jsonl")}
        evaluations = {int(row["step"]): row for row in read_rows(self._run / "eval.jsonl")}
        for iteration in range(state.global_step // steps):
            last = (iteration + 1) * steps
            trained = metrics / f"train_iter_{iteration:03}.json"
            if not trained.exists() or last == state.global_step:
                own = [rows[step] for step in range(last - steps + 1, last + 1) if step in rows]
                write_json(trained, train_metrics(iteration, own, args))
            evaluated = metrics / f"eval_iter_{iteration:03}.json"
            if last in evaluations and (not evaluated.exists() or last == state.global_step):
                write_json(evaluated, {"iteration": iteration, **eval_metrics(evaluations[last])})
        self._link(steps)

    def _link(self, steps: int) -> None:
        """Let ``iter_NNN`` be the checkpoints that are complete, and no others."""
        folder = self._root / "checkpoints"
        folder.mkdir(exist_ok=True)
        complete = complete_checkpoints(self._run / "checkpoints")
        found = {step_of(path) // steps - 1: path for path in complete if step_of(path) % steps == 0}
        for link in folder.glob("iter_*"):
            if link.is_symlink() and int(link.name.removeprefix("iter_")) not in found:
                link.unlink()
        for iteration, path in found.items():
            link = folder / f"iter_{iteration:03}"
            target = os.path.relpath(path, folder)
            if not link.is_symlink() or os.readlink(link) != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)


def steps_of_iteration(args: Any) -> int:
    """Return the optimizer steps for which the completions of a generation are used."""
    return max(1, int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps))


def train_metrics(iteration: int, rows: Sequence[dict[str, Any]], args: Any) -> dict[str, Any]:
    """Return means over the steps of an iteration.

    ``loss_total`` is the minimized loss. ``loss_pg`` is its policy-gradient term, computed by itself (see
    ``policy_gradient``), ``loss_kl`` is ``beta`` times ``kl_divergence``, and ``loss_entropy`` is minus
    ``entropy_coef`` times the entropy. The three add up to ``loss_total``.
    """
    kl_terms = [row.get("beta", args.beta) * row.get("kl", 0.0) for row in rows]
    entropy_terms = [row.get("entropy_coef", args.entropy_coef) * row.get("entropy", 0.0) for row in rows]
    metrics = {
        "loss_total": _mean(rows, "loss"),
        "loss_pg": _mean(rows, "loss_pg"),
        "loss_kl": fmean(kl_terms or [0.0]),
        "loss_entropy": 0.0 - fmean(entropy_terms or [0.0]),  # minus 0.0 would be -0.0
        "kl_divergence": _mean(rows, "kl"),
        "entropy_mean": _mean(rows, "entropy"),
        "reward_mean": _mean(rows, "reward"),
        "grad_norm": _mean(rows, "grad_norm"),
        "lr": _mean(rows, "learning_rate"),
    }
    seeds = [seed for row in rows for seed in row.get("problem_seeds", [])]
    return {
        "iteration": iteration,
        "steps": [row["step"] for row in rows],
        **{name: value for name, value in metrics.items() if value is not None},
        **({"problem_seeds": sorted(set(seeds))} if seeds else {}),
    }


def eval_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Return what an evaluation found, under the names of its definitions."""
    plain = {name.removeprefix("eval_"): value for name, value in row.items()}
    return {name: value for name, value in plain.items() if _OF_EVALUATION.fullmatch(name)}


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return fmean(values) if values and all(map(math.isfinite, values)) else None
