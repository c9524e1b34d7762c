"""How far recipes of environments learn on CPU, with a vLLM server and inside the trainer.

    python bench/environments.py recipes/environments/*_smoke.yaml [--seeds 1 2 3 4] [--colocate 1]

One whole run of ``grpo launch`` for each recipe and seed with a server, and for each seed of ``--colocate`` with vLLM
in the trainer, one after the other. Each adds a row to ``--out`` (bench/results/environments.jsonl): the reward before
and after (the means of the first 3 and the last 5 steps), what the benchmarks scored at the end, seconds, and versions.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from made_by import made_by

from grpo_recipes.paths import home, python_module
from grpo_recipes.runs.rundir import read_json

OUT = home() / "bench/results/environments.jsonl"


def measure(recipe: Path, mode: str, seed: int) -> dict[str, Any]:
    """Train with this recipe once, and return the row; RuntimeError with the end of the output where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        keys = ["--vllm_mode", mode, "--seed", str(seed), "--run_root", folder]
        began = time.perf_counter()
        command = [*python_module("grpo_recipes", "launch", str(recipe)), *keys]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RuntimeError(f"{recipe} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        (run,) = (path.parent for path in Path(folder).glob("*/summary.json"))
        summary, versions = read_json(run / "summary.json"), read_json(run / "run.json")["versions"]
        first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "recipe": str(recipe.resolve().relative_to(home())), "mode": mode, "seed": seed, "steps": summary["steps"],
        "initial_reward": round(summary["initial_reward"], 4), "final_reward": round(summary["final_reward"], 4),
        "episodes": {key: round(value, 4) for key, value in first.items() if key.startswith("episodes/")},
        "benchmarks": summary["benchmarks"], "seconds": round(seconds, 1), "versions": versions,
    }  # fmt: skip


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", type=Path)
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--colocate", nargs="*", type=int, default=[1])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    made = made_by()
    for mode, seeds in (("server", args.seeds), ("colocate", args.colocate)):
        for seed, recipe in ((seed, recipe) for seed in seeds for recipe in args.recipes):
            row = measure(recipe, mode, seed) | made
            print(f"{recipe.stem} {mode} {seed}: {row['initial_reward']} -> {row['final_reward']}", flush=True)
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
