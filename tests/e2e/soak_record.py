"""What a soak showed, as a line of the file that GRPO_SOAK_RESULT names (`make soak`: bench/results/soak.jsonl)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from real_runs import Launch, same_rows, weights_hash

from grpo_recipes.runs.rundir import read_rows

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))
from made_by import append_record, begin

FILE = os.environ.get("GRPO_SOAK_RESULT")
ORIGIN = begin(Path(FILE), target="soak") if FILE else {}


def record(name: str, disturbed: Launch, alone: Launch, **facts: Any) -> None:
    """Add a line, where a file is asked for: both runs by their own files, and ``facts`` of the test."""
    if FILE:
        append_record(Path(FILE), compared(name, disturbed, alone) | facts, ORIGIN)


def compared(name: str, disturbed: Launch, alone: Launch) -> dict[str, Any]:
    """The two runs of a soak: what happened, and in what they are the same."""
    summary = disturbed.summary()
    return {
        "soak": name,
        "status": summary["status"],
        "steps": summary["steps"],
        "restarts": summary["restarts"],
        "steps_redone": len(read_rows(disturbed.run_dir / "metrics.redone.jsonl")),
        "same_rows": same_rows(disturbed, alone),
        "weights_sha256": [weights_hash(disturbed), weights_hash(alone)],
    }
