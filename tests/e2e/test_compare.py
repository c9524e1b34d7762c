"""`grpo compare` for real: two modes at the same time, each with a server of its own, and one table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, clean_environment, marked_processes

from grpo_recipes.runs.rundir import read_json


@pytest.mark.slow
@pytest.mark.rotating
def test_two_modes_run_side_by_side_and_end_in_one_table(tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, "compare")
    words = documented(
        "grpo compare recipes/smoke/grpo.yaml --modes file,shared_vllm,lora_only --steps 20",
        {
            "recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml"),
            "file,shared_vllm,lora_only": "shared_vllm,lora_only",
            "20": "3",
        },
    )
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("runs/comparisons/*/compare.json")
    shared, lora = json.loads(path.read_text())["modes"]
    for row, name in ((shared, "shared_vllm"), (lora, "lora_only")):
        assert row["status"] == "completed" and row["benchmark"]["mode"] == row["mode"] == name
        assert row["benchmark"]["total_steps"] == 3 and 0 <= row["final_reward"] <= 1
    assert shared["benchmark"]["syncs"] == 0 and lora["benchmark"]["syncs"] == 3
    assert 0 < lora["checkpoint_bytes"] < shared["checkpoint_bytes"] / 2  # an adapter, not a model
    ports = {read_json(path.parent / name / "plan.json")["ports"]["server"] for name in ("shared_vllm", "lora_only")}
    assert len(ports) == 2
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in ("shared_vllm", "lora_only"))
    assert not marked_processes("compare")
