"""A checkpoint is complete or it is not listed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

MARKER = "COMPLETE"

# Under DDP on CPU optimizer.pt is loaded with map_location "cpu:0", which torch cannot restore.
torch.serialization.register_package(5, lambda obj: None, lambda obj, where: obj if where.startswith("cpu:") else None)


class CompleteCheckpoints:
    """Mixin before TRL's trainer: write aside, wait for all ranks, mark, rename, and only then prune.

    transformers writes in place, picks the newest folder whether complete or not, and prunes by modification time
    inside the save, so that with a limit of 1 a kill can leave no checkpoint at all.
    """

    _staging: Path | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        folder = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"
        if is_complete(folder / name):
            return
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._staging = folder / "partial"
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
            self._staging = None
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            publish(folder / "partial" / name, folder, self.state.global_step, self.args.world_size)
            prune(folder, limit)
        self.accelerator.wait_for_everyone()


def publish(staged: Path, folder: Path, step: int, world_size: int) -> None:
    """Mark a staged checkpoint complete and put it in its place."""
    files = {str(path.relative_to(staged)): path.stat().st_size for path in sorted(staged.rglob("*")) if path.is_file()}
    for name in files:
        _flush(staged / name)
    (staged / MARKER).write_text(json.dumps({"step": step, "world_size": world_size, "files": files}, indent=1))
    _flush(staged / MARKER)
    target = folder / staged.name
    if target.exists():  # left incomplete by other software or a broken disk: never resumed, in the way
        shutil.rmtree(target)
    staged.rename(target)
    _flush(folder)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_complete(checkpoint: Path) -> bool:
    """Whether every file the marker lists is there in its full size."""
    try:
        marker = json.loads((checkpoint / MARKER).read_text())
    except (OSError, ValueError):
        return False
    return all(_size(checkpoint / name) == size for name, size in marker["files"].items())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    found = [path for path in folder.glob("checkpoint-*") if is_complete(path)]
    return sorted(found, key=lambda path: int(path.name.rsplit("-", 1)[1]))


def newest_complete(folder: Path) -> Path | None:
    """The checkpoint to resume from, or None."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def prune(folder: Path, limit: int | None) -> None:
    """Remove complete checkpoints beyond the ``limit`` newest, and what interrupted saves left."""
    shutil.rmtree(folder / "partial", ignore_errors=True)
    if limit is None:
        return
    for path in complete_checkpoints(folder)[:-limit]:
        (path / MARKER).unlink()  # from here on it is not listed, however far the removal comes
        shutil.rmtree(path)
