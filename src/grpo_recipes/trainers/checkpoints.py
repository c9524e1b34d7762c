"""Saving so that a checkpoint is complete or not there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object

from grpo_recipes.launch.checkpoints import flush_shards, is_complete, prune, publish

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
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
            self._staging = None
        staged = folder / "partial" / name
        # Also where the ranks wait for one another: each has written its part once its digests are here.
        digests = dict(gather_object(list(flush_shards(staged, self.args.process_index).items())))
        if self.accelerator.is_main_process:
            publish(staged, folder, self.state.global_step, self.args.world_size, digests)
            prune(folder, limit)
        self.accelerator.wait_for_everyone()
