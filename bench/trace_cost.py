"""Measure the CPU time that writing the trace adds to a step of a run.

    python bench/trace_cost.py RUN [--rounds 9] [--out bench/results/trace_cost.json]

Writes the spans that rank 0 of a finished RUN wrote between its first and last step again, to a file in the same
folder, and measures the CPU time of this thread. The result is the median over the rounds of the seconds per step, and
their fraction of the run's shortest step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from made_by import begin, write_record

from grpo_recipes.paths import find_code_root
from grpo_recipes.runs.rundir import Run
from grpo_recipes.runs.trace import FOLDER, Trace


def main() -> None:
    """Write the spans of a run again, several times, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Directory of a finished run")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=find_code_root() / "bench/results/trace_cost.json")
    options = parser.parse_args()
    origin = begin(options.out)
    run = Run(options.run)
    spans = [json.loads(line) for line in (run.folder / FOLDER / "rank_0.jsonl").read_text().splitlines()]
    steps = [span for span in spans if span["name"] == "step"]
    first, last = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]
    spans = [span for span in spans if first <= span["ts"] < last]
    cpu_seconds = [measure_writes(run.folder, spans) / len(steps) for _ in range(options.rounds)]
    step_seconds = min(run.numbers("seconds/step"))
    result = {
        "what": "CPU time of a rank to write its spans of a step, and the fraction of the shortest step",
        "steps": len(steps),
        "spans_per_step": len(spans) / len(steps),
        "bytes_per_step": sum(len(json.dumps(span)) + 1 for span in spans) / len(steps),
        "cpu_seconds_per_step": cpu_seconds,
        "shortest_step_seconds": step_seconds,
        "fraction_of_shortest_step": statistics.median(cpu_seconds) / step_seconds,
        "world_size": run.plan["batch"]["world_size"],
        "completions": run.plan["batch"]["completions"],
    }
    write_record(options.out, result, origin)
    print(json.dumps(result, indent=1))


def measure_writes(run_dir: Path, spans: list[dict]) -> float:
    """Write spans to a new trace next to the run's files, and return the CPU time of this thread in seconds."""
    folder = Path(tempfile.mkdtemp(dir=run_dir))
    try:
        trace = Trace("rank_0", folder)
        begun = time.thread_time()
        for span in spans:
            start = span["ts"] / 1e6
            trace.add(span["name"], start, start + span["dur"] / 1e6, span["track"], **span.get("args", {}))
        return time.thread_time() - begun
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
