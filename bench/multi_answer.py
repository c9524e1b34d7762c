"""Does MaxEnt-GRPO keep more right answers alive than GRPO? A tiny model, sums with several right answers, many seeds.

    python bench/multi_answer.py --tuning     # writes bench/results/multi_answer_tuning.json
    python bench/multi_answer.py              # writes bench/results/multi_answer.json and the figure in docs/assets

The task is in ``multi_answer_task.py``: all metrics are exact, so the spread over seeds is that of training alone.
Every arm starts from the same pre-trained model and has the same batch, learning rate and, but for two
arms of twice the length, number of steps.

Criterion, set before any MaxEnt run: on the tuning seeds, the highest mean coverage@8 on the equations trained on,
among the settings whose mean@8 there is at most 0.02 below GRPO's; where none is, the one with the highest mean@8.
Every objective gets the same grid of tau and the same seeds, and the table's seeds are others.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import multi_answer_report as report
import multi_answer_task as task
import torch
from made_by import made_by
from multi_answer_figure import write_figure
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from grpo_recipes.paths import cache_root, home
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.recipe.registry import OBJECTIVES
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

torch.set_num_threads(1)  # the order of a sum over threads changes its last bits

STEPS, EVERY = 60, 15  # optimizer steps; steps between measurements
GRPO, DR_GRPO, PLACEBO = "GRPO", "Dr.GRPO (tempered, tau inf)", "placebo (tempered, tau 100)"
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 128,
    "num_generations": 16,
    "max_completion_length": 4,
    "temperature": 1.0,
    "learning_rate": 2e-4,
    "lr_scheduler_type": "constant",
    "beta": 0.0,
}


TUNING_SEED, TUNING_SEEDS, SEEDS, DUPLICATE_SEED = 100, 2, 8, 20
TUNING_TAUS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
PLACEBO_TAU = 100.0  # weights within 1 % of each other: Dr.GRPO but for rounding
OTHER_TAU = 0.5  # of tempered
LISTWISE_BETA = 0.5


def main() -> None:
    """Run the tuning or the table and write the result."""
    options = _options()
    arms = tuning_arms() if options.tuning else table_arms()
    seeds = options.seeds or (TUNING_SEEDS if options.tuning else SEEDS)
    runs = run_all(arms, seeds, options.steps, options.workers)
    result = tuning_result(runs) if options.tuning else table_result(runs)
    result |= {
        "settings": SETTINGS | {"max_steps": options.steps},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "trl", "transformers")},
        **made_by(),
        "runs": runs,
    }
    name = "multi_answer_tuning" if options.tuning else "multi_answer"
    write_json(options.out or home() / f"bench/results/{name}.json", finite(result))
    if options.tuning:
        print(json.dumps(result["chosen"], indent=1))
        return
    write_figure(options.figure, result, shown_curves())
    for part, title in report.PARTS.items():
        print(f"\n{title}\n\n{report.table(result, part)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuning", action="store_true", help="every objective over tau, on seeds of its own")
    parser.add_argument("--seeds", type=int, help=f"runs of each arm: {SEEDS}, or {TUNING_SEEDS} for --tuning")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps of a run")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="JSON file written")
    parser.add_argument("--figure", type=Path, default=home() / "docs/assets/maxent_multi_answer.svg")
    return parser.parse_args()


def tuning_result(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What the criterion picks, and the means it picks from."""
    return {
        "what": "tau of each objective and the default objective; runs of the tuning seeds",
        "criterion": "highest coverage@8 on the equations trained on, with mean@8 at most "
        f"{report.ALLOWED_LOSS} below GRPO's; where no setting has that, highest mean@8",
        "chosen": report.chosen(runs, GRPO),
        "baselines": baselines(),
        "summary": report.summary(runs),
    }


def table_result(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over runs, differences to GRPO, and those of ``tempered`` to its placebo."""
    tempered = [run for run in runs if run["objective"] == "tempered" and run["tau"] <= PLACEBO_TAU]
    tables = {"minus_grpo": report.differences(runs, GRPO), "minus_placebo": report.differences(tempered, PLACEBO)}
    return {
        "what": "exact metrics of the final model, mean over runs with 95 % t-intervals",
        "metrics": task.METRICS,
        "baselines": baselines(),
        "summary": report.summary(runs),
        **tables,
        "bonferroni": report.clear(tables),
    }


def baselines() -> dict[str, dict[str, dict[str, float]]]:
    """Guessers and the untrained model, for each part of the equations."""
    model = AutoModelForCausalLM.from_pretrained(task.pretrained(_folder()), dtype=torch.float32)
    return {
        part: {
            **{name: rounded(scores) for name, scores in task.guesser_scores(equations).items()},
            "untrained": rounded(task.Measure(equations)(model)),
        }
        for part, equations in zip(report.PARTS, task.split(), strict=True)
    }


def finite(value: Any) -> Any:
    """The same with infinite numbers as the text inf: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return "inf" if value == math.inf else value


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
        name: in tables.
        keys: what it sets beside ``SETTINGS``; with a ``maxent_objective`` it is the MaxEnt trainer's.
        first_seed: its seeds count from here.
        times_steps: how much longer than the others it trains.
    """

    name: str
    keys: dict[str, Any] = field(default_factory=dict)
    first_seed: int = 0
    times_steps: int = 1


class Measurements(TrainerCallback):
    """What the model scores every few steps, and at the end."""

    def __init__(self, every: int):
        self._every = every
        self._parts = {"train": task.Measure(task.split()[0]), "held_out": task.Measure(task.split()[1])}
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self._add(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._add(state.global_step, model)

    def _add(self, step: int, model: Any) -> None:
        self.rows.append({"step": step} | {name: rounded(measure(model)) for name, measure in self._parts.items()})


def tuning_arms() -> list[Arm]:
    """GRPO, for the condition, and each objective at each tau."""
    return [
        Arm(GRPO, first_seed=TUNING_SEED),
        *(_maxent(objective, tau, TUNING_SEED) for objective in OBJECTIVES for tau in TUNING_TAUS),
    ]


def table_arms() -> list[Arm]:
    """The arms of the table, each objective at its default tau, which is the tuned one."""
    tempered, listwise, weighted_mle = (
        _maxent(name, OBJECTIVES[name].tau) for name in ("tempered", "listwise", "weighted_mle")
    )
    return [
        Arm(GRPO),
        Arm("GRPO, other seeds", first_seed=DUPLICATE_SEED),
        Arm(DR_GRPO, {"maxent_objective": "tempered", "maxent_tau": math.inf}),
        Arm(PLACEBO, {"maxent_objective": "tempered", "maxent_tau": PLACEBO_TAU}),
        tempered,
        weighted_mle,
        listwise,
        # Not tuned: what else one may ask.
        _maxent("tempered", OTHER_TAU),
        Arm(f"{listwise.name}, maxent_beta {LISTWISE_BETA:g}", listwise.keys | {"maxent_beta": LISTWISE_BETA}),
        Arm("GRPO, twice the steps", times_steps=2),
        Arm(f"{listwise.name}, twice the steps", listwise.keys, times_steps=2),
    ]


def _maxent(objective: str, tau: float, first_seed: int = 0) -> Arm:
    return Arm(f"{objective}, tau {tau:g}", {"maxent_objective": objective, "maxent_tau": tau}, first_seed)


def shown_curves() -> list[str]:
    """The arms whose way the figure shows: GRPO, Dr.GRPO and each objective at its default."""
    defaults = [_maxent(name, objective.tau).name for name, objective in OBJECTIVES.items()]
    return [GRPO, DR_GRPO, *defaults]


def run(arm: Arm, seed: int, steps: int, start: Path) -> dict[str, Any]:
    """Train once; returns everything that was measured."""
    began = time.process_time()
    measurements = Measurements(min(EVERY, steps))
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, seed=seed, max_steps=steps, use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True, use_vllm=False, save_strategy="no", report_to="none", report_samples=0,
            **SETTINGS | arm.keys,
        )  # fmt: skip
        trainer = (MaxEntGRPOTrainer if "maxent_objective" in arm.keys else GRPOTrainer)(
            model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
            reward_funcs=[task.right],
            args=args,
            train_dataset=task.rows(task.split()[0]),
            processing_class=AutoTokenizer.from_pretrained(start),
            callbacks=[measurements],
            run_dir=Path(folder),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    final = measurements.rows[-1]
    return {
        "arm": arm.name,
        "objective": arm.keys.get("maxent_objective"),
        "tau": arm.keys.get("maxent_tau"),
        "seed": seed,
        "train": final["train"],
        "held_out": final["held_out"],
        "curve": measurements.rows,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}


def run_all(arms: Sequence[Arm], seeds: int, steps: int, workers: int) -> list[dict[str, Any]]:
    """Every arm with every seed, in an order that spreads each arm over the time that it takes."""
    start = task.pretrained(_folder())
    jobs = [(arm, arm.first_seed + index, steps * arm.times_steps, start) for index in range(seeds) for arm in arms]
    if workers == 1:
        return [_run_job(job) for job in jobs]
    runs = []
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for one in pool.imap(_run_job, jobs):
            runs.append(one)
            print(f"{len(runs)}/{len(jobs)} {one['arm']}, seed {one['seed']}: {one['train']}", flush=True)
    return runs


def _run_job(job: tuple[Arm, int, int, Path]) -> dict[str, Any]:
    return run(*job)


def _folder() -> Path:
    folder = cache_root(os.environ) / "multi-answer"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


if __name__ == "__main__":
    main()
