"""Supervised fine-tuning, then GRPO, in one launch: GRPO alone gets no reward, and a stop in GRPO resumes there."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import documented
from real_runs import REPOSITORY, Launch

from grpo_recipes.runs.rundir import find_run, read_json, read_metrics

GRPO = str(REPOSITORY / "recipes/smoke/sft_grpo.yaml")


def find_folder(run: Launch, name: str) -> Path | None:
    """Return the run directory with a run name; None before it exists."""
    folders = [path.parent for path in (run.folder / "runs").glob(f"{name}-2*/summary.json")]
    return folders[0] if folders else None


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_grpo_learns_only_after_supervised_fine_tuning(launch: Callable[..., Launch]) -> None:
    alone = launch(GRPO, "--max_steps", "3", "--save_strategy", "no", folder="alone")
    assert alone.wait(600) == 0
    assert all(row["reward"] == 0 for row in alone.rows())

    words = documented("grpo launch recipes/smoke/sft.yaml recipes/smoke/sft_grpo.yaml")
    pair = launch(*words[2:], folder="pair")

    def has_stepped() -> bool:
        folder = find_folder(pair, "smoke-sft-grpo")
        return folder is not None and len(read_metrics(folder, lenient=True)) >= 2

    pair.wait_for(has_stepped, "two steps of GRPO", timeout=600)
    pair.process.send_signal(signal.SIGINT)
    assert pair.wait(120) == 75
    sft, grpo = find_folder(pair, "smoke-sft"), find_folder(pair, "smoke-sft-grpo")
    assert sft is not None and grpo is not None
    tuned, stopped = read_json(sft / "summary.json"), read_json(grpo / "summary.json")
    assert tuned["status"] == "completed" and tuned["final_loss"] < tuned["initial_loss"] / 10
    assert stopped["status"] == "stopped" and find_run(sft.parent, "last").folder == grpo

    resumed = launch("--resume", "last", folder="pair")
    assert resumed.wait(900) == 0
    summary = read_json(grpo / "summary.json")
    assert summary["status"] == "completed" and summary["restarts"] == 1
    assert summary["initial_reward"] > 0.1
    assert summary["final_reward"] > summary["initial_reward"] + 0.05
    assert [row["step"] for row in read_metrics(grpo)] == list(range(1, summary["steps"] + 1))
    assert len(list((pair.folder / "runs").glob("*/run.json"))) == 2
    resumed.wait_for_nothing_left()
