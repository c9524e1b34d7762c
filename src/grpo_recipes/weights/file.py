"""The bridge ``file``: safetensors in a folder that trainer and server both see, usually shared memory."""

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from grpo_recipes.process.reports import gigabytes
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors


class FileClient(BridgeClient):
    """Safetensors in a folder that trainer and server both see, usually shared memory; the server reloads them."""

    bridge = "file"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, so there is no channel to open."""

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        write_weights(Path(os.environ["GRPO_SYNC_DIR"]), collected(named_params))
        self._sent = True
        self._through_restarts(self._resend)

    def _resend(self) -> None:
        self.call_workers("grpo_load", folder=os.environ["GRPO_SYNC_DIR"])


def collected(named_params: NamedTensors) -> dict[str, torch.Tensor]:
    """Return copies of all tensors: under ZeRO-3 and FSDP a gathered parameter is gone when the next one comes."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named_params}


def write_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write ``model.safetensors``, which a reader finds whole or not at all; OSError where there is no room for it."""
    folder.mkdir(parents=True, exist_ok=True)
    size, free = sum(one.nbytes for one in tensors.values()), shutil.disk_usage(folder).free
    if size > free:
        what = f"{gigabytes(size)} of weights do not fit into {folder}, {gigabytes(free)} free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {what}. Fix: make room there, or make it larger")
    temporary = folder / ".model.safetensors"
    save_file(dict(tensors), temporary)
    temporary.replace(folder / "model.safetensors")
