"""Send weights by ``weight_sync: file``: a safetensors file in a folder that trainer and server both see.

The folder is usually in shared memory. The server reloads the file after each write.
"""

import errno
import json
import os
import shutil
from math import prod
from pathlib import Path
from typing import Any

import torch

from grpo_recipes.process.reports import format_bytes
from grpo_recipes.server.plugin import SYNC
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors

# Names of dtypes in the format of safetensors (https://huggingface.co/docs/safetensors).
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
_ALIGNMENT = 8  # bytes; the format requires that tensors start at a multiple


class FileClient(BridgeClient):
    """Write the weights as safetensors to ``GRPO_SYNC_DIR``, and let the server reload them."""

    bridge = "file"

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        """Write the weights with the number of this sync, and let the server load the file."""
        self._sync += 1
        write_weights(Path(os.environ["GRPO_SYNC_DIR"]), metadata, named_params, self._sync)
        self._repeat_through_restarts(self._resend)

    def _resend(self) -> None:
        """Let every worker of the server load the file that was written last."""
        self.call_workers("grpo_load", folder=os.environ["GRPO_SYNC_DIR"])


def write_weights(folder: Path, metadata: Metadata, named_params: NamedTensors, sync: int = 0) -> None:
    """Write ``model.safetensors`` into ``folder``, which is created if needed. Raise OSError if space is missing.

    ``sync`` is the number of the sync, which is stored in the file's metadata. The previous file, which the server
    has loaded, is overwritten: allocating new memory takes most of the time of a write. During the write and after
    an error, the file is missing. Each tensor is written as it arrives, since under ZeRO-3 and FSDP a gathered
    tensor is freed when the next tensor arrives. The safetensors library would need all of them at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, Any] = {}
    size = 0
    for name, dtype, shape in metadata:
        start, size = size, size + prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [start, size]}
    file, temporary = folder / "model.safetensors", folder / ".model.safetensors"
    if file.exists():
        file.replace(temporary)
    reused = temporary.stat().st_size if temporary.exists() else 0
    if size > (free := shutil.disk_usage(folder).free + reused):
        problem = f"{format_bytes(size)} of weights do not fit into {folder}, {format_bytes(free)} free"
        fix = "free space there, or make it larger"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {problem}. Fix: {fix}")
    text = json.dumps({**header, "__metadata__": {"format": "pt", SYNC: str(sync)}}).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    temporary.touch()
    with temporary.open("r+b", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, _), (streamed_name, tensor) in zip(metadata, named_params, strict=True):
            assert name == streamed_name, f"expected {name}, got {streamed_name}"
            flat = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous().view(-1)
            unwritten = flat.view(torch.uint8).numpy().data
            while unwritten:  # the system writes at most 2 GiB at once
                unwritten = unwritten[out.write(unwritten) :]
        out.truncate()
    temporary.replace(file)
