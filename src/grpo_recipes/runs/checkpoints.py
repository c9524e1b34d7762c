"""Checkpoints on disk: a checkpoint is complete or it is not listed, and verified before it is resumed. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_recipes.errors import config_error
from grpo_recipes.paths import shown
from grpo_recipes.runs.digests import CHECKSUM, digests_under_way, has_its_checksum, with_checksum

MARKER = "COMPLETE"
_NAME = re.compile(r"checkpoint-(0|[1-9][0-9]*)", re.ASCII)
_LARGE_BYTES = 2 << 30  # reading it takes seconds, so that a word is due


def publish(staged: Path, folder: Path, step: int, world_size: int, digests: Mapping[str, str] | None = None) -> None:
    """Mark a staged checkpoint complete and put it in its place.

    Args:
        staged: the checkpoint, every rank's part of it written.
        folder: where it belongs.
        step: its optimizer step.
        world_size: how many training processes made it.
        digests: those made while the files were written, by name; the other files are read back.
    """
    files = {name: (staged / name).stat().st_size for name in _files(staged)}
    known = {name: digest for name, digest in (digests or {}).items() if name in files}
    with digests_under_way(staged, [name for name in files if name not in known]) as read:  # from the page cache
        for name in files:
            flush(staged / name)
        for name, digest in read:
            if isinstance(digest, OSError):
                raise digest
            known[name] = digest
    content = {"step": step, "world_size": world_size, "files": files, "digests": known}
    (staged / MARKER).write_text(json.dumps(with_checksum(content), indent=1))
    flush(staged / MARKER)
    target = folder / staged.name
    if target.exists():  # left incomplete by other software or a broken disk: never resumed, in the way
        shutil.rmtree(target)
    staged.rename(target)
    flush(folder)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def flush(path: Path) -> None:
    """Bring a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _marker(checkpoint: Path) -> dict[str, Any] | None:
    """Return what a checkpoint's marker says; None unless it is one that ``publish`` wrote for this folder."""
    named = _NAME.fullmatch(checkpoint.name)
    try:
        content = json.loads((checkpoint / MARKER).read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if named is None or not isinstance(content, dict):
        return None
    files, world_size = content.get("files"), content.get("world_size")
    if not isinstance(files, dict) or not all(isinstance(size, int) for size in [world_size, *files.values()]):
        return None
    if content.get("step") != int(named[1]) or (_is_verifiable(content) and not has_its_checksum(content)):
        return None
    return content


def _is_verifiable(marker: Mapping[str, Any]) -> bool:
    """Return whether a marker has digests; those of earlier versions had sizes alone."""
    return "digests" in marker or CHECKSUM in marker


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file that the marker lists is there in its full size; their bytes are not read."""
    marker = _marker(checkpoint)
    return marker is not None and all(_size(checkpoint / name) == size for name, size in marker["files"].items())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):  # not there, or a name that no file can have
        return -1


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest step first."""
    return [path for path in checkpoint_folders(folder) if is_complete(path)]


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the folders that are named as checkpoints are, oldest step first; ``checkpoint-6.bak`` is none of them."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint folder is named after."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def world_size_of(checkpoint: Path) -> int:
    """How many training processes made a complete checkpoint."""
    return int(json.loads((checkpoint / MARKER).read_text())["world_size"])


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint that has every file in its full size, or None."""
    found = complete_checkpoints(folder)
    return found[-1] if found else None


def verified_checkpoint(folder: Path, say: Callable[[str], None]) -> Path | None:
    """Return the checkpoint to resume from, each byte of it verified; None where none was ever saved.

    It is ``newest_complete`` afterwards, for the ranks too: damaged checkpoints that are newer are renamed to
    ``checkpoint-6.damaged``. Nothing is deleted.

    Args:
        folder: the run's checkpoints.
        say: prints a line for the person who watches.

    Raises:
        ConfigError: there are checkpoints and none can be resumed, or the folder is something else. Nothing is renamed.
    """
    if folder.exists() and not folder.is_dir():
        raise config_error(shown(folder), "is not a folder; a run keeps its checkpoints there", "move it away")
    damaged: list[tuple[Path, str]] = []
    for checkpoint in reversed(checkpoint_folders(folder)):
        what = damage(checkpoint, say)
        if what is None:
            for other, why in damaged:
                say(f"{other.name} is damaged: {why}; it is now {_aside(other).name}, resuming from {checkpoint.name}")
            return checkpoint
        damaged.append((checkpoint, what))
    if damaged:
        each = ", ".join(f"{checkpoint.name} ({why})" for checkpoint, why in damaged)
        fix = "launch the recipe as a new run, or move this folder away to start this run again from step 0"
        raise config_error(shown(folder), f"holds no checkpoint that can be resumed: {each}", fix)
    return None


def damage(checkpoint: Path, say: Callable[[str], None]) -> str | None:
    """Return what is wrong with a checkpoint, naming the file, or None. All of it is read, by several threads."""
    marker = _marker(checkpoint)
    if marker is None:
        return f"{MARKER} is {'damaged' if (checkpoint / MARKER).exists() else 'missing'}"
    files = marker["files"]
    for name, size in files.items():
        found = _size(checkpoint / name)
        if found != size:
            return f"{name} is missing" if found < 0 else f"{name} has {found:,} of {size:,} bytes"
    if not _is_verifiable(marker):
        say(f"note: {checkpoint.name} was saved without digests: its bytes cannot be verified")
        return None
    if sum(files.values()) > _LARGE_BYTES:
        say(f"verifying {checkpoint.name} ({sum(files.values()) / 1e9:.0f} GB)")
    with digests_under_way(checkpoint, sorted(files, key=files.__getitem__, reverse=True)) as digests:
        for name, digest in digests:
            if isinstance(digest, OSError):
                return f"{name} cannot be read ({digest.strerror})"
            if digest != marker["digests"].get(name):
                return f"{name} no longer has the bytes that were saved"
    return None


def _aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is not listed any more."""
    tries = [f"{checkpoint.name}.damaged", *(f"{checkpoint.name}.damaged-{number}" for number in range(2, 1000))]
    free = next(checkpoint.with_name(name) for name in tries if not checkpoint.with_name(name).exists())
    return checkpoint.rename(free)


def prune(folder: Path, limit: int | None) -> None:
    """Remove complete checkpoints beyond the ``limit`` newest, and what interrupted saves left."""
    shutil.rmtree(folder / "partial", ignore_errors=True)
    if limit is None:
        return
    for path in complete_checkpoints(folder)[:-limit]:
        (path / MARKER).unlink()  # from here on it is not listed, however far the removal comes
        shutil.rmtree(path)
