"""Write the metrics and checkpoints of each iteration in the layout of an offline trainer.

They are in the parent of the run directory, or for a trial of a sweep, in the run directory itself:

    metrics/train_iter_000.json    means over the optimizer steps of the iteration
    metrics/eval_iter_000.json     the evaluation after the iteration
    checkpoints/iter_000           link to the complete checkpoint of the last step

Their sources are ``metrics.jsonl``, ``eval.jsonl`` and ``checkpoints/``. A resumed run writes the same files.
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
from transformers import TrainerControl, TrainerState

from grpo_recipes.process.reports import run_folder
from grpo_recipes.runs.checkpoints import list_complete_checkpoints, parse_step
from grpo_recipes.runs.rundir import CELLS, read_rows, write_json
from grpo_recipes.trainers.callbacks import Compute, LossCallback
from grpo_recipes.trainers.protocol import InnerTrainer

_EVAL_METRIC = re.compile(r"(pass|mean|best|majority)@\d+|reward|prompts|.*_interval")


class Iterations(LossCallback):
    """Trainer callback that writes the files of each iteration.

    They are written before the next step, so that a stopped run leaves no partial iteration.
    """

    @cached_property
    def _run(self) -> Path:
        """The run directory."""
        return run_folder()  # read late, because `grpo check --deep` makes callbacks without a run

    @property
    def _root(self) -> Path:
        """The folder of ``metrics/`` and ``checkpoints/``: the run directory of a trial, else its parent."""
        return self._run if self._run.parent.name == CELLS else self._run.parent

    def loss(self, trainer: InnerTrainer, compute: Compute, model: Any, rows: dict[str, Any]) -> torch.Tensor:
        """Return the training loss. Log its policy-gradient term, averaged over ranks, as the metric ``loss_pg``."""
        loss, term = trainer.loss_and_policy_gradient_term(compute, model, rows)
        # TRL averages metrics over the micro-batches of a step and sums their losses.
        scaled = trainer.accelerator.gather(term.detach() * trainer.current_gradient_accumulation_steps)
        trainer.add_metric("loss_pg", scaled.mean().item())
        return loss

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Write missing metrics files of all iterations so far, the last iteration's again, and link the checkpoints.

        Do nothing in the middle of an iteration, and on ranks except 0.
        """
        # Optimizer steps that use the completions of one generation.
        steps = max(1, int(args.steps_per_generation * args.num_iterations // args.gradient_accumulation_steps))
        if not state.is_world_process_zero or state.global_step % steps:
            return
        folder = self._root / "metrics"
        folder.mkdir(parents=True, exist_ok=True)
        rows = {int(row["step"]): row for row in read_rows(self._run / "metrics.jsonl")}
        evaluations = {int(row["step"]): row for row in read_rows(self._run / "eval.jsonl")}
        for iteration in range(state.global_step // steps):
            last_step = (iteration + 1) * steps
            train_file = folder / f"train_iter_{iteration:03}.json"
            if not train_file.exists() or last_step == state.global_step:
                iteration_rows = [rows[step] for step in range(last_step - steps + 1, last_step + 1) if step in rows]
                write_json(train_file, compute_train_metrics(iteration, iteration_rows, args))
            eval_file = folder / f"eval_iter_{iteration:03}.json"
            if last_step in evaluations and (not eval_file.exists() or last_step == state.global_step):
                write_json(eval_file, {"iteration": iteration, **select_eval_metrics(evaluations[last_step])})
        self._link_checkpoints(steps)

    on_train_begin = on_step_begin  # files that an earlier attempt of the run did not write
    on_train_end = on_step_begin  # files of the last iteration

    def _link_checkpoints(self, steps: int) -> None:
        """Create a link ``iter_NNN`` to each complete checkpoint at the end of an iteration; remove all other links."""
        folder = self._root / "checkpoints"
        folder.mkdir(exist_ok=True)
        complete = list_complete_checkpoints(self._run / "checkpoints")
        checkpoints = {parse_step(path) // steps - 1: path for path in complete if parse_step(path) % steps == 0}
        for link in folder.glob("iter_*"):
            if link.is_symlink() and int(link.name.removeprefix("iter_")) not in checkpoints:
                link.unlink()
        for iteration, path in checkpoints.items():
            link = folder / f"iter_{iteration:03}"
            target = os.path.relpath(path, folder)
            if not link.is_symlink() or os.readlink(link) != target:
                link.unlink(missing_ok=True)
                link.symlink_to(target)


def compute_train_metrics(iteration: int, rows: Sequence[dict[str, Any]], args: Any) -> dict[str, Any]:
    """Return the content of ``train_iter_NNN.json``: means over an iteration's rows of ``metrics.jsonl``.

    ``loss_total`` is the minimized loss, the sum of three terms: ``loss_pg`` is the policy-gradient term (see
    ``Iterations.loss``), ``loss_kl`` is ``beta`` times ``kl_divergence``, and ``loss_entropy`` is minus
    ``entropy_coef`` times the entropy. Except for ``loss_kl`` and ``loss_entropy``, a metric is left out if no row
    has it or a value is not finite.
    """
    kl_terms = [row.get("beta", args.beta) * row.get("kl", 0.0) for row in rows]
    entropy_terms = [row.get("entropy_coef", args.entropy_coef) * row.get("entropy", 0.0) for row in rows]
    metrics = {
        "loss_total": _average_metric(rows, "loss"),
        "loss_pg": _average_metric(rows, "loss_pg"),
        "loss_kl": fmean(kl_terms or [0.0]),
        "loss_entropy": 0.0 - fmean(entropy_terms or [0.0]),  # minus 0.0 would be -0.0
        "kl_divergence": _average_metric(rows, "kl"),
        "entropy_mean": _average_metric(rows, "entropy"),
        "reward_mean": _average_metric(rows, "reward"),
        "grad_norm": _average_metric(rows, "grad_norm"),
        "lr": _average_metric(rows, "learning_rate"),
    }
    seeds = [seed for row in rows for seed in row.get("problem_seeds", [])]
    return {
        "iteration": iteration,
        "steps": [row["step"] for row in rows],
        **{name: value for name, value in metrics.items() if value is not None},
        **({"problem_seeds": sorted(set(seeds))} if seeds else {}),
    }


def select_eval_metrics(row: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of a row of ``eval.jsonl``, without the prefix ``eval_``; other values are left out."""
    metrics = {name.removeprefix("eval_"): value for name, value in row.items()}
    return {name: value for name, value in metrics.items() if _EVAL_METRIC.fullmatch(name)}


def _average_metric(rows: Sequence[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a metric over the rows that have it; None if no row has it or a value is not finite."""
    values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return fmean(values) if values and all(map(math.isfinite, values)) else None
