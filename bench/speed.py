"""Measure a training step compared with unmodified TRL, and commands: everything in turn in one run.

    python bench/speed.py [--only PART...] [--quick] [--out bench/results/speed.json]

Writes the record, and the figure and the tables of docs/measurements.md. Compared trainers take one step each in turn,
in one process, with one thread each, at learning rate 0. A ratio is the median over neighboring steps, with its 95 %
interval. The model is random, with four layers and 256 hidden units.

* ``update``: an optimizer step on given completions, including metrics and logging. Compares ours with bare TRL on
  lognormal lengths (the mean is about 0.3 of the longest), the lengths of GSM8K's solutions, and equal lengths;
* ``step``: a whole step, weights and completions through one real vLLM server on its own core. Each completion is
  requested with its length. TRL syncs through a plain file, because its NCCL needs GPUs;
* ``added``: a whole step with equal lengths, requested as both trainers do: ours with everything on, and with one
  feature after the other switched off;
* ``overlap``: sampling during training, on and off;
* ``maxent``: each MaxEnt objective and GRPO, all with a reference, on given completions;
* ``commands``: ``grpo check``, ``grpo plan``, and from ``grpo launch`` to the first step of the smoke recipe;
* ``growth``: the ratio of ``update`` by prompts per step, longest completion and training processes.

A part that is not measured keeps its record.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from interleave import interleave
from made_by import begin, finished
from speed_figure import write_page
from speed_trainers import GSM8K, Keys, Shape, build_model, first_step, served, trainer_of
from transformers import TrainerCallback

from grpo_recipes.paths import find_code_root
from grpo_recipes.runs.rundir import write_json
from grpo_recipes.trainers import metrics

SKIPPED = 2  # steps that fill caches
BARE, AGAIN, OURS = "bare TRL", "bare TRL again", "ours"
ARMS: dict[str, Keys] = {BARE: None, AGAIN: None, OURS: {}, "ours without trim_padding": {"trim_padding": False}}
NO_SAMPLES = {"report_samples": 0, "show_completion_steps": 0}
ADDED: dict[str, Keys] = {
    BARE: None,
    AGAIN: None,
    OURS: {},
    "without the guard": {"weight_guard": False},
    "without exactness": {"seed_server": False},
    "without samples": NO_SAMPLES,
    "without all three": {"weight_guard": False, "seed_server": False, **NO_SAMPLES},
}
Q = {"maxent_tau": 0.1, "maxent_beta": 0.1, "beta": 0.04}
MAXENT: dict[str, Keys] = {
    "GRPO": {"beta": 0.04},
    "GRPO again": {"beta": 0.04},
    "tempered": {"maxent_objective": "tempered", "maxent_tau": 0.5, "beta": 0.04},
    "weighted_mle": {"maxent_objective": "weighted_mle", **Q},
    "listwise": {"maxent_objective": "listwise", **Q},
}
OVERLAP: dict[str, Keys] = {"in turn": {}, "in turn again": {}, "overlapped": {"overlap_generation": True}}
GROWTH = {
    "prompts": [Shape(prompts=count) for count in (2, 4, 8)],
    "longest": [Shape(longest=count) for count in (64, 128, 256)],
    "ranks": [Shape(ranks=count) for count in (1, 2)],
}


class Bench:
    """A folder, a model in it, and how many steps each trainer takes."""

    def __init__(self, scratch: Path, steps: int):
        self.scratch, self.steps, self._count = scratch, steps, 0
        self.model = build_model(scratch / "model")

    def compare(
        self, arms: dict[str, Keys], shape: Shape, port: int | None = None, base: str = BARE
    ) -> dict[str, dict[str, Any]]:
        """Return each arm's seconds per step, their ratio to the base's neighboring steps, and the tokens fed."""
        trainers: dict[str, Any] = {}
        fed: dict[str, list[int]] = {name: [0, 0] for name in arms}
        sampling: dict[str, list[float]] = {name: [] for name in arms}
        self._count += 1

        def make(name: str, callback: TrainerCallback) -> Any:
            folder = self.scratch / f"{self._count}" / name.replace(" ", "_")
            steps = self.steps + SKIPPED + 1
            trainers[name] = trainer_of(folder, self.model, shape, steps, arms[name], callback, port)
            trainers[name].model.model.register_forward_pre_hook(partial(_count, fed[name]), with_kwargs=True)
            if port:
                client = trainers[name].vllm_generation.vllm_client
                client.generate = partial(_clocked, sampling[name], client.generate)
            return trainers[name]

        seconds = interleave({name: partial(make, name) for name in arms})
        seconds = {name: values[SKIPPED:] for name, values in seconds.items()}
        return {
            name: {
                "ratio": ratio(values, seconds[base]),
                "seconds_median": round(statistics.median(values), 4),
                **({"seconds_sampling": round(statistics.median(sampling[name][SKIPPED:]), 4)} if port else {}),
                "fed_per_real_token": round(fed[name][0] / fed[name][1], 3),
                "seconds": [round(value, 4) for value in values],
            }
            for name, values in seconds.items()
        }


def _count(fed: list[int], _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    fed[0] += kwargs["input_ids"].numel()
    fed[1] += int(kwargs["attention_mask"].sum())


def _clocked(seconds: list[float], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    began = time.perf_counter()
    try:
        return call(*args, **kwargs)
    finally:
        seconds.append(time.perf_counter() - began)


def ratio(values: list[float], base_values: list[float]) -> dict[str, float]:
    """Return the median of the ratios of neighbouring steps, and the 95 % interval by its order statistics."""
    ratios = sorted(value / base for value, base in zip(values, base_values, strict=True))
    count, half = len(ratios), 0.98 * len(ratios) ** 0.5
    low, high = max(0, int(count / 2 - half)), min(count - 1, int(count / 2 + half))
    return {"median": round(statistics.median(ratios), 3), "low": round(ratios[low], 3), "high": round(ratios[high], 3)}


def shapes() -> dict[str, Shape]:
    """Return the shapes of ``update`` by their lengths, with GSM8K's if its file exists."""
    return {name: Shape(name) for name in ("lognormal", "gsm8k", "equal") if name != "gsm8k" or GSM8K.exists()}


def update(bench: Bench) -> dict[str, Any]:
    """The update phase on given completions."""
    return {name: bench.compare(ARMS, shape) for name, shape in shapes().items()}


def step(bench: Bench) -> dict[str, Any]:
    """A whole step, through the server; with more completions a smaller share of it is sampling."""
    arms = {name: ARMS[name] for name in (BARE, OURS)}
    sizes = {**shapes(), "lognormal, 8 x 16": Shape(prompts=8, group=16)}
    with served(bench.model) as port:
        return {name: bench.compare(arms, shape, port) for name, shape in sizes.items()}


def added(bench: Bench) -> dict[str, Any]:
    """What we add to a step: everything, each thing apart, and the seconds of writing rows."""
    rows: list[float] = []
    timed = partial(_clocked, rows, metrics.append_json)
    with served(bench.model) as port, patch.object(metrics, "append_json", timed):
        arms = bench.compare(ADDED, Shape("equal"), port)
    steps = (bench.steps + SKIPPED + 1) * (len(ADDED) - 2)
    return {"arms": arms, "seconds_of_rows_a_step": round(sum(rows) / steps, 5)}


def overlap(bench: Bench) -> dict[str, Any]:
    """Sampling while training, on and off."""
    with served(bench.model) as port:
        return bench.compare(OVERLAP, Shape("equal"), port, base="in turn")


def maxent(bench: Bench) -> dict[str, Any]:
    """MaxEnt and GRPO."""
    return bench.compare(MAXENT, Shape("equal"), base="GRPO")


def commands(bench: Bench) -> dict[str, Any]:
    """Measure wall and CPU seconds of commands, and the seconds to the first step."""
    grpo, recipe = str(Path(sys.executable).with_name("grpo")), str(find_code_root() / "recipes/smoke/grpo.yaml")
    seconds_by_command: dict[str, Any] = {
        name: [_timed([grpo, name, recipe]) for _ in range(5)] for name in ("check", "plan")
    }
    seconds_by_command = {
        name: dict(zip(("seconds", "cpu"), zip(*values, strict=True), strict=True))
        for name, values in seconds_by_command.items()
    }
    launch = [grpo, "launch", recipe, "--max_steps", "1", "--save_strategy", "no"]
    first_step(launch, bench.scratch)  # makes the smoke model if it is missing
    return seconds_by_command | {"launch": [first_step(launch, bench.scratch) for _ in range(min(3, bench.steps))]}


def _timed(argv: list[str]) -> tuple[float, float]:
    began, used = time.perf_counter(), os.times()
    subprocess.run(argv, check=True, capture_output=True)
    now = os.times()
    cpu = now.children_user + now.children_system - used.children_user - used.children_system
    return round(time.perf_counter() - began, 3), round(cpu, 3)


def growth(bench: Bench) -> dict[str, Any]:
    """The ratio of ``update`` as one thing grows."""
    ratios: dict[str, Any] = {}
    for parameter, shapes_of_one in GROWTH.items():
        for shape in shapes_of_one:
            many = shape.ranks > 1
            compared = _on_ranks(bench, shape) if many else bench.compare({BARE: None, OURS: {}}, shape)
            ratios.setdefault(parameter, {})[str(getattr(shape, parameter))] = compared
    return ratios


def _on_ranks(bench: Bench, shape: Shape) -> dict[str, Any]:
    """Compare on several training processes; rank 0 writes the result."""
    out = bench.scratch / "ranks.json"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(shape.ranks)),
        *(__file__, "--rank-steps", str(bench.steps), "--out", str(out)),
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads(out.read_text()))


def _as_rank(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shape = Shape(ranks=int(os.environ["WORLD_SIZE"]))
        comparison = Bench(Path(scratch), options.rank_steps).compare({BARE: None, OURS: {}}, shape)
    if os.environ["RANK"] == "0":
        write_json(options.out, comparison)


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "update": update, "step": step, "added": added, "overlap": overlap, "maxent": maxent, "commands": commands,
    "growth": growth,
}  # fmt: skip


def main() -> None:
    """Measure, and write the record and the page."""
    options = _options()
    if options.rank_steps:
        _as_rank(options)
        return
    origin = begin(options.out)
    before = json.loads(options.out.read_text()) if options.out.exists() else {}
    result = {"what": WHAT} | {name: part for name, part in before.items() if name in PARTS}
    with tempfile.TemporaryDirectory() as scratch:
        bench = Bench(Path(scratch), 4 if options.quick else options.steps)
        for name in options.only or PARTS:
            load, began = [round(load, 2) for load in os.getloadavg()], time.perf_counter()
            findings = PARTS[name](bench)
            seconds = round(time.perf_counter() - began)
            result[name] = finished(origin) | {"found": findings, "load_before": load, "took_seconds": seconds}
            print(f"{name}: {seconds} s", flush=True)
            write_json(options.out, result)
    if options.out == RECORD:
        write_page(result)


RECORD = find_code_root() / "bench/results/speed.json"
WHAT = "ratios of the seconds of neighbouring steps, and seconds of commands, on CPU"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, help="measure only these parts")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each trainer")
    parser.add_argument("--quick", action="store_true", help="four steps of each trainer, to see that all of it runs")
    parser.add_argument("--out", type=Path, default=RECORD)
    parser.add_argument("--rank-steps", type=int, default=0, help=argparse.SUPPRESS)  # a process of ``growth``
    return parser.parse_args()


if __name__ == "__main__":
    main()
