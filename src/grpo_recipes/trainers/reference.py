"""The reference model: whole under FSDP, and in checkpoints where it moves (``sync_ref_model``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from grpo_recipes.recipe.configs import GRPOConfig
from grpo_recipes.trainers.rank import shards_weights

_RANK_0_LOADS = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@contextmanager
def loaded_by_every_rank(args: GRPOConfig) -> Iterator[None]:
    """Let every rank read the weights while TRL builds a reference under FSDP.

    With efficient loading rank 0 alone reads them. accelerate then sends them to the others for the policy; under FSDP2
    nobody does for the reference, and the other ranks' parts of it stay zero.
    """
    before = os.environ.get(_RANK_0_LOADS)
    if before is None or args.beta == 0.0:
        yield
        return
    os.environ[_RANK_0_LOADS] = "false"
    try:
        yield
    finally:
        os.environ[_RANK_0_LOADS] = before


class SyncedReference:
    """Mixin before TRL's trainer: with ``sync_ref_model``, saves the reference and goes on from it.

    TRL builds the reference from the initial model in every process that starts, a resumed one included. Without
    ``sync_ref_model`` that is what it is.
    """

    def _reference_file(self, folder: str) -> Path:
        """This rank's where each holds a part, else rank 0's."""
        rank = self.args.process_index if shards_weights(self.accelerator) else 0
        return Path(folder) / f"reference_{rank}.pt"

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        writes = shards_weights(self.accelerator) or self.accelerator.is_main_process
        if self.args.sync_ref_model and writes:
            held = [_held(parameter) for parameter in self.ref_model.parameters()]
            torch.save(held, self._reference_file(output_dir))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """TRL's, and the reference; called on every resume."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None or not self.args.sync_ref_model:
            return
        path = self._reference_file(checkpoint)
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: sync_ref_model was not on when the checkpoint was made")
        saved = torch.load(path, map_location="cpu", weights_only=True)
        for parameter, value in zip(self.ref_model.parameters(), saved, strict=True):
            _held(parameter).copy_(value)
        self._say_restored("reference model as it was last synced")


def _held(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this process holds of a parameter, not a copy."""
    held = getattr(parameter, "ds_tensor", parameter).detach()  # ZeRO-3 keeps its part there
    return held.to_local() if isinstance(held, DTensor) else held
