"""A reward of the user's own in a real run: it hangs on some completions, leaves processes, and looks for secrets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from real_runs import REPOSITORY, SECRET, Launch

from grpo_recipes.process.tree import is_alive

REWARD = f"""
import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def sums(completions, answer, completion_ids):
    if not (HERE / "left").exists():
        (HERE / "left").write_text(str(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid))
    if any({SECRET!r} in value for value in os.environ.values()):
        (HERE / "secret").touch()
    if sum(completion_ids[0]) % 11 == 0:
        while True:
            pass
    return [float("<answer>" + answer[0] + "</answer>" in completions[0][-1]["content"])]
"""


@pytest.mark.slow
def test_a_run_goes_on_though_its_reward_hangs(launch: Callable[..., Launch], tmp_path: Path) -> None:
    reward_file = tmp_path / "own.py"
    reward_file.write_text(REWARD)
    flags = {
        "reward_funcs": "own.py:sums", "reward_timeout": 1, "reward_max_no_verdict": 0.9, "max_steps": 6,
        "prompts_per_step": 4, "num_generations": 8, "per_device_train_batch_size": 32, "save_strategy": "no",
    }  # fmt: skip
    run = launch(
        str(REPOSITORY / "recipes/smoke/grpo.yaml"),
        *[word for key, value in flags.items() for word in (f"--{key}", str(value))],
    )
    run.wait_for_step(1)
    reward_file.write_text("the run has its copy")
    assert run.wait() == 0, run.output

    rows = run.rows()
    shares = [row["rewards/sums/no_verdict"] for row in rows]
    assert len(rows) == 6 and 0 < max(shares) < 0.9
    assert all(row["rewards/no_verdict"] == share for row, share in zip(rows, shares, strict=True))
    assert all(0.0 <= row["reward"] <= 1.0 and row["reward"] == row["rewards/sums/mean"] for row in rows)
    slow = [json.loads(line) for line in (run.run_dir / "slow_rewards.jsonl").read_text().splitlines()]
    assert {(row["reward"], row["reason"]) for row in slow if row["reason"]} == {("own.py:sums", "time limit")}
    assert len([row for row in slow if row["reason"]]) == sum(round(share * 32) for share in shares)
    assert (run.run_dir / "rewards/own.py").read_text() == REWARD
    assert not (tmp_path / "secret").exists()
    assert not is_alive(int((tmp_path / "left").read_text()))
    assert run.processes() == []
