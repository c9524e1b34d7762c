"""Measure how far healthy log-probs of server and trainer differ per dtype, the basis of weight_guard's tolerances.

    python bench/guard_tolerance.py [--steps 20] [--out bench/results/guard_tolerance.json]

Launches the smoke recipe once for each dtype and reads TRL's sampling_logp_difference from metrics.jsonl.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from made_by import begin, write_record

from grpo_recipes.paths import find_code_root
from grpo_recipes.runs.rundir import read_metrics
from grpo_recipes.weights.guard import TOLERANCES

CASES = {
    "float32": ["--dtype", "float32", "--bf16", "false"],
    "bfloat16": ["--dtype", "bfloat16", "--bf16", "false"],
    "float32 weights, bfloat16 autocast": ["--dtype", "float32", "--bf16", "true"],
}


def main() -> None:
    """Measure each case and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/guard_tolerance.json")
    options = parser.parse_args()
    origin = begin(options.out)
    cases = {name: _measure(flags, options.steps) for name, flags in CASES.items()}
    result = {
        "what": "mean and max over a batch of |log p_trainer - log p_server|, largest over the steps, smoke model, CPU",
        "cases": cases,
        "tolerances": TOLERANCES,
        "steps": options.steps,
    }
    write_record(options.out, result, origin)
    print(options.out.read_text())


def _measure(flags: list[str], steps: int) -> dict[str, float]:
    command = [str(Path(sys.executable).with_name("grpo")), "launch", str(find_code_root() / "recipes/smoke/grpo.yaml")]
    with tempfile.TemporaryDirectory() as folder:
        command += [*flags, "--max_steps", str(steps), "--save_strategy", "no", "--run_root", folder]
        subprocess.run(command, cwd=folder, env=dict(os.environ), check=True)
        (run,) = [path.parent for path in Path(folder).glob("*/run.json")]
        rows = read_metrics(run)
    prefix = "sampling/sampling_logp_difference/"
    return {
        "mean": max(row[f"{prefix}mean"] for row in rows),
        "max": max(row[f"{prefix}max"] for row in rows),
        "final_reward": sum(row["reward"] for row in rows[-5:]) / 5,
    }


if __name__ == "__main__":
    main()
