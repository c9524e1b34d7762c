"""Saving so that a checkpoint is complete or not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from accelerate.utils import gather_object

from grpo_recipes.runs.checkpoints import flush, is_complete, prune, publish
from grpo_recipes.runs.digests import new_digest

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
        if self.accelerator.is_main_process:
            shutil.rmtree(folder / "partial", ignore_errors=True)  # of a save that was killed
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        self._staging = folder / "partial"
        staged = folder / "partial" / name
        try:
            with digested_saves(staged) as digests:
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
            self._staging = None
        if not self.accelerator.is_main_process:
            for written in digests:  # here, on the node that wrote it; the rest is rank 0's
                flush(staged / written)
        # The ranks wait here for one another, and so for the files of all.
        gathered = dict(gather_object(list(digests.items())))
        if self.accelerator.is_main_process:
            publish(staged, folder, self.state.global_step, self.args.world_size, gathered)
            prune(folder, limit)
        self.accelerator.wait_for_everyone()


@contextmanager
def digested_saves(folder: Path) -> Iterator[dict[str, str]]:
    """Make digests of what ``torch.save`` writes below a folder, optimizer and shards, while it is written.

    Reading it back costs several times as much, and over the network for a file of another node. What is written in
    another way (safetensors, JSON) is read back by ``publish``. torch's CRC-32 is left out of these files, because
    ``torch.load`` never checks it and it takes longer than the digest.

    Yields:
        Digests by name, filled as files are written, and final at the end: without files that were changed afterwards.
    """
    digests: dict[str, str] = {}
    written: dict[str, os.stat_result] = {}
    plain = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        path = Path(f) if isinstance(f, str | os.PathLike) else None
        if path is None or not path.is_relative_to(folder):
            return plain(obj, f, *args, **kwargs)
        crc32 = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            with path.open("wb") as file:
                digested = _Digested(file)
                plain(obj, digested, *args, **kwargs)
        finally:
            torch.serialization.set_crc32_options(crc32)
        name = str(path.relative_to(folder))
        digests[name], written[name] = digested.digest.hexdigest(), path.stat()
        return None

    torch.save = save
    try:
        yield digests
    finally:
        torch.save = plain
    for name, then in written.items():
        now = (folder / name).stat() if (folder / name).exists() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (then.st_size, then.st_mtime_ns):
            del digests[name]


class _Digested:
    """A file that makes a digest of what is written to it, with no more methods than ``torch.save`` needs."""

    _chunk_bytes = 1 << 20  # small enough to be in the core's cache when it is copied to the page cache

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = new_digest()

    def write(self, data: Any) -> int:
        """Write bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), self._chunk_bytes):
            chunk = view[start : start + self._chunk_bytes]
            self.digest.update(chunk)
            self._file.write(chunk)
        return len(view)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()
