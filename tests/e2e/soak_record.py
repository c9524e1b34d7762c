"""What a soak showed, as a line of the file that GRPO_SOAK_RESULT names (`make soak`: bench/results/soak.jsonl)."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any

from real_runs import Launch, same_rows, weights_hash

from grpo_recipes.runs.rundir import read_json, read_rows


def record(name: str, disturbed: Launch, alone: Launch, **facts: Any) -> None:
    """Add a line, where a file is asked for: both runs by their own files, and ``facts`` of the test."""
    file = os.environ.get("GRPO_SOAK_RESULT")
    if file:
        with Path(file).open("a") as lines:
            lines.write(json.dumps(compared(name, disturbed, alone) | facts) + "\n")


def compared(name: str, disturbed: Launch, alone: Launch) -> dict[str, Any]:
    """The two runs of a soak: who they are, and in what they are the same."""
    identity = read_json(disturbed.run_dir / "run.json")
    summary = disturbed.summary()
    return {
        "soak": name,
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "began": identity["timestamp"],
        "commit": identity["code"]["commit"],
        "uncommitted_changes": identity["code"]["dirty"],
        "versions": identity["versions"],
        "status": summary["status"],
        "steps": summary["steps"],
        "restarts": summary["restarts"],
        "steps_redone": len(read_rows(disturbed.run_dir / "metrics.redone.jsonl")),
        "same_rows": same_rows(disturbed, alone),
        "weights_sha256": [weights_hash(disturbed), weights_hash(alone)],
    }
