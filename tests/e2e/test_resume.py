"""A run that was killed goes on where its newest complete checkpoint stands, in the same directory."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest
from conftest import Launch

SHORT = ("--max_steps", "8", "--save_steps", "3", "--prompts_per_step", "4", "--num_generations", "8")


@pytest.mark.slow
def test_resume_last_continues_a_killed_run(launch: Callable[..., Launch]) -> None:
    first = launch(*SHORT, "--run_name", "resumed")
    first.wait_for_step(4)
    first.process.send_signal(signal.SIGKILL)
    first.wait(30)
    first_rows = first.rows()

    second = launch("--resume", "last")

    assert second.wait() == 0, second.output
    assert second.run_dir == first.run_dir
    assert "grpo: resuming from checkpoint-" in second.log("trainer")
    summary = second.summary()
    assert summary["status"] == "completed" and summary["restarts"] == 1 and summary["cause"] is None
    rows = second.rows()
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[:3] == first_rows[:3]
    redone = (second.run_dir / "metrics.redone.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in redone] == first_rows[3:]
    assert [path.name for path in sorted((second.run_dir / "checkpoints").glob("checkpoint-*"))] == [
        "checkpoint-6", "checkpoint-8"
    ]  # fmt: skip
    assert not (second.run_dir / "checkpoints" / "partial").exists()


def test_resume_refuses_changed_code_and_what_is_no_run(launch: Callable[..., Launch]) -> None:
    nothing = launch("--resume", "last")
    assert nothing.wait(20) == 2
    assert "--resume: there is no run in " in nothing.output

    folder = nothing.folder / "runs" / "old-20260101-000000"
    (folder / "processes").mkdir(parents=True)
    code = {"commit": "0" * 40, "patch_sha256": "", "lock_sha256": ""}
    (folder / "run.json").write_text(json.dumps({"run_name": "old", "code": code}))
    changed = launch("--resume", str(folder), folder="changed")
    assert changed.wait(20) == 2
    assert "--resume: the run was made at commit 0000" in changed.output
    assert "--allow-changed-code" in changed.output
