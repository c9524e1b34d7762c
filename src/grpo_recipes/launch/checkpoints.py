"""Checkpoints on disk: a checkpoint is complete or it is not listed. No torch."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

MARKER = "COMPLETE"


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
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint folder is named after."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def world_size_of(checkpoint: Path) -> int:
    """How many training processes made a complete checkpoint."""
    return int(json.loads((checkpoint / MARKER).read_text())["world_size"])


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
