"""What of a checkpoint is pushed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_recipes.publish.publisher import model_files, stage

Checkpoint = Callable[..., Path]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_model_without_the_state_of_training(checkpoint: Checkpoint) -> None:
    assert {path.name for path in model_files(checkpoint(3))} == {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize(
    ("strategy", "place"),
    [("every_save", None), ("checkpoint", "last-checkpoint"), ("all_checkpoints", "checkpoint-3")],
)
def test_it_is_kept_though_the_checkpoint_is_pruned(
    checkpoint: Checkpoint, tmp_path: Path, strategy: str, place: str | None
) -> None:
    made, folder = checkpoint(3), tmp_path / "staged"
    every = names(made)
    folders = stage(made, folder, strategy)
    assert folders == {str(folder / "model"): "", **({str(folder / "checkpoint"): place} if place else {})}
    shutil.rmtree(made)
    assert (folder / "model" / "model.safetensors").read_bytes() == b"weights 3"
    assert place is None or names(folder / "checkpoint") == every


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV, errno.EMLINK])
def test_it_is_copied_where_the_file_system_makes_no_links(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert stage(checkpoint(3), tmp_path / "staged", "every_save")
    assert (tmp_path / "staged" / "model" / "model.safetensors").read_bytes() == b"weights 3"


def test_shards_of_fsdp_are_no_model(checkpoint: Checkpoint, tmp_path: Path) -> None:
    sharded = checkpoint(3, files={"config.json": b"{}", "pytorch_model_fsdp.bin": b"shard"})
    assert stage(sharded, tmp_path / "staged", "every_save") == {}
    assert not (tmp_path / "staged").exists()
    assert list(stage(sharded, tmp_path / "staged", "checkpoint").values()) == ["last-checkpoint"]


def test_a_checkpoint_that_is_being_removed_is_not_pushed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    made = checkpoint(3)
    (made / "COMPLETE").unlink()
    assert stage(made, tmp_path / "staged", "checkpoint") == {}
    shutil.rmtree(made)
    made.mkdir()
    assert stage(made, tmp_path / "staged", "checkpoint") == {}
    assert not (tmp_path / "staged").exists()
