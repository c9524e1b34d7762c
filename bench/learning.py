"""Measure whether the recipes of programs and judges learn, over seeds, on CPU.

    python bench/learning.py [CASE...] [--seeds 1 2 3 4]

The cases:

* ``judge``: recipes/examples/judge.yaml with a fake judge that fails 30 % of all requests. It grades 10 if the
  completion contains the reference answer. A failed request is repeated once.
* ``code``: recipes/smoke/code.yaml (needs bubblewrap).

Each ``grpo launch`` adds a row to bench/results/learning.jsonl: the mean rewards of the first and the last ``OVER``
steps, the fraction of unscored completions, the rewards of evaluations, and the status. Failed runs get a row too.
Another call continues after the last row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from made_by import append_record, begin

from grpo_recipes.paths import find_code_root, module_command
from grpo_recipes.runs.rundir import read_json

sys.path.insert(0, str(find_code_root() / "tests"))
from fake_judge import FakeJudge

OUT = find_code_root() / "bench/results/learning.jsonl"
OVER = 5  # steps of a mean reward
FAILING = 0.3  # share of the judge's requests that fail
JUDGE_KEYS = ("--judge_prompt", "Solution: {answer}\nAnswer: {completion}", "--judge_retries", "1")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # recipe and flags
    "judge": ("recipes/examples/judge.yaml", JUDGE_KEYS),
    "code": ("recipes/smoke/code.yaml", ()),
}


def main() -> None:
    """Make the runs that the record does not have, and add a row for each."""
    options = _parse_options()
    origin = begin(options.out)
    records = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    known = {(record["case"], record["seed"]) for record in records}
    for case in options.cases or CASES:
        for seed in (seed for seed in options.seeds if (case, seed) not in known):
            row = measure(case, seed)
            append_record(options.out, row, origin)
            print(case, seed, row["status"], row["first_reward"], row["last_reward"], row["seconds"], flush=True)


def measure(case: str, seed: int) -> dict[str, Any]:
    """Train with the recipe of a case once, and return the row. The files of the run are removed."""
    recipe, flags = CASES[case]
    with tempfile.TemporaryDirectory() as folder, judge_variables(case) as (judge_flags, variables):
        Path(folder, "recipes").symlink_to(find_code_root() / "recipes")  # recipes name their files from the repository
        command = [*module_command("grpo_recipes", "launch", str(find_code_root() / recipe)), *flags, *judge_flags]
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "--seed", str(seed), "--run_root", folder],
            cwd=folder, env=os.environ | variables, capture_output=True, text=True,
        )  # fmt: skip
        seconds = round(time.perf_counter() - began, 1)
        runs = [path.parent for path in Path(folder).glob("*/metrics.jsonl")]
        if not runs:
            raise RuntimeError(f"{case}, seed {seed}: no step was made: {(done.stdout + done.stderr)[-3000:]}")
        result = summarize(runs[0])
    return {"case": case, "recipe": recipe, "seed": seed, "exit_code": done.returncode, **result, "seconds": seconds}


@contextlib.contextmanager
def judge_variables(case: str) -> Iterator[tuple[tuple[str, ...], dict[str, str]]]:
    """Yield the flags and variables of a fake judge that runs inside the block; none for other cases."""
    if case != "judge":
        yield (), {}
        return
    with FakeJudge(failing=FAILING).running() as judge:
        yield ("--judge_base_url", judge.url), {"JUDGE_KEY": judge.key}


def summarize(run: Path) -> dict[str, Any]:
    """Return status, steps, rewards and unscored completions of a run. Steps without any reward are left out."""
    rows = _read_rows(run / "metrics.jsonl")
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    unscored = [row.get("rewards/no_verdict", row.get("episodes/unscored", 0.0)) for row in rows]
    summary = read_json(run / "summary.json") or {}
    return {
        "status": summary.get("status"), "steps": len(rows),
        "first_reward": round(statistics.fmean(rewards[:OVER]), 4),
        "last_reward": round(statistics.fmean(rewards[-OVER:]), 4),
        "unscored": round(statistics.fmean(unscored), 4), "unscored_max": round(max(unscored), 4),
        "evaluated_rewards": [round(row["eval_reward"], 4) for row in _read_rows(run / "eval.jsonl")],
    }  # fmt: skip


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSONL file; [] if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: {', '.join(CASES)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if unknown := [case for case in options.cases if case not in CASES]:
        parser.error(f"unknown case '{unknown[0]}', expected one of {', '.join(CASES)}")
    return options


if __name__ == "__main__":
    main()
