"""A killed run continues from its newest complete checkpoint, in the same directory."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable

import psutil
import pytest
from documented import documented
from real_runs import REPOSITORY, Launch, override, same_rows, stop_and_resume, weights_hash

from grpo_recipes.runs.checkpoints import list_complete_checkpoints, parse_step

SHORT = ("--max_steps", "8", "--save_steps", "3", "--prompts_per_step", "4", "--num_generations", "8")


@pytest.mark.slow
def test_resume_last_continues_a_killed_run(launch: Callable[..., Launch]) -> None:
    smoke = {"recipes/smoke/grpo.yaml": str(REPOSITORY / "recipes/smoke/grpo.yaml")}
    words = documented("grpo launch recipes/smoke/grpo.yaml", smoke)
    first = launch(*words[2:], *SHORT, "--run_name", "resumed")
    first.wait_for(lambda: first.has_run_dir() and checkpoints(first), "a checkpoint")
    first.wait_for_step(4)
    for process in first.processes():  # all processes, like a node that dies: a single rank would still save
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    first.wait(30)
    first.wait_for_nothing_left()
    first_rows = first.rows()

    second = launch(*documented("grpo launch --resume last")[2:])

    assert second.wait() == 0, second.output
    assert second.run_dir == first.run_dir
    assert "grpo: resuming from checkpoint-" in second.output
    summary = second.summary()
    assert summary["status"] == "completed" and summary["restarts"] == 1 and summary["cause"] is None
    rows = second.rows()
    assert [row["step"] for row in rows] == list(range(1, 9))
    redone = [json.loads(line) for line in (second.run_dir / "metrics.redone.jsonl").read_text().splitlines()]
    assert redone and rows[: len(first_rows) - len(redone)] + redone == first_rows
    assert checkpoints(second) == ["checkpoint-6", "checkpoint-8"]
    assert not (second.run_dir / "checkpoints" / "partial").exists()


def checkpoints(run: Launch) -> list[str]:
    return sorted(path.parent.name for path in (run.run_dir / "checkpoints").glob("checkpoint-*/COMPLETE"))


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_lost_a_bit_goes_on_from_the_one_before(launch: Callable[..., Launch]) -> None:
    first = launch(*override(SHORT, max_steps=100000, save_steps=2, use_vllm=False))
    first.wait_for(lambda: first.has_run_dir() and len(checkpoints(first)) > 1, "two checkpoints")
    for process in first.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    first.wait(30)
    first.wait_for_nothing_left()
    older, newest = list_complete_checkpoints(first.run_dir / "checkpoints")[-2:]
    weights = bytearray((newest / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(weights)

    second = launch("--resume", str(first.run_dir), "--max_steps", str(parse_step(newest)))

    assert second.wait() == 0, second.output
    damage = "model.safetensors was changed since the run wrote it"
    assert f"{newest.name} is damaged: {damage}; renamed to {newest.name}.damaged, resuming from {older.name}\n" in (
        second.output
    )
    assert f"grpo: resuming from {older.name}; " in second.output
    assert [row["step"] for row in second.rows()] == list(range(1, parse_step(newest) + 1))
    assert (newest.with_name(f"{newest.name}.damaged") / "model.safetensors").read_bytes() == bytes(weights)


@pytest.mark.slow
def test_a_signal_saves_after_the_step_and_the_run_goes_on(launch: Callable[..., Launch]) -> None:
    first = launch(*override(SHORT, max_steps=100000, save_steps=100000, num_processes=2))
    first.wait_for_step(2)

    rival = launch("--resume", str(first.run_dir), folder="rival")
    assert rival.wait(20) == 2
    assert "--resume: another launch is running in " in rival.output

    first.process.send_signal(signal.SIGUSR1)

    assert first.wait(60) == 75, first.output
    assert first.processes() == []
    stopped = len(first.rows())
    assert first.summary()["status"] == "stopped" and first.summary()["exit_code"] == 75
    assert f"stopped on request after step {stopped}, state saved" in first.output
    assert checkpoints(first) == [f"checkpoint-{stopped}"]
    assert not (first.run_dir / "model").exists()

    second = launch("--resume", str(first.run_dir), "--max_steps", str(stopped + 2))

    assert second.wait() == 0, second.output
    assert [row["step"] for row in second.rows()] == list(range(1, stopped + 3))
    assert second.rows()[:stopped] == first.rows()[:stopped]
    assert (second.run_dir / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_resumed_run_uses_the_prompts_of_its_first_attempt(launch: Callable[..., Launch]) -> None:
    held_out = {"eval_strategy": "steps", "eval_steps": 4, "eval_dataset_name": "smoke:sums"}
    flags = override(SHORT, save_steps=100000, use_vllm=False, **held_out)
    whole = launch(*flags, folder="whole")
    assert whole.wait() == 0, whole.output

    resumed = stop_and_resume(launch, *flags)

    log = resumed.log("trainer")
    assert all(log.count(f"grpo: using the prompts in prompts/{name}-") == 1 for name in ("train", "eval"))
    assert not (resumed.run_dir / "prompts").exists()  # the run has completed
    assert same_rows(resumed, whole) and weights_hash(resumed) == weights_hash(whole)


def test_resume_refuses_changed_code_and_what_is_no_run(launch: Callable[..., Launch]) -> None:
    nothing = launch("--resume", "last")
    assert nothing.wait(20) == 2
    assert "--resume: no runs found in " in nothing.output

    folder = nothing.folder / "runs" / "old-20260101-000000"
    (folder / "processes").mkdir(parents=True)
    code = {"commit": "0" * 40, "patch_sha256": "", "lock_sha256": ""}
    (folder / "run.json").write_text(json.dumps({"run_name": "old", "code": code}))
    changed = launch("--resume", str(folder), folder="changed")
    assert changed.wait(20) == 2
    assert "--resume: the run was made at commit 0000" in changed.output
    assert "--allow-changed-code" in changed.output
