"""`grpo compare` for real: three modes at the same time, each with a server of its own, and one table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, clean_environment, marked_processes

from grpo_recipes.runs.rundir import read_json, read_metrics

MODES = ["none", "shared_vllm", "lora_only"]


def compared(folder: Path, words: list[str], timeout: int) -> tuple[list[dict], Path]:
    """Run a comparison; return its rows, each of a mode that completed, and its folder. The terminal shows each row."""
    mark = str(folder)
    environment = clean_environment(folder, mark)
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("runs/comparisons/*/compare.json")
    rows = json.loads(path.read_text())["modes"]
    for row, name in zip(rows, MODES, strict=True):
        assert row["status"] == "completed" and row["benchmark"]["mode"] == row["mode"] == name
        assert row["benchmark"]["total_steps"] == 3 and 0 <= row["final_reward"] <= 1
    table = [line.split() for line in done.stdout.splitlines() if line.startswith(tuple(f"{one} " for one in MODES))]
    assert [words[:3] for words in table] == [[name, "completed", "3"] for name in MODES], done.stdout
    assert not marked_processes(mark)
    return rows, path.parent


def ports_of(folder: Path, name: str) -> set[int]:
    """The ports of each mode's plan with this name."""
    return {read_json(folder / mode / "plan.json")["ports"][name] for mode in MODES}


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.timeout(900)
def test_three_modes_run_side_by_side_and_end_in_one_table(tmp_path: Path) -> None:
    recipe = "recipes/smoke/grpo.yaml"
    # Two syncs: the first server of `none` has the weights already, the second is started with them.
    words = documented(
        "grpo compare recipes/smoke/grpo.yaml --modes none,shared_vllm,lora_only --steps 20 --num_iterations 10",
        {recipe: str(REPOSITORY / recipe), "20": "3", "10": "2"},
    )
    (restart, shared, lora), folder = compared(tmp_path, words, 850)
    assert [row["benchmark"]["syncs"] for row in (restart, shared, lora)] == [2, 0, 2]
    assert restart["benchmark"]["avg_sync_time_seconds"] > 10 * lora["benchmark"]["avg_sync_time_seconds"]
    assert 0 < lora["checkpoint_bytes"] < shared["checkpoint_bytes"] / 2  # an adapter, not a model
    assert len(ports_of(folder, "server")) == 3


@pytest.mark.slow
@pytest.mark.rotating
@pytest.mark.timeout(1500)
def test_modes_whose_groups_come_from_environments_have_a_run_api_each(tmp_path: Path) -> None:
    pytest.importorskip("atroposlib")
    recipe = "recipes/atropos/smoke.yaml"
    words = documented(
        "grpo compare recipes/atropos/smoke.yaml --modes none,shared_vllm,lora_only --steps 20 --num_iterations 10",
        {recipe: str(REPOSITORY / recipe), "20": "3", "10": "2"},
    )
    (restart, shared, lora), folder = compared(tmp_path, words, 1400)
    assert [row["use_peft"] for row in (restart, shared, lora)] == [False, False, True]
    assert 0 < lora["checkpoint_bytes"] < shared["checkpoint_bytes"] / 2
    assert len(ports_of(folder, "server")) == len(ports_of(folder, "run_api")) == 3
    for mode in MODES:
        first, _, third = read_metrics(folder / mode)
        for row in (first, third):  # the second step is of the first one's groups
            assert row["atropos/rejected"] == row["atropos/lost_batches"] == 0
            assert row["atropos/tokens_per_second"] > 0
