"""Measure seconds and sampled tokens until the reward of a plain TRL script and of this project reaches a target.

    python bench/time_to_reward.py [--seeds 5]

The task is the smoke task, with completions of 8 tokens. All runs have the same model, prompts, reward, batch and
learning rate. They end when the mean reward of five steps is at least ``TARGET``. The arms of a seed run in turn, and
each seed begins with another arm:

* ``trl``: TRL's GRPOTrainer as a script without a server uses it on CPU, sampling with transformers on all cores;
* ``default``: this project's trainer with its defaults and a vLLM server;
* ``overlap``: the same with overlap_generation;
* ``replicas``: the same with two replicas of the server.

Seconds count from the start of the first step, without imports and server starts. Each run adds a row to
bench/results/time_to_reward.jsonl, and another call continues after the last row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trl
from made_by import append_record, begin
from overlap import KEYS, SERVER_VARIABLES, server
from overlap_task import Task, sums
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

from grpo_recipes.paths import cache_root, find_code_root
from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.grpo import GRPOTrainer

TARGET, OVER = 0.8, 5  # the mean reward to reach, over this number of steps
MOST_STEPS = 120
ARMS: dict[str, dict[str, Any] | None] = {
    "trl": None, "default": {}, "overlap": {"overlap_generation": True}, "replicas": {"vllm_data_parallel_size": 2},
}  # fmt: skip


class StopAtTarget(TrainerCallback):
    """End a training when the mean reward of ``OVER`` steps is at least ``TARGET``; collect its curve."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add a step, and stop at the target."""
        if "reward" not in logs:
            return
        self.seconds.append(round(time.perf_counter() - self._began, 3))
        self.rewards.append(round(logs["reward"], 5))
        self.tokens.append(int(logs["num_tokens"]))
        control.should_training_stop = statistics.mean(self.rewards[-OVER:]) >= TARGET and len(self.rewards) >= OVER


def main() -> None:
    """Make the runs that the record does not have, and add a row for each."""
    options = _parse_options()
    origin = begin(options.out)
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(record["seed"], record["arm"]) for record in records}
    missing = [
        (seed, arm)
        for seed in range(options.seeds)
        for arm in [*ARMS][seed % len(ARMS) :] + [*ARMS][: seed % len(ARMS)]
        if (seed, arm) not in known
    ]
    if not missing:
        return
    task = sums(cache_root(os.environ) / "smoke")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = []
        for flags in ((), ("--data-parallel-size", "2", "--api-server-count", "1")):
            port = stack.enter_context(server(task, *flags))
            servers.append((port, {name: os.environ[name] for name in SERVER_VARIABLES}))
        for seed, arm in missing:
            port, variables = servers[arm == "replicas"]
            os.environ |= variables
            curve = train(task, folder / f"{seed}-{arm}", port, seed, ARMS[arm])
            row = {
                "task": "smoke", "seed": seed, "arm": arm, "target": TARGET, "steps": len(curve.rewards),
                "reached": statistics.mean(curve.rewards[-OVER:]) >= TARGET,
                "seconds": curve.seconds[-1], "tokens": curve.tokens[-1],
                "reward": curve.rewards, "seconds_by_step": curve.seconds,
            }  # fmt: skip
            append_record(options.out, row, origin)
            print(seed, arm, row["steps"], row["seconds"], row["tokens"], row["reached"], flush=True)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/time_to_reward.jsonl")
    return parser.parse_args()


def train(task: Task, folder: Path, port: int, seed: int, keys: dict[str, Any] | None) -> StopAtTarget:
    """Train to the target, bare TRL if ``keys`` is None, and return the curve."""
    folder.mkdir(parents=True)
    curve = StopAtTarget()
    options = {
        **KEYS, **task.keys, "output_dir": str(folder / "checkpoints"), "seed": seed, "max_steps": MOST_STEPS,
        "model_init_kwargs": {"dtype": "float32"},
    }  # fmt: skip
    if keys is None:
        torch.set_num_threads(os.cpu_count() or 1)
        trl_options = {key: value for key, value in options.items() if key not in ("use_vllm", "weight_sync")}
        trainer_class, args, run_options = trl.GRPOTrainer, trl.GRPOConfig(**trl_options), {}
    else:
        torch.set_num_threads(1)
        trainer_class, run_options = GRPOTrainer, {"run_dir": folder}
        args = GRPOConfig(**{**options, **keys}, vllm_server_port=port)
    torch.manual_seed(seed)
    trainer = trainer_class(
        model=task.model, reward_funcs=[task.reward], args=args, train_dataset=task.dataset,
        processing_class=AutoTokenizer.from_pretrained(task.model), callbacks=[curve], **run_options,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return curve


if __name__ == "__main__":
    main()
