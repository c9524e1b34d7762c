"""Measure what dynamic_sampling gains for its samples and its time.

    python bench/dynamic_sampling.py curves [--tasks smoke modebench] [--seeds 8]
    python bench/dynamic_sampling.py time [--rounds 6]

``curves``: runs with and without it, in turn. Both runs of a seed start with the same model, prompts and sampling
seeds. Only the key differs. ``reward`` is the mean reward of each step's prompts before groups are replaced, which is
comparable between both. ``tokens`` and ``seconds`` are sums since the start: prompt and completion tokens of all
samples, and the time of the steps.

``time``: the seconds of a step with a reward that takes a second, if the next round is sampled during the rewards and
if it is sampled after them, A B B A ... Half of the prompts give a group equal rewards. A ratio compares the two
medians of a round.

Each run of ``curves`` adds a row to bench/results/dynamic_sampling.jsonl, and another call continues after the last
row. ``time`` adds one row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from made_by import append_record, begin
from overlap import STEPS, server, train
from overlap_task import TASKS

from grpo_recipes.paths import cache_root, find_code_root
from grpo_recipes.trainers.ahead import RoundsAhead

REWARD_SECONDS = 1.0
TIMED_STEPS, SKIPPED = 10, 3  # of a timed run; skipped steps do not know yet how many groups are dropped
TIMED_KEYS: dict[str, Any] = {"max_completion_length": 48, "generation_kwargs": {"ignore_eos": True}}


def main() -> None:
    """Measure, and add rows to the result."""
    options = _parse_options()
    torch.set_num_threads(1)
    PARTS[options.part](options, begin(options.out))


def curves(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Train each task with each seed in both ways."""
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(record["task"], record["seed"], record["dynamic"]) for record in records if "dynamic" in record}
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


def timed(options: argparse.Namespace, origin: dict[str, Any]) -> None:
    """Time steps that sample the next round during the rewards, and steps that sample it after them, in turn."""
    task = replace(TASKS["smoke"](cache_root(os.environ) / "smoke"), reward=slow_reward)
    steps: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder, server(task) as port:
        for index in range(options.rounds):
            for ahead in (False, True) if index % 2 == 0 else (True, False):
                RoundsAhead.samples_rounds = ahead
                keys = {"max_steps": TIMED_STEPS, "dynamic_sampling": True, **TIMED_KEYS}
                run_folder = Path(folder) / f"{index}-{ahead}"
                rows = train(task, run_folder, port, index, overlap=False, **keys)[SKIPPED:]
                names = ("seconds/step", "dynamic_sampling/rounds", "dynamic_sampling/groups_drawn")
                steps[ahead].append({name: statistics.median(row[name] for row in rows) for name in names})
            print(index, steps[False][-1], steps[True][-1], flush=True)
    ratios = [
        after["seconds/step"] / before["seconds/step"] for before, after in zip(steps[False], steps[True], strict=True)
    ]
    record = {
        "part": "time", "completions": 256, "tokens": TIMED_KEYS["max_completion_length"],
        "reward_seconds": REWARD_SECONDS, "rounds": len(ratios),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min_max": [round(min(ratios), 4), round(max(ratios), 4)],
        "after_the_rewards": steps[False], "during_the_rewards": steps[True],
    }  # fmt: skip
    append_record(options.out, record, origin)
    print(json.dumps(record, indent=1))


def slow_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Return rewards after a second; for half of the prompts they are all equal."""
    time.sleep(REWARD_SECONDS)
    checksums = [
        (zlib.crc32(repr(prompt).encode()), zlib.crc32(repr(text).encode()))
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    return [float(of_prompt % 2 and of_completion % 2) for of_prompt, of_completion in checksums]


PARTS = {"curves": curves, "time": timed}


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/dynamic_sampling.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
