"""Measure the cost in samples and the gain in time of overlap_generation: runs with and without it, in turn.

    python bench/overlap.py curves [--tasks smoke modebench] [--seeds 8]
    python bench/overlap.py time [--rounds 8]

``curves``: both runs of a seed start with the same model, prompts and sampling seeds. Only the key differs. Each run
adds a row to bench/results/overlap.jsonl, and another call continues after the last row.

``time``: the seconds of a step, A B B A ..., with about equal times for sampling and updating: completions have a fixed
length, and server and trainer have one core each. A ratio compares the two medians of a round. It adds a row, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from made_by import append_record, begin
from overlap_task import TASKS, Task
from transformers import AutoTokenizer, PrinterCallback

from grpo_recipes.launch.readiness import wait_until_ready
from grpo_recipes.paths import cache_root, find_code_root
from grpo_recipes.plan.commands import base_environment, run_environment, server_command, server_environment
from grpo_recipes.plan.ports import is_port_free
from grpo_recipes.process.scratch import make_scratch
from grpo_recipes.recipe import read_recipe
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.runs.rundir import read_rows
from grpo_recipes.trainers.grpo import GRPOTrainer

SERVED = "overlap"
SERVER_VARIABLES = ("GRPO_TOKEN_FILE", "GRPO_SYNC_DIR", "GRPO_RUN")  # with which a trainer reaches its server
STEPS = 60
SKIPPED = 3  # steps of a timed run: the first has nothing sampled ahead
TIMED_STEPS, TIMED_LENGTH = 13, 48
KEYS: dict[str, Any] = {
    "per_device_train_batch_size": 256, "num_generations": 16, "learning_rate": 3e-4, "lr_scheduler_type": "linear",
    "temperature": 1.0, "beta": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
    "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True, "use_vllm": True, "weight_sync": "file",
}  # fmt: skip


def main() -> None:
    """Measure, and add rows to the result."""
    options = _options()
    torch.set_num_threads(1)
    PARTS[options.part](options, begin(options.out))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/overlap.jsonl")
    return parser.parse_args()


def curves(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Train each task with each seed in both ways."""
    for name in options.tasks:
        task = TASKS[name](cache_root(os.environ) / "smoke")
        records = map(json.loads, options.out.read_text().splitlines() if options.out.exists() else ())
        known = {(row["task"], row["seed"], row["overlap"]) for row in records if row["part"] == "curves"}
        missing = [(seed, overlap) for seed in range(options.seeds) for overlap in (False, True)]
        missing = [pair for pair in missing if (name, *pair) not in known]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as folder, server(task) as port:
            for seed, overlap in missing:
                began = time.perf_counter()
                rows = train(task, Path(folder) / f"{seed}-{overlap}", port, seed, overlap, max_steps=STEPS)
                row = {
                    "part": "curves", "task": name, "seed": seed, "overlap": overlap, "steps": STEPS,
                    "reward": [round(metrics["reward"], 5) for metrics in rows],
                    "ratio": [round(metrics["sampling/importance_sampling_ratio/mean"], 5) for metrics in rows],
                    "off_policy": [metrics.get("rollouts/steps_off_policy", 0.0) for metrics in rows],
                    "seconds": round(time.perf_counter() - began, 1),
                }  # fmt: skip
                append_record(options.out, row, origin)
                print(name, seed, overlap, row["reward"][:3], row["reward"][-5:], row["seconds"], flush=True)


def timed(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Time steps in both ways, in turn."""
    task, seconds = TASKS["smoke"](cache_root(os.environ) / "smoke"), {False: [], True: []}  # type: ignore[var-annotated]
    parts: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    length = {"max_completion_length": TIMED_LENGTH, "generation_kwargs": {"ignore_eos": True}}
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})  # the server's, which inherits it; ours is the first
    with tempfile.TemporaryDirectory() as folder, server(task) as port:
        os.sched_setaffinity(0, {cores[0]})
        for index in range(options.rounds):
            for overlap in (False, True) if index % 2 == 0 else (True, False):
                run_folder = Path(folder) / f"{index}-{overlap}"
                rows = train(task, run_folder, port, index, overlap, max_steps=TIMED_STEPS, **length)[SKIPPED:]
                seconds[overlap].append(statistics.median(row["seconds/step"] for row in rows))
                phases = ("sample", "sync", "score", "update")
                parts[overlap].append(
                    {phase: statistics.median(row[f"seconds/{phase}"] for row in rows) for phase in phases}
                )
            print(index, seconds[False][-1], seconds[True][-1], parts[False][-1], flush=True)
    ratios = [after / before for before, after in zip(seconds[False], seconds[True], strict=True)]
    row = {
        "part": "time", "completions": 256, "tokens": TIMED_LENGTH, "cores": "server one, trainer one",
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
        "rounds": len(ratios),
        **{
            name: {
                "seconds_per_step": [round(value, 4) for value in seconds[overlap]],
                "phases": {
                    phase: round(statistics.median(row[phase] for row in parts[overlap]), 4)
                    for phase in parts[overlap][0]
                },
            }
            for name, overlap in (("synchronous", False), ("overlapped", True))
        },
    }  # fmt: skip
    append_record(options.out, row, origin)
    print(json.dumps(row, indent=1))


PARTS = {"curves": curves, "time": timed}


def train(task: Task, folder: Path, port: int, seed: int, overlap: bool, **keys: Any) -> list[dict[str, Any]]:
    """Train, and return the rows of ``metrics.jsonl``."""
    folder.mkdir(parents=True)
    args = GRPOConfig(
        output_dir=str(folder / "checkpoints"), seed=seed, overlap_generation=overlap, vllm_server_port=port,
        model_init_kwargs={"dtype": "float32"}, **{**KEYS, **task.keys, **keys},
    )  # fmt: skip
    torch.manual_seed(seed)
    trainer = GRPOTrainer(
        model=task.model,
        reward_funcs=[task.reward],
        args=args,
        train_dataset=task.dataset,
        processing_class=AutoTokenizer.from_pretrained(task.model),
        run_dir=folder,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return read_rows(folder / "metrics.jsonl")


@contextmanager
def server(task: Task, *flags: str) -> Iterator[int]:
    """Start a server of the task's model, with further flags of vLLM; yield its port."""
    port = next(port for port in range(8300, 9000) if is_port_free("127.0.0.1", port))
    scratch = make_scratch(os.environ)
    environment = {
        **base_environment(os.environ),
        **run_environment(os.environ, scratch, scratch.disk, SERVED),
        **server_environment("cpu", None, os.environ),
    }
    os.environ |= {name: environment[name] for name in SERVER_VARIABLES}
    recipe = read_recipe(find_code_root() / "recipes/smoke/grpo.yaml")
    argv = [*server_command(recipe, task.model, SERVED, "127.0.0.1", port, "cpu"), *flags]
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        token = scratch.token_file.read_text()
        wait_until_ready(lambda: process.poll() is None, os.getpid(), "127.0.0.1", port, SERVED, token, timeout=300)
        yield port
    finally:
        process.terminate()
        process.wait(60)
        scratch.remove()


if __name__ == "__main__":
    main()
