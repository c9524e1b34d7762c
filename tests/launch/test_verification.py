"""The checkpoint of a resumed run is verified while its server starts, and trainers wait for the result."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_recipes.launch import verification
from grpo_recipes.launch.attempt import newest_step
from grpo_recipes.launch.monitor import StopSignals
from grpo_recipes.launch.processes import Ending
from grpo_recipes.launch.run import supervise
from grpo_recipes.launch.verification import CheckpointsDamaged, Verification, require_checkpoint
from grpo_recipes.process.tree import descendants
from grpo_recipes.runs import checkpoints
from grpo_recipes.runs.checkpoints import VerificationStopped, find_verified_checkpoint, publish_checkpoint
from grpo_recipes.runs.rundir import read_json, read_metrics, stop_file, write_json
from launch.fake_run import FakeRun


@pytest.fixture
def resumed(fake_run: Callable[..., FakeRun]) -> FakeRun:
    """A run of 8 steps that resumes from ``checkpoint-4``; ``checkpoint-2`` and rows of 4 steps are there too."""
    run = fake_run()
    for step in (2, 4):
        staged = run.folder / "checkpoints/partial" / f"checkpoint-{step}"
        staged.mkdir(parents=True)
        (staged / "model").write_bytes(b"weights")
        publish_checkpoint(staged, run.folder / "checkpoints", step, 1)
    times = {f"seconds/{name}": 0.1 for name in ("sample", "score", "update", "sync", "step")}
    rows = [{"step": step, "max_steps": 8, "reward": 0.5, "tokens_per_second": 1.0, **times} for step in range(1, 5)]
    (run.folder / "metrics.jsonl").write_text("".join(f"{row}\n".replace("'", '"') for row in rows))
    write_json(run.folder / "summary.json", {"status": "running", "resumed_at": [0, 4]})
    identity = {"updated_rewards": [{"after_step": 1}, {"after_step": 4}]}
    write_json(run.folder / "run.json", identity)
    run.attempt = replace(run.attempt, first_step=4)
    return run


def damage(run: FakeRun, *steps: int) -> None:
    for step in steps:
        (run.folder / f"checkpoints/checkpoint-{step}/model").write_bytes(b"w\0ights")


def test_the_server_starts_during_the_verification_and_trainers_after_it(
    resumed: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    def verify(*arguments: object) -> Path | None:
        resumed.wait_until((resumed.folder / "processes/server.json").exists)
        events.append(("server runs, trainer runs", (resumed.folder / "processes/trainer.json").exists()))
        return find_verified_checkpoint(*arguments)

    monkeypatch.setattr(verification, "find_verified_checkpoint", verify)
    assert resumed.end() == Ending(0)
    assert events == [("server runs, trainer runs", False)]
    assert [row["step"] for row in read_metrics(resumed.folder)] == list(range(1, 9))
    assert resumed.summary()["resumed_at"] == [0, 4]


def test_a_damaged_checkpoint_moves_the_start_of_the_trainers_back(
    resumed: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(resumed, 4)
    assert resumed.end() == Ending(0)
    out = capsys.readouterr().out
    fault = "model was changed since the run wrote it; renamed to checkpoint-4.damaged, resuming from checkpoint-2"
    assert f"grpo: checkpoint-4 is damaged: {fault}\ngrpo: resuming from checkpoint-2; 2 later rows" in out
    assert [row["step"] for row in read_metrics(resumed.folder)] == list(range(1, 9))
    assert (resumed.folder / "metrics.redone.jsonl").read_text().count("\n") == 2
    assert (resumed.summary()["resumed_at"], resumed.attempt.first_step) == ([0, 2], 2)
    assert read_json(resumed.folder / "run.json")["updated_rewards"] == [{"after_step": 1}, {"after_step": 2}]


def test_no_trainer_starts_without_an_undamaged_checkpoint(resumed: FakeRun) -> None:
    damage(resumed, 2, 4)
    with StopSignals() as stop, pytest.raises(CheckpointsDamaged, match="contains no checkpoint that can be resumed"):
        supervise(resumed.attempt, stop)
    assert not (resumed.folder / "processes/trainer.json").exists() and descendants() == []
    assert newest_step(resumed.attempt.run) == 4 and len(read_metrics(resumed.folder)) == 4
    assert not resumed.attempt.scratch.disk.exists()


def test_the_end_of_the_launch_stops_the_verification(resumed: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = resumed.folder / "checkpoints"
    staged = folder / "partial/checkpoint-6"
    staged.mkdir(parents=True)
    with (staged / "model").open("wb") as file:
        file.truncate(64 * 2**20)
    publish_checkpoint(staged, folder, 6, 1)
    monkeypatch.setattr(checkpoints, "_BUFFER_BYTES", 16)  # takes seconds
    stopped = Verification(folder)
    with pytest.raises(KeyboardInterrupt), stopped:
        raise KeyboardInterrupt
    with pytest.raises(VerificationStopped):
        stopped.wait(lambda: None)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("digests")]
    assert (folder / "checkpoint-6").is_dir()


def test_a_request_to_stop_during_the_verification_ends_the_attempt(
    resumed: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(folder: Path, say: object, stopped: Callable[[], bool]) -> None:
        stop_file(resumed.folder).touch()
        resumed.wait_until(stopped)

    monkeypatch.setattr(verification, "find_verified_checkpoint", verify)
    assert resumed.end().code == 75
    assert not (resumed.folder / "processes/trainer.json").exists()


def test_sizes_are_compared_before_anything_starts(resumed: FakeRun) -> None:
    for step in (2, 4):
        (resumed.folder / f"checkpoints/checkpoint-{step}/model").unlink()
    with pytest.raises(Exception, match=r"checkpoint-4 \(model is missing\), checkpoint-2 \(model is missing\)"):
        require_checkpoint(resumed.folder / "checkpoints")
