"""`grpo compare` for real: three modes at the same time, each with a server of its own, and one table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, clean_environment, marked_processes

from grpo_recipes.runs.rundir import read_json

MODES = ["none", "shared_vllm", "lora_only"]


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.timeout(900)
def test_three_modes_run_side_by_side_and_end_in_one_table(tmp_path: Path) -> None:
    environment = clean_environment(tmp_path, "compare")
    recipe = "recipes/smoke/grpo.yaml"
    # Two syncs: the first server of `none` has the weights already, the second is started with them.
    words = documented(
        "grpo compare recipes/smoke/grpo.yaml --modes none,shared_vllm,lora_only --steps 20 --num_iterations 10",
        {recipe: str(REPOSITORY / recipe), "20": "3", "10": "2"},
    )
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("runs/comparisons/*/compare.json")
    rows = json.loads(path.read_text())["modes"]
    for row, name in zip(rows, MODES, strict=True):
        assert row["status"] == "completed" and row["benchmark"]["mode"] == row["mode"] == name
        assert row["benchmark"]["total_steps"] == 3 and 0 <= row["final_reward"] <= 1
    restart, shared, lora = rows
    assert [row["benchmark"]["syncs"] for row in rows] == [2, 0, 2]
    assert restart["benchmark"]["avg_sync_time_seconds"] > 10 * lora["benchmark"]["avg_sync_time_seconds"]
    assert 0 < lora["checkpoint_bytes"] < shared["checkpoint_bytes"] / 2  # an adapter, not a model
    ports = {read_json(path.parent / name / "plan.json")["ports"]["server"] for name in MODES}
    assert len(ports) == 3
    assert all(any(line.startswith(name) for line in done.stdout.splitlines()) for name in MODES)
    assert not marked_processes("compare")
