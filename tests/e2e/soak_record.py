"""Append the results of a soak to the file GRPO_SOAK_RESULT (`make soak`: bench/results/soak.jsonl)."""

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
    """Append a line that compares both runs, with more ``facts``, if GRPO_SOAK_RESULT is set."""
    if FILE:
        append_record(Path(FILE), compared(name, disturbed, alone) | facts, ORIGIN)


def compared(name: str, disturbed: Launch, alone: Launch) -> dict[str, Any]:
    """Compare the two runs of a soak: restarts, repeated steps, rows and final weights."""
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
