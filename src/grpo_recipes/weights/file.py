"""The ``file`` bridge: safetensors in shared memory, which the server reloads."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors


class FileClient(BridgeClient):
    """Works on any device; needs a folder that trainer and server both see."""

    bridge = "file"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """No channel to open: the server reads files."""

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        folder = self.settings.sync_dir
        folder.mkdir(parents=True, exist_ok=True)
        # Cloned: under ZeRO-3 and FSDP a gathered parameter is gone when the next one comes.
        tensors = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_params}
        temporary = folder / ".model.safetensors"
        save_file(tensors, temporary)
        temporary.replace(folder / "model.safetensors")
        self._sent = True
        self._through_restarts(self._resend)

    def _resend(self) -> None:
        self.call_workers("grpo_load", folder=str(self.settings.sync_dir))
