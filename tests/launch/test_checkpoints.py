"""A checkpoint is complete or it is not listed; on real files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from grpo_recipes.launch.checkpoints import (
    MARKER,
    complete_checkpoints,
    is_complete,
    newest_complete,
    prune,
    publish,
)

FILES = {
    "model.safetensors": b"weights" * 100,
    "trainer_state.json": b"{}",
    "global_step/rank_0.pt": b"state",
    "empty": b"",
}


def stage(folder: Path, step: int) -> Path:
    staged = folder / "partial" / f"checkpoint-{step}"
    for name, content in FILES.items():
        (staged / name).parent.mkdir(parents=True, exist_ok=True)
        (staged / name).write_bytes(content)
    return staged


def published(folder: Path, *steps: int) -> list[Path]:
    for step in steps:
        publish(stage(folder, step), folder, step, world_size=2)
    return [folder / f"checkpoint-{step}" for step in steps]


def test_publishing_moves_every_file_and_marks_last(tmp_path):
    (checkpoint,) = published(tmp_path, 5)
    assert is_complete(checkpoint)
    for name, content in FILES.items():
        assert (checkpoint / name).read_bytes() == content
    marker = json.loads((checkpoint / MARKER).read_text())
    assert (marker["step"], marker["world_size"]) == (5, 2)
    assert marker["files"] == {name: len(content) for name, content in FILES.items()}
    assert not (tmp_path / "partial/checkpoint-5").exists()


def test_an_unpublished_checkpoint_is_not_complete(tmp_path):
    stage(tmp_path, 5)
    assert not is_complete(tmp_path / "partial/checkpoint-5")
    assert complete_checkpoints(tmp_path) == [] and newest_complete(tmp_path) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"weights"),
        lambda folder: (folder / "model.safetensors").unlink(),
        lambda folder: (folder / "global_step/rank_0.pt").unlink(),
        lambda folder: (folder / "empty").write_bytes(b"x"),
        lambda folder: (folder / MARKER).unlink(),
        lambda folder: (folder / MARKER).write_text('{"step": 5, "fi'),
        lambda folder: (folder / MARKER).write_text(""),
    ],
    ids=["truncated", "missing", "missing-nested", "grown", "no-marker", "torn-marker", "empty-marker"],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, damage):
    older, newest = published(tmp_path, 5, 10)
    damage(newest)
    assert not is_complete(newest)
    assert newest_complete(tmp_path) == older


def test_newest_is_by_number_and_not_by_time(tmp_path):
    paths = published(tmp_path, 100, 20, 3)
    for path, seconds in zip(paths, (1, 2, 3), strict=True):
        os.utime(path, (seconds, seconds))
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["checkpoint-3", "checkpoint-20", "checkpoint-100"]
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-100"


def test_a_folder_that_does_not_exist_has_no_checkpoint(tmp_path):
    assert newest_complete(tmp_path / "none") is None


def test_what_stood_in_the_way_incomplete_is_replaced(tmp_path):
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5/model.safetensors").write_bytes(b"old")
    (checkpoint,) = published(tmp_path, 5)
    assert is_complete(checkpoint) and (checkpoint / "model.safetensors").read_bytes() == FILES["model.safetensors"]


@pytest.mark.parametrize(("limit", "left"), [(1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40]), (None, [10, 20, 30, 40])])
def test_pruning_keeps_the_newest(tmp_path, limit, left):
    published(tmp_path, 40, 10, 30, 20)
    prune(tmp_path, limit)
    assert complete_checkpoints(tmp_path) == [tmp_path / f"checkpoint-{step}" for step in left]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"checkpoint-{step}" for step in left)


def test_pruning_counts_complete_checkpoints_only(tmp_path):
    _, newest = published(tmp_path, 10, 20)
    (newest / MARKER).unlink()
    prune(tmp_path, 1)
    assert newest_complete(tmp_path) == tmp_path / "checkpoint-10"


def test_leftovers_of_an_interrupted_save_are_removed(tmp_path):
    published(tmp_path, 10)
    stage(tmp_path, 20)
    prune(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-10"]


def test_a_pruning_that_was_cut_short_leaves_nothing_that_is_listed(tmp_path):
    first, second = published(tmp_path, 10, 20)
    (first / MARKER).unlink()  # the first thing a removal does
    assert complete_checkpoints(tmp_path) == [second]
