"""Does MaxEnt-GRPO keep more right answers alive than GRPO? Tiny models, exact metrics, many seeds.

    python evidence/multi_answer.py tuning     # settings of each arm, on draws of their own
    python evidence/multi_answer.py report     # the arms at their chosen settings, on other draws: the verdict
    python evidence/multi_answer.py lengths    # answers of 3, 10 and 30 tokens
    python evidence/multi_answer.py graph      # graph colouring of ModeBench
    make evidence                           # tables and figures from the rows

Each part adds a row for each run to evidence/results/maxent_PART.jsonl; a call continues where one before was stopped.
protocol.md was written before the runs: what is tuned, compared and concluded. The tasks are in
``multi_answer_task.py`` and ``graph_task.py``, and what is made of the rows in ``multi_answer_report.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import multi_answer_report as report
import torch
from bench_tools import RESULTS, append_record, begin
from graph_task import graph
from multi_answer_task import Task, sums
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback

from grpo_recipes.paths import cache_root
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer

torch.set_num_threads(1)  # the order of a sum over threads changes its last bits

TUNING_DRAWS, REPORT_DRAWS, SEEDS = (0, 1, 2), (9, 11, 12, 13, 14), 8
OTHER_SEEDS = 20  # the first seed of the duplicate
LENGTHS, LENGTH_SEEDS = (3, 10, 30), 3
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 128, "num_generations": 16, "temperature": 1.0, "lr_scheduler_type": "constant",
    "beta": 0.0,
}  # fmt: skip
STEPS = {"tuning": 80, "report": 80, "lengths": 80, "graph": 100}
EVERY = {"tuning": 5, "report": 5, "lengths": 5, "graph": 10}  # steps between measurements
RATES, TWO_RATES = (5e-5, 1e-4, 1.5e-4, 2e-4, 3e-4, 4e-4), (1.5e-4, 3e-4)
LOWER_RATES = (2.5e-5, 3.5e-5, 7e-5, 2e-5, 3e-5, 4.5e-5, 1.5e-5, 2.25e-5, 2.75e-5, 4e-5, 5.5e-5, 6e-5)
GRPO, DUPLICATE, DR_GRPO = "GRPO", "GRPO, other seeds", "Dr.GRPO (tempered, tau 100)"
KL, ENTROPY, MAXRL, TEMPERED = "GRPO + KL", "GRPO + entropy", "MaxRL", "tempered"
LISTWISE, PER_TOKEN, SPREAD = "listwise, kappa", "listwise, per token", "listwise, kappa by spread"
OWN: dict[str, dict[str, Any]] = {  # keys of every setting of an arm
    GRPO: {}, KL: {}, ENTROPY: {}, MAXRL: {"maxent_objective": "maxrl"}, TEMPERED: {"maxent_objective": "tempered"},
    LISTWISE: {"maxent_objective": "listwise", "maxent_tau": 0.2},
}  # fmt: skip


def grids() -> dict[str, list[dict[str, Any]]]:
    """Return the eighteen settings of each arm that is tuned: six, and four times three towards where the best was."""

    def of(key: str, *values: float) -> list[dict[str, Any]]:
        return [{"learning_rate": rate, key: value} for rate, value in itertools.product(TWO_RATES, values)]

    def beyond(key: str, *settings: tuple[float, float]) -> list[dict[str, Any]]:
        return [{"learning_rate": rate, key: value} for rate, value in settings]

    rates = [{"learning_rate": rate} for rate in (*RATES, *LOWER_RATES)]
    kappa = "maxent_policy_temperature"
    tuned = {
        GRPO: rates,
        KL: [
            *of("beta", 0.15, 0.3, 0.5), *beyond("beta", (1.5e-4, 0.8), (1e-4, 0.5), (5e-5, 0.3)),
            *beyond("beta", (1.5e-4, 1.2), (1e-4, 0.8), (1e-4, 1.2)),
            *beyond("beta", (1.5e-4, 1.6), (1e-4, 1.0), (2e-4, 1.6)),
            *beyond("beta", (1e-4, 0.4), (2e-4, 0.5), (2e-4, 0.6)),
        ],
        ENTROPY: [
            *of("entropy_coef", 0.03, 0.1, 0.3), *beyond("entropy_coef", (1e-4, 0.03), (5e-5, 0.03), (5e-5, 0.1)),
            *beyond("entropy_coef", (2.5e-5, 0.1), (3.5e-5, 0.1), (3.5e-5, 0.2)),
            *beyond("entropy_coef", (2.5e-5, 0.2), (5e-5, 0.2), (3.5e-5, 0.3)),
            *beyond("entropy_coef", (7e-5, 0.1), (7e-5, 0.2), (5e-5, 0.15)),
        ],
        MAXRL: rates,
        LISTWISE: [
            *of(kappa, 3.0, 4.0, 6.0), *beyond(kappa, (1.5e-4, 2.5), (1e-4, 3.0), (1e-4, 4.0)),
            *beyond(kappa, (1.5e-4, 2.0), (1e-4, 2.5), (2e-4, 2.5)),
            *beyond(kappa, (1e-4, 2.2), (7e-5, 2.5), (7e-5, 3.0)),
            *beyond(kappa, (2e-4, 3.0), (2e-4, 3.5), (1.5e-4, 3.5)),
        ],
        TEMPERED: [
            *of("maxent_tau", 0.05, 0.2, 0.5), *beyond("maxent_tau", (1e-4, 0.5), (5e-5, 0.5), (5e-5, 0.05)),
            *beyond("maxent_tau", (2.5e-5, 0.5), (3.5e-5, 0.5), (3.5e-5, 1.0)),
            *beyond("maxent_tau", (3.5e-5, 0.2), (3.5e-5, 2.0), (4.5e-5, 0.5)),
            *beyond("maxent_tau", (4.5e-5, 1.0), (4e-5, 0.5), (5e-5, 1.0)),
        ],
    }  # fmt: skip
    return {arm: [OWN[arm] | setting for setting in settings] for arm, settings in tuned.items()}


@dataclass(frozen=True)
class Job:
    """One training: what is trained, how, and from where."""

    part: str
    arm: str
    keys: dict[str, Any]
    seed: int
    draw: int = 0
    tokens: int = 3  # of an answer; of the graphs it is what it is

    @property
    def known_by(self) -> tuple[str, str, int, int, int]:
        """What tells it from all other rows of its part."""
        return self.arm, json.dumps(self.keys, sort_keys=True), self.seed, self.draw, self.tokens

    def task(self) -> Task:
        """Return what it trains on."""
        folder = cache_root(os.environ) / "multi-answer"
        folder.mkdir(parents=True, exist_ok=True)
        return graph(folder, self.draw) if self.part == "graph" else sums(folder, self.draw, self.tokens)


def tuning() -> Iterator[Job]:
    """Every setting of every arm, a seed on each draw of the tuning."""
    for draw, (arm, settings) in itertools.product(TUNING_DRAWS, grids().items()):
        yield from (Job("tuning", arm, keys, 100, draw) for keys in settings)


def _chosen() -> dict[str, dict[str, Any]]:
    rows = report.rows_of("tuning")
    if len(rows) != report.RUNS["tuning"]:
        wrong(
            f"{len(rows)} of the tuning's {report.RUNS['tuning']} runs are recorded",
            "run its rest first: multi_answer.py tuning",
        )
    return report.chosen(rows)


def wrong(what: str, fix: str) -> NoReturn:
    """End with exit code 2 and one line."""
    print(f"multi_answer.py: {what}; {fix}", file=sys.stderr)
    raise SystemExit(2)


def report_arms() -> dict[str, dict[str, Any]]:
    """Return the keys of each arm of the report: its chosen setting; two have GRPO's learning rate."""
    chosen = _chosen()
    rate = {"learning_rate": chosen[GRPO]["learning_rate"]}
    dr_grpo = {"maxent_objective": "tempered", "maxent_tau": 100.0}  # weights within 1 % of each other
    return {GRPO: chosen[GRPO], DUPLICATE: rate, DR_GRPO: dr_grpo | rate, **chosen}


def reporting() -> Iterator[Job]:
    """The arms of the report, all seeds on each of its draws."""
    arms = report_arms()
    for seed, draw, (arm, keys) in itertools.product(range(SEEDS), REPORT_DRAWS, arms.items()):
        yield Job("report", arm, keys, seed + (OTHER_SEEDS if arm == DUPLICATE else 0), draw)


def lengths() -> Iterator[Job]:
    """Arms whose answers have more and more tokens, at the settings that were chosen for three."""
    chosen = _chosen()
    listwise = chosen[LISTWISE]
    arms = {name: chosen[name] for name in (GRPO, KL, MAXRL, LISTWISE)}
    arms |= {PER_TOKEN: listwise | {"maxent_policy_temperature": 0.0}, SPREAD: listwise | {"maxent_policy_spread": 1.0}}
    for seed, tokens, (arm, keys) in itertools.product(range(LENGTH_SEEDS), LENGTHS, arms.items()):
        yield Job("lengths", arm, keys, seed, tokens=tokens)


def graphs() -> Iterator[Job]:
    """Arms of the report on graph colouring, where the answers have five digits."""
    chosen = _chosen()
    for seed, arm in itertools.product(range(SEEDS), (GRPO, KL, ENTROPY, MAXRL, LISTWISE, TEMPERED)):
        yield Job("graph", arm, chosen[arm], seed)


PARTS: dict[str, Callable[[], Iterator[Job]]] = {
    "tuning": tuning, "report": reporting, "lengths": lengths, "graph": graphs
}  # fmt: skip


def main() -> None:
    """Train what the part's record lacks."""
    options = _options()
    out = options.out or RESULTS / f"maxent_{options.part}.jsonl"
    if options.steps and options.out is None:
        wrong("--steps makes runs that are not the protocol's", "name another file with --out")
    origin = begin(out)
    jobs = list(PARTS[options.part]())[: options.runs]
    known = {tuple(row["known_by"]) for row in report.read(out)}
    left = [job for job in jobs if job.known_by not in known]
    for job in {(job.draw, job.tokens): job for job in left}.values():
        job.task()  # makes its model, which two processes would make twice
    steps = options.steps or STEPS[options.part]
    for count, row in enumerate(_train_all(left, steps, options.workers), 1):
        append_record(out, row, origin)
        print(f"{count}/{len(left)} {row['arm']}, draw {row['draw']}, seed {row['seed']}: {_last(row)}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--steps", type=int, help="optimizer steps of a run, in the place of the protocol's")
    parser.add_argument("--runs", type=int, help="the first of the part's runs alone")
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--out", type=Path, help="file of rows, in the place of evidence/results/maxent_PART.jsonl")
    return parser.parse_args()


def _train_all(jobs: Sequence[Job], steps: int, workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        yield from (run(job, steps) for job in jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(_run, [(job, steps) for job in jobs])


def _run(job: tuple[Job, int]) -> dict[str, Any]:
    return run(*job)


def run(job: Job, steps: int) -> dict[str, Any]:
    """Train once; return the row of it."""
    began, task = time.process_time(), job.task()
    measurements = Measurements(task, EVERY[job.part])
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder, seed=job.seed, max_steps=steps, use_cpu=True, bf16=False, gradient_checkpointing=False,
            disable_tqdm=True, use_vllm=False, save_strategy="no", report_to="none", report_samples=0,
            **SETTINGS | task.keys | job.keys,
        )  # fmt: skip
        trainer = (MaxEntGRPOTrainer if "maxent_objective" in job.keys else GRPOTrainer)(
            model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
            reward_funcs=[task.reward],
            args=args,
            train_dataset=task.dataset,
            processing_class=AutoTokenizer.from_pretrained(task.model),
            callbacks=[measurements],
            run_dir=Path(folder),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    found = {"part": job.part, "arm": job.arm, "keys": job.keys, "seed": job.seed, "draw": job.draw}
    curve = {"steps": measurements.steps, **measurements.parts}
    cpu = round(time.process_time() - began, 1)
    return found | {"tokens": job.tokens, "known_by": job.known_by, "curve": curve, "cpu_seconds": cpu}


class Measurements(TrainerCallback):
    """What the model scores at the start, every few steps, and at the end: part -> metric -> its values."""

    def __init__(self, task: Task, every: int):
        self._task, self._every = task, every
        self.steps: list[int] = []
        self.parts: dict[str, dict[str, list[float]]] = {part: {} for part in task.parts}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Measure the model of the start."""
        self._add(0, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        """Measure where the step is one of those."""
        if state.global_step % self._every == 0 or state.global_step == state.max_steps:
            self._add(state.global_step, model)

    def _add(self, step: int, model: Any) -> None:
        self.steps.append(step)
        for part, measure in self._task.parts.items():
            for metric, value in measure(model).items():
                self.parts[part].setdefault(metric, []).append(round(value, 4))


def _last(row: dict[str, Any]) -> dict[str, float]:
    return {metric: values[-1] for metric, values in row["curve"]["trained on"].items()}


if __name__ == "__main__":
    main()
