"""The bridge ``file``: safetensors in a folder that trainer and server both see, usually shared memory."""

import errno
import json
import os
import shutil
from math import prod
from pathlib import Path

import torch

from grpo_recipes.process.reports import gigabytes
from grpo_recipes.server.plugin import SYNC
from grpo_recipes.weights.client import BridgeClient, Metadata, NamedTensors

# Names of dtypes in the format of safetensors (https://huggingface.co/docs/safetensors).
_DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3"}
_ALIGNMENT = 8  # bytes: where the format lets the tensors begin


class FileClient(BridgeClient):
    """Safetensors in a folder that trainer and server both see, usually shared memory; the server reloads them."""

    bridge = "file"

    def init_communicator(self, device: torch.device | str | int = 0) -> None:
        """Do nothing: the server reads files, so there is no channel to open."""

    def _send(self, metadata: Metadata, named_params: NamedTensors) -> None:
        self._sync += 1
        write_weights(Path(os.environ["GRPO_SYNC_DIR"]), metadata, named_params, self._sync)
        self._through_restarts(self._resend)

    def _resend(self) -> None:
        self.call_workers("grpo_load", folder=os.environ["GRPO_SYNC_DIR"])


def write_weights(folder: Path, metadata: Metadata, named_params: NamedTensors, sync: int = 0) -> None:
    """Write ``model.safetensors``, which a reader finds whole or not at all; OSError where there is no room for it.

    ``sync`` is the number of the sync, which the file says beside the weights.
    The file before, which the server has loaded, is written over: memory that is new takes most of the time of a write.
    Each tensor is written as it comes, so that none is copied: under ZeRO-3 and FSDP a gathered one is gone when the
    next one comes. The library of the format takes all of them at once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    header, size = {}, 0
    for name, dtype, shape in metadata:
        begins, size = size, size + prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begins, size]}
    file, temporary = folder / "model.safetensors", folder / ".model.safetensors"
    if file.exists():
        file.replace(temporary)
    reused = temporary.stat().st_size if temporary.exists() else 0
    if size > (free := shutil.disk_usage(folder).free + reused):
        what = f"{gigabytes(size)} of weights do not fit into {folder}, {gigabytes(free)} free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {what}. Fix: make room there, or make it larger")
    text = json.dumps({**header, "__metadata__": {"format": "pt", SYNC: str(sync)}}).encode()
    text = text.ljust(-(-len(text) // _ALIGNMENT) * _ALIGNMENT)
    temporary.touch()
    with temporary.open("r+b", buffering=0) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for (name, dtype, _), (given, tensor) in zip(metadata, named_params, strict=True):
            assert name == given, f"{given} came in the place of {name}"
            flat = tensor.detach().to("cpu", getattr(torch, dtype)).contiguous().view(-1)
            rest = memoryview(flat.view(torch.uint8).numpy())
            while rest:  # the system writes at most 2 GiB at once
                rest = rest[out.write(rest) :]
        out.truncate()
    temporary.replace(file)
