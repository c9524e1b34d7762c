"""The bridge ``file``: safetensors in a folder that trainer and server both see, usually shared memory."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors


class FileClient(BridgeClient):
    """Safetensors in a folder that trainer and server both see, usually shared memory; the server reloads them."""

    bridge = "file"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, so there is no channel to open."""

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        folder = Path(os.environ["GRPO_SYNC_DIR"])
        folder.mkdir(parents=True, exist_ok=True)
        # Cloned: under ZeRO-3 and FSDP a gathered parameter is gone when the next one comes.
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_params}
        temporary = folder / ".model.safetensors"
        save_file(tensors, temporary)
        temporary.replace(folder / "model.safetensors")
        self._sent = True
        self._through_restarts(self._resend)

    def _resend(self) -> None:
        self.call_workers("grpo_load", folder=os.environ["GRPO_SYNC_DIR"])
