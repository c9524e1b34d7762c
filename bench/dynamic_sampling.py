"""Measure what dynamic_sampling gains for its samples and its time: runs with and without it, in turn.

    python bench/dynamic_sampling.py [--tasks smoke modebench] [--seeds 8]

Both runs of a seed start with the same model, prompts and sampling seeds. Only the key differs. Each run adds a row to
bench/results/dynamic_sampling.jsonl, and another call continues after the last row. ``reward`` is the mean reward of
each step's prompts before groups are replaced, which is comparable between both. ``tokens`` and ``seconds`` are sums
since the start: prompt and completion tokens of all samples, and the time of the steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
from pathlib import Path

import torch
from made_by import append_record, begin
from overlap import STEPS, server, train
from overlap_task import TASKS

from grpo_recipes.paths import cache_root, find_code_root


def main() -> None:
    """Train each task with each seed in both ways, and add a row for each run to the result."""
    options = _parse_options()
    torch.set_num_threads(1)
    origin = begin(options.out)
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(record["task"], record["seed"], record["dynamic"]) for record in records}
    for name in options.tasks:
        missing = [
            pair for pair in itertools.product(range(options.seeds), (False, True)) if (name, *pair) not in known
        ]
        if not missing:
            continue
        task = TASKS[name](cache_root(os.environ) / "smoke")
        with tempfile.TemporaryDirectory() as folder, server(task) as port:
            for seed, dynamic in missing:
                keys = {"max_steps": STEPS, "dynamic_sampling": dynamic}
                rows = train(task, Path(folder) / f"{seed}-{dynamic}", port, seed, overlap=False, **keys)
                rewards = [row.get("dynamic_sampling/first_reward", row["reward"]) for row in rows]
                seconds = itertools.accumulate(row["seconds/step"] for row in rows)
                record = {
                    "task": name, "seed": seed, "dynamic": dynamic, "steps": STEPS,
                    "reward": [round(reward, 5) for reward in rewards],
                    "tokens": [int(row["num_tokens"]) for row in rows],
                    "seconds": [round(value, 2) for value in seconds],
                    "zero_std": [round(row["frac_reward_zero_std"], 4) for row in rows],
                    "groups_drawn": [row.get("dynamic_sampling/groups_drawn") for row in rows],
                }  # fmt: skip
                append_record(options.out, record, origin)
                print(
                    name, seed, dynamic, record["reward"][:3], record["reward"][-3:], record["tokens"][-1], flush=True
                )


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/dynamic_sampling.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
